"""Attribution of faults in graphs that are evaluated in float64, without runtimes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from attn_export.diagnose.evaluate import Evaluation
from attn_export.diagnose.fault_attribution import known_mistakes
from attn_export.diagnose.graph_evaluation import EvaluatedGraph
from attn_export.diagnose.graph_run import GraphRun, GraphRunner, KnownCase
from attn_export.results import Allowed, Case, Golden, GraphFile
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.protocol import Limits

BIAS = np.array([1, -2, 3], np.float32)


def biased_and_transposed() -> onnx.ModelProto:
    """Return a graph that adds `BIAS` to x `[2, 3]`, and transposes the sum."""
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["sum"], name="add"),
        helper.make_node("Transpose", ["sum"], ["y"], name="transpose", perm=[1, 0]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 2])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(BIAS, "bias")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])


def test_a_mistake_is_found_although_the_outputs_are_transposed():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    case = Case("one", "shape", {}, {"x": x}, "")
    golden = Golden(case, {"y": x}, {"y": x}, {"y": Allowed(1e-6, 1e-6)}, {})
    file = GraphFile("g.onnx", layouts={"y": (1, 0)})
    runner = GraphRunner(Path("g.onnx"), file, runtime("ort-cpu"), {}, Limits.default())
    suspect = EvaluatedGraph(runner, Evaluation(biased_and_transposed()), right=False)
    known = KnownCase("one", {}, {"x": x}, golden)
    trial = GraphRun(SimpleNamespace(outputs={"one": {"y": x + BIAS}}), (known,), ())
    found = known_mistakes(suspect, None, trial, [known], lambda: False)
    assert [match.mistake.kind for match in found.matches] == ["missing bias"]
