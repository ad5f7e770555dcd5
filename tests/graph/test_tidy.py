"""Cleanup after nodes were replaced, and nodes that must stay."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from attn_export.graph.lower.tidy import tidy

BRANCHES = """
    <ir_version: 10, opset_import: ["" : 23]>
    g (float[n, 4] x, bool first) => (float[n, 4] y, float[n, 4] seen) {
      only = Sin (x)
      both = Cos (x)
      seen = Tan (x)
      y = If (first) <
        then_branch = a () => (float[n, 4] one) { part = Add (only, both) one = Add (part, seen) },
        else_branch = b () => (float[n, 4] other) { other = Neg (both) }
      >
    }"""

LOOP = """
    <ir_version: 10, opset_import: ["" : 23]>
    g (float[4] x, int64 times, bool go) => (float[4] y) {
      each = Sin (x)
      y = Loop (times, go, x) <
        body = a (int64 i, bool on, float[4] last) => (bool still, float[4] next) {
          still = Identity (on) next = Add (last, each) }
      >
    }"""

SIZES = """
    <ir_version: 10, opset_import: ["" : 23]>
    g (float[n, 4] x, float[m, n] z) => (int64[1] y, int64[1] w, float[4, n] t) {
      r = Relu (x)
      a = Shape <start: int = 0, end: int = 1> (r)
      b = Shape <start: int = 0, end: int = 1> (x)
      y = Add (a, b)
      c = Shape <start: int = 1, end: int = 2> (z)
      w = Add (c, b)
      t = Transpose <perm: ints = [1, 0]> (x)
    }"""

TOTAL_LENGTH = """<ir_version: 10, opset_import: ["": 24, "com.microsoft": 1]>
    length (TYPE[B, L, 8] x, bool first, int32[B] last) => (TYPE[B, L, 8] y) {
      length = Shape <start: int = 1, end: int = 2> (x)
      scalar = Squeeze (length)
      total = Cast <to: int = 6> (scalar)
      y = If (first) <then_branch = then () => (TYPE[B, L, 8] a) {
        a, k, v = com.microsoft.GroupQueryAttention <num_heads: int = 1, kv_num_heads: int = 1> (
          x, x, x, "", "", last, total)
      }, else_branch = otherwise () => (TYPE[B, L, 8] b) {
        b = Identity (x)
      }>
    }"""


def tidied(text: str) -> tuple[onnx.ModelProto, ir.Model]:
    original = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    model = ir.from_proto(original)
    tidy(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return original, model


def assert_same(original: onnx.ModelProto, model: ir.Model, **inputs: np.ndarray) -> None:
    before, after = (
        ReferenceEvaluator(m).run(None, inputs) for m in (original, ir.to_proto(model))
    )
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_values_that_one_branch_reads_move_into_it_and_no_others():
    original, model = tidied(BRANCHES)
    assert {node.op_type for node in model.graph} == {"Cos", "Tan", "If"}
    x = np.ones((2, 4), np.float32)
    for first in (True, False):
        assert_same(original, model, x=x, first=np.array(first))


def test_nothing_moves_into_a_loop():
    original, model = tidied(LOOP)
    assert [node.op_type for node in model.graph] == ["Sin", "Loop"]
    assert_same(original, model, x=np.ones(4, np.float32), times=np.array(3), go=np.array(True))


def test_sizes_are_read_from_inputs_once_and_outputs_stay_apart():
    original, model = tidied(SIZES)
    assert [node.op_type for node in model.graph] == ["Shape", "Add", "Add", "Transpose"]
    inputs = {"x": np.ones((3, 4), np.float32), "z": np.ones((2, 3), np.float32)}
    assert_same(original, model, **inputs)


def test_a_transpose_of_axes_of_1_is_part_of_the_reshape():
    text = """
    <ir_version: 10, opset_import: ["" : 23]>
    g (float[n, 1, 8] x, float[n, 3, 8] z) => (float[n, 2, 1, 4] y, float[n, 2, 3, 4] w)
    <int64[4] shape = {0, 0, 2, 4}> {
      a = Reshape (x, shape)
      y = Transpose <perm: ints = [0, 2, 1, 3]> (a)
      b = Reshape (z, shape)
      w = Transpose <perm: ints = [0, 2, 1, 3]> (b)
    }"""
    original, model = tidied(text)
    assert [node.op_type for node in model.graph] == ["Reshape", "Reshape", "Transpose"]
    random = np.random.default_rng(0)
    inputs = {
        name: random.standard_normal((2, L, 8), np.float32) for name, L in (("x", 1), ("z", 3))
    }
    assert_same(original, model, **inputs)


def test_a_branch_does_not_compute_the_total_length_of_attention_in_float16():
    # onnxruntime 1.31 with CUDA reads such a length on the host before it is copied there.
    for dtype, in_branch in (("float16", set()), ("float", {"Cast", "Shape", "Squeeze"})):
        _, model = tidied(TOTAL_LENGTH.replace("TYPE", dtype))
        (node,) = (x for x in model.graph if x.op_type == "If")
        branch = node.attributes["then_branch"].as_graph()
        assert {x.op_type for x in branch} == {"GroupQueryAttention", *in_branch}
        assert {x.op_type for x in model.graph} == {"If", "Shape", "Cast", "Squeeze"} - in_branch
