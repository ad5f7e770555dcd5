"""Graphs whose weights are read in pieces, and operators that the evaluation lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.errors import GraphError
from attn_export.parts.value_ranges.float_formats import FORMATS
from attn_export.parts.value_ranges.lockstep import Lockstep, RoundedRun
from attn_export.parts.value_ranges.range_flow import ranges_of
from attn_export.parts.value_ranges.streamed_graph import StreamedGraph

ROWS, WIDTH = 70_000, 64
"""A table with more elements than are multiplied together."""


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a graph that looks up rows of a table and multiplies by it, in external data."""
    table = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="lookup", axis=0),
        helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "turned"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes, "tied", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", ROWS])],
        [numpy_helper.from_array(table, "table")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path = tmp_path_factory.mktemp("tied") / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="weights")
    return path


def test_pieces_of_a_table_give_what_the_table_gives(tied: Path):
    table = numpy_helper.to_array(onnx.load(tied).graph.initializer[0]).astype(np.float64)
    ids = np.array([3, -1, 3, ROWS - 2])
    lockstep = Lockstep(StreamedGraph(tied), FORMATS["float16"])
    wide, narrow = lockstep.run({"ids": ids}, [lockstep.wide(), RoundedRun()])
    half = table.astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(wide["out"], table[ids] @ table.T, rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(
        narrow["out"], (half[ids] @ half.T).astype(np.float16).astype(np.float64)
    )


def test_the_written_graph_holds_half_of_the_weights(tied: Path, tmp_path: Path):
    output = tmp_path / "half.onnx"
    fix = ranges_of(tied, None, (), "float16", output).fix
    assert fix is not None
    assert (fix.passed, list(fix.nodes)) == (fix.judged, [])
    assert output.stat().st_size < 1.01 * 2 * ROWS * WIDTH


def test_an_operator_that_the_evaluation_lacks_is_refused_by_name(tmp_path: Path):
    node = helper.make_node(
        "CDist",
        ["x", "far"],
        ["out"],
        name="distance",
        domain="com.microsoft",
        metric="sqeuclidean",
    )
    graph = helper.make_graph(
        [node], "foreign", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.full((2, 4), 400, np.float32), "far")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save_model(model, tmp_path / "model.onnx")
    with pytest.raises(GraphError, match=r"cannot be evaluated in float64: .*CDist"):
        ranges_of(tmp_path / "model.onnx", None, (), "float16")
