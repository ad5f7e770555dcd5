"""Graphs that compute a mask, in the text form of ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from attention_forms import scatters
from onnx import numpy_helper

PAST = ", float[B,2,P,8] past_key, float[B,2,P,8] past_value"
PRESENT = ", float[B,2,S,8] present_key, float[B,2,S,8] present_value"

SIZES = """
  L = Shape <start: int = 2, end: int = 3> (Q)
  P = Shape <start: int = 2, end: int = 3> (past_key)
  S = Add (L, P)
  shape = Concat <axis: int = 0> (L, S)
  l = Squeeze (L)
  s = Squeeze (S)
  rows = Range (zero, l, one)
  keys = Range (zero, s, one)
  column = Unsqueeze (rows, ones)
  place = Add (column, P)
  before = LessOrEqual (keys, place)
"""

TABLE = 24
ALTERED = np.tri(TABLE, dtype=bool)
ALTERED[20, 3] = False

CONSTANTS = {
    "zero": np.int64(0), "one": np.int64(1), "ones": np.array([1]), "two": np.int64(2),
    "zeros": np.array([0]), "three": np.int64(3), "forty": np.int64(40), "third": np.array([3]),
    "million": np.int64(900_000), "four_thousand": np.int64(4096),
    "yes": np.bool_(True), "nothing": np.float32(0), "hidden": np.float32(-np.inf),
    "lowest": np.finfo(np.float32).min, "low": np.float32(-1e9), "not_low": np.float32(-1e4),
    "rather_low": np.float32(-5e6),
    "slope": np.float32(0.25), "table": np.tri(TABLE, dtype=bool), "altered": ALTERED,
}  # fmt: skip


def parsed(
    body: str, *, past: bool = True, given: str = "", attributes: str = "", opset: int = 23
) -> onnx.ModelProto:
    """Return a graph with one `Attention` that has a cache."""
    sizes = SIZES if past else SIZES.replace("Shape <start: int = 2, end: int = 3> (past_key)",
                                             "Identity (zeros)")  # fmt: skip
    node = f"Attention{attributes} (Q, K, V, mask{', past_key, past_value' if past else ''})"
    presents = ", present_key, present_value" if past else ""
    text = f"""<ir_version: 11, opset_import: ["" : {opset}]>
    g (float[B,4,L,8] Q, float[B,2,L,8] K, float[B,2,L,8] V{PAST if past else ""}{given})
      => (float[B,4,L,8] Y{PRESENT if past else ""}) {{
      {sizes}
      {body}
      Y{presents} = {node}
    }}"""
    model = onnx.parser.parse_model(text)
    return with_constants(model)


def with_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """Turn the constants that are read into initializers."""
    read = {name for node in model.graph.node for name in node.input}
    held = [numpy_helper.from_array(np.asarray(x), n) for n, x in CONSTANTS.items() if n in read]
    model.graph.initializer.extend(held)
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def in_place(mask: str) -> onnx.ModelProto:
    text = f"""<ir_version: 11, opset_import: ["" : 24]>
    g (float[B,2,L,8] Q, float[B,2,L,8] K, float[B,2,L,8] V, float[B,2,C,8] past_key,
       float[B,2,C,8] past_value, int64[B] past_length)
      => (float[B,2,L,8] Y, float[B,2,C,8] present_key, float[B,2,C,8] present_value) {{
      L = Shape <start: int = 2, end: int = 3> (Q)
      C = Shape <start: int = 2, end: int = 3> (past_key)
      rows = Range (zero, Squeeze (L), one)
      keys = Range (zero, Squeeze (C), one)
      column = Unsqueeze (rows, ones)
      start = Unsqueeze (past_length, later)
      place = Add (column, start)
      end = Add (start, L)
      longest = ReduceMax <keepdims: int = 0> (past_length)
      furthest = Add (column, longest)
      mask = {mask}
      Y = Attention (Q, present_key, present_value, mask, , , total)
    }}"""
    text = text.replace("Squeeze (L)", "l").replace("Squeeze (C)", "c")
    text = text.replace("rows =", "l = Squeeze (L) c = Squeeze (C) rows =")
    model = with_constants(onnx.parser.parse_model(text))
    later = onnx.numpy_helper.from_array(np.array([1, 2, 3]), "later")
    model.graph.initializer.append(later)
    nodes = [node for node in scatters() if node.op_type != "Shape"]
    nodes[-1].input[1] = "L"
    for index, node in enumerate(nodes):
        model.graph.node.insert(2 + index, node)
    return model


CAUSAL, GONE, STAYS, SPLIT = "causal", "gone", "stays", "split"

PADDING = ", bool[B,1,1,S] padding"
BIAS = ", float[B,1,1,S] bias"

TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a comparison": (CAUSAL, "mask = Identity (before)", {}),
    "of four axes": (CAUSAL, "four = Unsqueeze (before, zeros) mask = Unsqueeze (four, ones)", {}),
    "the lower triangle": (
        CAUSAL, "full = Expand (yes, shape) mask = Trilu <upper: int = 0> (full, P)", {},
    ),
    "the upper triangle of -inf": (
        CAUSAL,
        "next = Add (P, one) full = Expand (hidden, shape) mask = Trilu (full, next)", {},
    ),
    "-inf": (CAUSAL, "mask = Where (before, nothing, hidden)", {}),
    "the least float": (CAUSAL, "mask = Where (before, nothing, lowest)", {}),
    "-1e9": (CAUSAL, "mask = Where (before, nothing, low)", {}),
    "-1e4": (STAYS, "mask = Where (before, nothing, not_low)", {}),
    "-5e6": (STAYS, "mask = Where (before, nothing, rather_low)", {}),
    "more for what is visible": (STAYS, "mask = Where (before, slope, hidden)", {}),
    "a slice of a table": (
        CAUSAL, "rows_ = Slice (table, P, S, zeros) mask = Slice (rows_, zeros, S, ones)", {},
    ),
    "a table that differs late": (
        STAYS, "rows_ = Slice (altered, P, S, zeros) mask = Slice (rows_, zeros, S, ones)", {},
    ),
    "causal twice": (GONE, "mask = Identity (before)", {"attributes": " <is_causal: int = 1>"}),
    "everything": (GONE, "mask = Expand (yes, shape)", {}),
    "no cache": (CAUSAL, "mask = Identity (before)", {"past": False}),
    "the past is forgotten": (STAYS, "mask = LessOrEqual (keys, column)", {}),
    "one key more": (STAYS, "next = Add (place, one) mask = LessOrEqual (keys, next)", {}),
    "one key less": (STAYS, "mask = Less (keys, place)", {}),
    "one key less than all": (STAYS, "mask = Greater (keys, zero)", {}),
    "a window": (
        STAYS,
        "first = Sub (place, three) near = Greater (keys, first) mask = And (near, before)", {},
    ),
    "a window of 40": (
        STAYS,
        "first = Sub (place, forty) near = Greater (keys, first) mask = And (near, before)", {},
    ),
    "a window of 80, in two steps": (
        STAYS,
        "wide = Mul (forty, two) first = Sub (place, wide) near = Greater (keys, first) "
        "mask = And (near, before)", {},
    ),
    "a window of 4096": (
        STAYS,
        "first = Sub (place, four_thousand) near = Greater (keys, first) mask = And (near, before)",
        {},
    ),
    "a prefix": (STAYS, "prefix = Less (keys, two) mask = Or (prefix, before)", {}),
    "ALiBi": (
        STAYS,
        "away = Sub (keys, place) far = Cast <to: int = 1> (away) less = Mul (far, slope) "
        "base = Where (before, nothing, hidden) mask = Add (base, less)", {},
    ),
    "up to 40 queries": (STAYS, "many = Greater (L, forty) mask = Or (many, before)", {}),
    "up to 40 keys before": (STAYS, "many = Greater (P, forty) mask = Or (many, before)", {}),
    "from a size on that cannot be tried": (
        STAYS, "many = Greater (L, million) mask = Or (many, before)", {},
    ),
    "the first of a batch": (
        STAYS, "B = Shape <end: int = 1> (Q) more = Greater (B, ones) mask = Or (more, before)", {},
    ),
    "chance": (
        STAYS,
        "base = Where (before, nothing, hidden) some = RandomUniformLike (base) "
        "no = Greater (some, place_) mask = Where (no, base, base)".replace("place_", "nothing"),
        {},
    ),
    "given": (STAYS, "mask = Identity (padding)", {"given": PADDING}),
    "and padding": (SPLIT, "mask = And (before, padding)", {"given": PADDING}),
    "or not padding": (
        SPLIT,
        "later = Not (before) padded = Not (padding) none = Or (later, padded) mask = Not (none)",
        {"given": PADDING},
    ),
    "-inf, and padding": (
        SPLIT,
        "both = And (before, padding) mask = Where (both, nothing, hidden)", {"given": PADDING},
    ),
    "-inf and a bias": (
        SPLIT, "base = Where (before, nothing, hidden) mask = Add (base, bias)", {"given": BIAS},
    ),
    "a bias, or -inf": (SPLIT, "mask = Where (before, bias, hidden)", {"given": BIAS}),
    "a window and padding": (
        SPLIT,
        "first = Sub (place, three) near = Greater (keys, first) seen = And (near, padding) "
        "mask = And (seen, before)", {"given": PADDING},
    ),
    "the least float, and a bias": (
        STAYS, "base = Where (before, nothing, lowest) mask = Add (base, bias)", {"given": BIAS},
    ),
    "one key more, and padding": (
        STAYS,
        "next = Add (place, one) more = LessOrEqual (keys, next) mask = And (more, padding)",
        {"given": PADDING},
    ),
    "padding that counts what is visible": (
        STAYS,
        "seen = And (before, padding) ones_ = Cast <to: int = 7> (seen) "
        "count = ReduceSum (ones_, third) some = Greater (count, two) mask = And (seen, some)",
        {"given": PADDING},
    ),
    "padding alone hides": (STAYS, "mask = Or (before, padding)", {"given": PADDING}),
    "up to 40 queries, and padding": (
        STAYS,
        "many = Greater (L, forty) most = Or (many, before) mask = And (most, padding)",
        {"given": PADDING},
    ),
}  # fmt: skip
