"""`pytorch`: PyTorch's attention as the runtime of graphs of one node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from attn_export.runtimes.catalogue import all_names, runtime
from attn_export.runtimes.process import run_once
from attn_export.runtimes.protocol import Limits

LIMITS = Limits(threads=1, seconds=60, memory_mib=None)
HEADS = ["query", "key", "value"]
ONE = helper.make_node("Attention", HEADS, ["output"])


def written(folder: Path, nodes: list[onnx.NodeProto]) -> Path:
    """Write a graph of nodes between query, key, value `[1, 2, 3, 4]` and the output."""
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 3, 4])
        for name in [*HEADS, "output"]
    ]
    graph = helper.make_graph(nodes, "g", ends[:3], ends[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, folder / "g.onnx")
    return folder / "g.onnx"


def test_it_gives_what_the_specification_says(tmp_path: Path):
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((1, 2, 3, 4)).astype("float32") for name in HEADS}
    graph = written(tmp_path, [ONE])
    ran = [
        run_once(runtime(name), graph, {"case": inputs}, LIMITS)
        for name in ("pytorch", "onnx-reference")
    ]
    assert [each.outcome for each in ran] == ["ran", "ran"], ran
    here, there = (each.outputs["case"]["output"] for each in ran)
    np.testing.assert_allclose(here, there, atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([ONE, helper.make_node("Relu", ["output"], ["more"])], "'Attention', 'Relu'"),
        ([helper.make_node("Attention", HEADS, ["output"], softcap=50.0)], "has no softcap"),
        ([helper.make_node("Relu", ["query"], ["output"])], "is one node Attention, not"),
    ],
    ids=["two nodes", "softcap", "no attention"],
)
def test_another_graph_is_refused(nodes: list[onnx.NodeProto], says: str, tmp_path: Path):
    inputs = {name: np.ones((1, 2, 3, 4), np.float32) for name in HEADS}
    ran = run_once(runtime("pytorch"), written(tmp_path, nodes), {"case": inputs}, LIMITS)
    assert ran.outcome == "refused"
    assert says in ran.complaint


def test_all_does_not_stand_for_it():
    assert "openvino" in all_names()
    assert "pytorch" not in all_names()
