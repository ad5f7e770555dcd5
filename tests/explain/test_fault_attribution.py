"""Attribution of faults in graphs that are evaluated in float64, without runtimes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.explain.fault_attribution import first_lossy, known_faults
from attn_export.explain.graph_evaluation import EvaluatedGraph, is_right_when_rounded
from attn_export.explain.graph_run import GoldenCase, GraphRun, GraphRunner
from attn_export.float64.evaluate import Evaluation, NotComputedError
from attn_export.results import Case, Golden
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.protocol import Limits
from attn_export.schema import GraphFile, Tolerance

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


@pytest.fixture
def suspect() -> EvaluatedGraph:
    file = GraphFile("g.onnx", layouts={"y": (1, 0)})
    runner = GraphRunner(Path("g.onnx"), file, runtime("ort-cpu"), {}, Limits.default())
    return EvaluatedGraph(runner, Evaluation(biased_and_transposed()), right=False)


def case_without_bias() -> GoldenCase:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    case = Case("one", "shape", {}, {"x": x}, "")
    golden = Golden(case, {"y": x}, {"y": x}, {"y": Tolerance(1e-6, 1e-6)}, {})
    return GoldenCase("one", {}, {"x": x}, golden)


def test_a_fault_is_found_although_the_outputs_are_transposed(suspect: EvaluatedGraph):
    case = case_without_bias()
    outputs = {"one": {"y": case.inputs["x"] + BIAS}}
    trial = GraphRun(SimpleNamespace(outputs=outputs), (case,), ())
    found, _ = known_faults(suspect, None, trial, [case], lambda _: False)
    assert [match.fault.kind for match in found] == ["missing bias"]


def test_a_graph_that_cannot_be_computed_from_rounded_values_has_no_lossy_node(
    suspect: EvaluatedGraph, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise NotComputedError(suspect.evaluation.nodes[0], ValueError("too large"))

    monkeypatch.setattr(suspect.evaluation, "rounded_values", refuse)
    assert not is_right_when_rounded(suspect, case_without_bias())
    assert first_lossy(suspect, [case_without_bias()], {}) is None
