"""Conversion of attention in contrib operators of ONNX Runtime back to `Attention` nodes.

Callers must compare the graph with its source: lengths that a node gets may hide keys.
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT
from attn_export.errors import GraphError
from attn_export.graph.ir_helpers import dims, set_type
from attn_export.graph.lower.newer_opset import raise_opset
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.read import SWAP_HEADS_AND_LENGTH
from attn_export.graph.lower.tidy import with_types
from attn_export.graph.ort_compat import make_ort_compatible

INPUTS = {
    "GroupQueryAttention": (
        "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
        "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale",
        "v_scale",
    ),
    "MultiHeadAttention": (
        "query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key",
        "past_value", "past_sequence_length", "cache_indirection",
    ),
}  # fmt: skip
"""The names of inputs, by operator."""

_REFUSED = frozenset({"cache_indirection", "k_scale", "past_sequence_length", "v_scale"})
_ATTRIBUTES = frozenset({
    "do_rotary", "kv_num_heads", "local_window_size", "mask_filter_value", "num_heads",
    "rotary_interleaved", "scale", "smooth_softmax", "softcap", "unidirectional",
})  # fmt: skip
"""Inputs that no standard operator has, and attributes that one has."""

_IDLE = (0, -1, "", "NONE", b"NONE")
"""Values of other attributes that change nothing."""

_OPSET = 23
"""The opset that introduced `Attention` and RotaryEmbedding."""

_Operands = Mapping[str, ir.Value]


def from_contrib(model: ir.Model) -> int:
    """Replace contrib attention by `Attention` nodes, and return their number."""
    nodes = [n for n in model.graph if n.domain == MICROSOFT and n.op_type in INPUTS]
    if nodes:
        raise_opset(model, _OPSET)
    for node in nodes:
        names = zip(INPUTS[node.op_type], node.inputs, strict=False)
        x = {name: value for name, value in names if value is not None}
        _refuse(node, x)
        convert = _grouped if node.op_type == "GroupQueryAttention" else _multi_head
        outputs = convert(Builder(model, node), node, x)
        for old, new in zip(node.outputs, outputs, strict=False):
            take_over(old, new)
        model.graph.remove(node, safe=True)
    if nodes:
        with_types(model)
        make_ort_compatible(model)
    return len(nodes)


def _refuse(node: ir.Node, x: _Operands) -> None:
    found = [name for name in x if name in _REFUSED]
    found += [
        name for name, attribute in node.attributes.items()
        if name not in _ATTRIBUTES and attribute.value not in _IDLE
    ]  # fmt: skip
    if any(value.uses() or value.is_graph_output() for value in node.outputs[3:]):
        found.append("the scores as an output")
    packed = node.op_type == "GroupQueryAttention" and not {"key", "value"} & x.keys()
    parts = ("query",) if packed else ("query", "key", "value")
    if any(name not in x or len(dims(x[name])) != 3 for name in parts):
        found.append("packed queries, keys and values")
    if ("past_key" in x) != ("past_value" in x):
        found.append("a cache of keys or values alone")
    if node.op_type == "GroupQueryAttention" and "past_key" in x:
        found.append("the cache")
    if found:
        raise GraphError(
            f"{node.name}: Attention cannot say {found[0]} of {node.op_type}; "
            "keep the graph as it is"
        )


def _attributes(node: ir.Node, *, causal: bool) -> dict[str, Any]:
    known = {n: node.attributes.get_float(n, 0.0) for n in ("scale", "softcap")}
    return {"is_causal": int(causal), **{n: number for n, number in known.items() if number}}


# -- GroupQueryAttention --------------------------------------------------------------------------


def _grouped(op: Builder, node: ir.Node, x: _Operands) -> Sequence[ir.Value]:
    """Return causal attention without a cache."""
    H = node.attributes.get_int("num_heads", 0)
    counts = (H, node.attributes.get_int("kv_num_heads", H))
    query, key, value = _parts(op, node, x, counts)
    if node.attributes.get_int("do_rotary", 0):
        positions = x.get("position_ids") or _positions(op, x["query"])
        query, key = (
            _rotated(op, node, part, count, x, positions)
            for part, count in zip((query, key), counts, strict=True)
        )
    query, key, value = (
        _split(op, part, count)
        for part, count in zip((query, key, value), (*counts, counts[1]), strict=True)
    )
    mask, dtype = x.get("attention_bias"), x["query"].dtype or ir.DataType.FLOAT
    window = node.attributes.get_int("local_window_size", -1)
    sink = _sink(op, node, x, counts[0])
    read = key, value
    if window > -1 or sink is not None:
        seen = _seen(op, x["query"], key, window, causal=sink is not None)
        if mask is not None or sink is not None:
            hidden = op.scalar(-np.inf, dtype)
            seen = op("Where", seen, op.scalar(0.0, dtype) if mask is None else mask, hidden)
        mask = seen
    if sink is not None:
        one_more = op.ints(0, 0, 0, 0, 0, 0, 1, 0)
        read = _longer(key, op("Pad", key, one_more)), _longer(value, op("Pad", value, one_more))
        before = op("Concat", op.ints(0, 0, 0), op.size(key, 2), op.ints(0, 0, 0, 0), axis=0)
        mask = op("Pad", mask, op.ints(*[0] * 7, 1))
        mask = op("Add", mask, op("Pad", sink, before))
        rows = dims(x["query"])[:2]
        set_type(mask, dtype, ir.Shape([rows[0], counts[0], rows[1], ir.SymbolicDim(None)]))
    attended = op("Attention", query, *read, mask, **_attributes(node, causal=sink is None))
    turned = op("Transpose", attended, perm=SWAP_HEADS_AND_LENGTH)
    return op("Reshape", turned, op.ints(0, 0, -1)), key, value


def _longer(part: ir.Value, padded: ir.Value) -> ir.Value:
    shape = ir.Shape([*dims(part)[:2], ir.SymbolicDim(None), dims(part)[3]])
    return set_type(padded, part.dtype, shape)


def _parts(op: Builder, node: ir.Node, x: _Operands, counts: tuple[int, int]) -> Sequence[ir.Value]:
    """Return queries, keys and values, `[B, L, .]`, which one operand may hold."""
    if "key" in x:
        return x["query"], x["key"], x["value"]
    packed, heads = x["query"], (counts[0], counts[1], counts[1])
    width = dims(packed)[-1]
    if not isinstance(width, int):
        raise GraphError(f"{node.name}: the width of {packed.name} is not known; declare it")
    sizes = [count * (width // sum(heads)) for count in heads]
    parts = op.add_node("Split", [packed, op.ints(*sizes)], 3, axis=2)
    for part, size in zip(parts, sizes, strict=True):
        set_type(part, packed.dtype, ir.Shape([*dims(packed)[:2], size]))
    return parts


def _sink(op: Builder, node: ir.Node, x: _Operands, heads: int) -> ir.Value | None:
    """Return the score of one more key, without a value, of each head, `[1, H, 1, 1]`, or None."""
    shape = op.ints(1, heads, 1, 1)
    if "head_sink" in x:
        return op("Reshape", op("Cast", x["head_sink"], to=x["query"].dtype), shape)
    if node.attributes.get_int("smooth_softmax", 0) > 0:
        return op("Expand", op.scalar(0.0, x["query"].dtype or ir.DataType.FLOAT), shape)
    return None


def _positions(op: Builder, query: ir.Value) -> ir.Value:
    """Return the position of each query, `[B, L]`."""
    numbers = op("Range", op.scalar(0), op("Squeeze", op.size(query, 1)), op.scalar(1))
    zeros = op("Expand", op.ints(0), op("Concat", op.size(query, 0), op.ints(1), axis=0))
    return op("Add", zeros, numbers)


def _rotated(
    op: Builder, node: ir.Node, part: ir.Value, count: int, x: _Operands, positions: ir.Value
) -> ir.Value:
    width = dims(x["cos_cache"])[-1] if dims(x["cos_cache"]) else None
    if not isinstance(width, int):
        raise GraphError(f"{node.name}: the width of its rotary cache is not known; declare it")
    rotated = op(
        "RotaryEmbedding", part, x["cos_cache"], x["sin_cache"], positions, num_heads=count,
        interleaved=node.attributes.get_int("rotary_interleaved", 0),
        rotary_embedding_dim=2 * width,
    )  # fmt: skip
    return set_type(rotated, part.dtype, part.shape)


def _split(op: Builder, part: ir.Value, count: int) -> ir.Value:
    width = dims(part)[-1]
    width = width // count if isinstance(width, int) else -1
    split = op("Reshape", part, op.ints(0, 0, count, width))
    shape = [dims(part)[0], count, dims(part)[1], width if width > 0 else ir.SymbolicDim(None)]
    turned = op("Transpose", split, perm=SWAP_HEADS_AND_LENGTH)
    return set_type(turned, part.dtype, ir.Shape(shape))


def _seen(
    op: Builder, query: ir.Value, key: ir.Value, window: int, *, causal: bool
) -> ir.Value:  # fmt: skip
    """Return the keys in the window, if there is one, and up to each query, `[B, 1, L, S]`."""
    length = op("Squeeze", op("Shape", key, start=2, end=3))
    keys = op("Range", op.scalar(0), length, op.scalar(1))
    at = op("Unsqueeze", _positions(op, query), op.ints(1, 3))
    masks = [op("LessOrEqual", keys, at)] if causal else []
    masks += [op("Greater", keys, op("Sub", at, op.ints(window)))] if window > -1 else []
    return masks[0] if len(masks) == 1 else op("And", *masks)


# -- MultiHeadAttention ---------------------------------------------------------------------------


def _multi_head(op: Builder, node: ir.Node, x: _Operands) -> Sequence[ir.Value]:
    """Return attention with padding and an appended cache, as `Attention` has them."""
    heads = node.attributes.get_int("num_heads", 0)
    parts = [x[name] for name in ("query", "key", "value")]
    if "bias" in x:
        sizes = [dims(part)[-1] for part in parts]
        known = op.ints(*(size for size in sizes if isinstance(size, int)))
        biases = op.add_node("Split", [x["bias"], known], 3, axis=0)
        parts = [op("Add", part, bias) for part, bias in zip(parts, biases, strict=True)]
    mask = x.get("attention_bias")
    if "key_padding_mask" in x:
        hidden = _padding(op, node, x)
        mask = hidden if mask is None else op("Add", mask, hidden)
    return op.add_node(
        "Attention", [*parts, mask, x.get("past_key"), x.get("past_value")], 3,
        q_num_heads=heads, kv_num_heads=heads,
        **_attributes(node, causal=bool(node.attributes.get_int("unidirectional", 0))),
    )  # fmt: skip


def _padding(op: Builder, node: ir.Node, x: _Operands) -> ir.Value:
    """Return what is added to the scores of padding, of 4 axes."""
    mask, dtype = x["key_padding_mask"], x["query"].dtype
    rank = len(dims(mask))
    if rank not in (2, 3) or dtype is None:
        raise GraphError(
            f"{node.name}: Attention cannot say a key_padding_mask of lengths; "
            "keep the graph as it is"
        )
    low = max(node.attributes.get_float("mask_filter_value", -1e4), np.finfo(dtype.numpy()).min)
    seen = op("Cast", mask, to=ir.DataType.BOOL)
    number = op("Where", seen, op.scalar(0.0, dtype), op.scalar(float(low), dtype))
    return op("Unsqueeze", number, op.ints(1, 2) if rank == 2 else op.ints(1))
