"""Evaluations that hold only the weights and values that a node needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.errors import GraphError
from attn_export.float64 import streamed
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.float64.streamed import StreamedEvaluation

ROWS, WIDTH = 4096, 8


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a graph that looks up rows of a table and multiplies by it, beside another weight."""
    rng = np.random.default_rng(0)
    weights = {"table": (ROWS, WIDTH), "square": (WIDTH, ROWS)}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], axis=0),
        helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "turned"], ["scores"]),
        helper.make_node("MatMul", ["rows", "square"], ["others"]),
        helper.make_node("Add", ["scores", "others"], ["out"]),
        helper.make_node("Exp", ["out"], ["unread"]),
    ]
    graph = helper.make_graph(
        nodes, "tied", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", ROWS])],
        [numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
         for name, shape in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path = tmp_path_factory.mktemp("tied") / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="weights")
    return path


IDS = {"ids": np.array([3, -1, 3, ROWS - 2])}


@pytest.mark.parametrize("block", [2**9, 2**22])
def test_streamed_weights_give_what_whole_ones_give(
    tied: Path, block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streamed, "_BLOCK_ELEMENTS", block)
    found, expected = StreamedEvaluation(tied).outputs_at(IDS), Evaluation.load(tied).values(IDS)
    np.testing.assert_allclose(found["out"], np.asarray(expected["out"]), rtol=1e-13)


def test_a_row_that_is_not_in_the_table_is_an_error(tied: Path):
    with pytest.raises(GraphError, match=r"Gather .*cannot be computed"):
        StreamedEvaluation(tied).outputs_at({"ids": np.array([ROWS])})


@pytest.mark.parametrize("load", [StreamedEvaluation, Evaluation.load])
def test_a_value_is_dropped_after_its_last_reader(load: type[StreamedEvaluation], tied: Path):
    held: list[set[str]] = []
    graph = load(tied)

    def compute(node: onnx.NodeProto, values: Values) -> Values:
        held.append({"rows", "scores", "others"} & values.keys())
        return graph.compute_node(node, values)

    values = graph.values(IDS, compute, graph.outputs)
    assert {"out"} <= values.keys() <= {"out", ""}
    assert held[-3:] == [{"rows", "scores"}, {"scores", "others"}, set()]
