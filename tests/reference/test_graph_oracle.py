"""The reference of a graph without a module, where it decides without its inputs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from attn_export.cases.draw import generator
from attn_export.float64.evaluate import Evaluation
from attn_export.judge.judge import judge
from attn_export.reference.graph_oracle import GraphOracle
from attn_export.results import Case

BUCKETS = """
<ir_version: 10, opset_import: ["" : 18]>
attention (float[b, l, 8] x) => (float[b, l, 8] y)
<int64 zero = {0}, int64 one = {1}, int64 axis = {1}, int64 half = {8}, int64 last = {15},
 int64 shifted = {17}, float half_f = {8.0}, float base = {2.7725887}, float scale = {0.35}>
{
  size = Shape <start = 1, end = 2> (x)
  length = Squeeze (size)
  place = Range (zero, length, one)
  column = Unsqueeze (place, axis)
  signed = Sub (place, column)
  distance = Abs (signed)
  least = Max (distance, one)
  floating = Cast <to = 1> (least)
  ratio = Div (floating, half_f)
  log = Log (ratio)
  share = Div (log, base)
  steps = Mul (share, half_f)
  whole = DECIDE (steps)
  far = Add (half, whole)
  capped = Min (far, last)
  near = Less (distance, half)
  bucket = Where (near, distance, capped)
  is_shifted = Equal (distance, shifted)
  shift = Cast <to = 7> (is_shifted)
  index = Add (bucket, shift)
  bias = Gather (table, index)
  keys = Transpose <perm = [0, 2, 1]> (x)
  products = MatMul (x, keys)
  scaled = Mul (products, scale)
  scores = Add (scaled, bias)
  weights = Softmax <axis = -1> (scores)
  y = MatMul (weights, x)
}
"""
CAST = "Cast <to = 7>"


def buckets(replaced: dict[str, str] | None = None) -> Evaluation:
    """Return attention with a bias for each logarithmic bucket of distances, as in T5."""
    text = BUCKETS
    for old, new in {
        "shifted = {17}": "shifted = {-1}",
        **(replaced or {}),
        "DECIDE": CAST,
    }.items():
        text = text.replace(old, new)
    model = onnx.parser.parse_model(text)
    table = np.arange(24, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(np.cos(table), "table"))
    return Evaluation(model)


FLOORED = {"whole = DECIDE (steps)": "floored = Floor (steps)\n whole = DECIDE (floored)"}
WRONG = {
    "another base": {"2.7725887": "2.6"},
    "another number": {"half_f = {8.0}": "half_f = {9.0}"},
    "one bucket further": {"shifted = {17}": "shifted = {16}"},
    "a bucket too far inside": {"shifted = {17}": "shifted = {17}"},
}


@pytest.mark.parametrize("decide", [{}, FLOORED], ids=["a cast", "a floor"])
def test_distances_on_the_boundary_of_buckets_are_evidence(decide: dict[str, str]):
    x = generator("buckets").standard_normal((2, 40, 8)).astype(np.float32)
    graph = buckets(decide)
    oracle = GraphOracle(graph, "the graph", np.dtype(np.float32), {"y": ("b", "l", 8)})
    golden = oracle.golden(Case("one", "shape", {}, {"x": x}, ""))
    assert not golden.uncompared

    def statuses(graph: Evaluation) -> list[str]:
        rounded = graph.rounded_values({"x": x}, np.dtype(np.float32))
        outputs = {"y": np.float32(rounded["y"])}
        return [verdict.status for verdict in judge("", "", golden, outputs)]

    assert statuses(graph) == ["passed"]
    for wrong in WRONG.values():
        assert statuses(buckets(wrong)) == ["failed"]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_elements_are_gathered_by_indices_of_a_smaller_shape(axis: int):
    text = f"""
    <ir_version: 10, opset_import: ["" : 18]>
    gather (float[3, 4] x, int64[2, 2] at) => (float[2, 2] y)
    {{ y = GatherElements <axis = {axis}> (x, at) }}
    """
    inputs = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "at": np.array([[0, -1], [2, 1]])}
    y = Evaluation(onnx.parser.parse_model(text)).values(inputs)["y"]
    assert np.array_equal(y, [[0, 9], [8, 5]] if axis == 0 else [[0, 3], [6, 5]])


@pytest.mark.parametrize("operator", ["MatMul", "Gemm"])
def test_a_product_with_a_scalar_which_only_numpy_takes_has_a_reference(operator: str):
    text = f"""
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[] x) => (float[2, 2] y) <float[2, 2] w = {{1.0, 2.0, 3.0, 4.0}}>
    {{ y = {operator} (x, w) }}
    """
    graph, x = Evaluation(onnx.parser.parse_model(text)), np.array(3, np.float32)
    oracle = GraphOracle(graph, "the graph", np.dtype(np.float32), {"y": (2, 2)})
    golden = oracle.golden(Case("one", "shape", {}, {"x": x}, ""))
    assert golden.expected["y"].tolist() == [[3, 6], [9, 12]]
