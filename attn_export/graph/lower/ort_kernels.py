"""Attention in the kernels of ONNX Runtime: its own operators, or products for one query."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import dims
from attn_export.graph.lower.heads import (
    as_output,
    before_split,
    heads_apart,
    in_output_layout,
    same_for_heads,
    side_by_side,
)
from attn_export.graph.lower.in_place_cache import InPlaceCache
from attn_export.graph.lower.integer_cache import QuantisedCache
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.portable import capped
from attn_export.graph.lower.read import AttentionNode
from attn_export.graph.lower.visible_keys import allowed_keys, as_bias, sees_any

# -- attention without `H·L·S` scores in memory -------------------------------------------------

# https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. On the CPU
# `MultiHeadAttention` has one where nothing is hidden, `GroupQueryAttention` one that is causal.


MICROSOFT = "com.microsoft"
INT32 = ir.DataType.INT32

NO_SINK = -1e30
"""The score of a sink that adds nothing: its exponential is 0 beside that of any other score."""


def full(op: Builder, a: AttentionNode) -> ir.Value:
    """Return the attention in which every query sees every key, in the node's layout.

    Args:
        op: Builder of the nodes.
        a: The `Attention` node as plain values.
    """
    query, key, value = side_by_side(op, a)
    if a.q_per_kv > 1:  # it shares no heads; they are small beside the scores
        key, value = _repeated(op, a, key, a.head_dim), _repeated(op, a, value, a.v_head_dim)
    attended = op(
        "MultiHeadAttention", query, key, value,
        domain=MICROSOFT, num_heads=a.num_heads, scale=a.scale,
    )  # fmt: skip
    return in_output_layout(op, a, attended)


def causal(op: Builder, a: AttentionNode) -> list[ir.Value]:
    """Return attention, present key and value; query i sees keys up to P + i within the mask.

    With a past, this holds only for batches of one row, or for queries that are the first.

    Args:
        op: Builder of the nodes.
        a: The `Attention` node as plain values.
    """
    query, key, value = side_by_side(op, a)
    L = op.size(query, 1)
    total = L if a.past_key is None else op("Add", op.size(a.past_key, 2), L)
    last = op("Cast", op("Sub", total, op.ints(1)), to=INT32)
    bias = _bias(op, a, L, total)
    given = [
        query, key, value, a.past_key, a.past_value,
        op("Expand", last, op.size(query, 0)), op("Cast", op("Squeeze", total), to=INT32),
        *([None, None, None, bias] if bias is not None else []),
    ]  # fmt: skip
    attended, *present = op.several("GroupQueryAttention", given, 3, MICROSOFT, **attributes_of(a))
    if bias is None:
        return [in_output_layout(op, a, attended), *present]
    return [_nothing_gives_zero(op, a, attended, bias), *present]


def in_place(op: Builder, a: AttentionNode, cache: InPlaceCache) -> list[ir.Value]:
    """Return attention, present key and value for one query a row, which sees all its keys.

    The operator writes the new keys, into the buffer of the past if it is bound as the present.

    Args:
        op: Makes the nodes.
        a: The node.
        cache: Its cache.
    """
    new = dataclasses.replace(a, key=cache.new_key, value=cache.new_value)
    query, key, value = side_by_side(op, new)
    last = op("Cast", cache.lengths, to=INT32)
    longest = op("ReduceMax", last, keepdims=0)
    total = op("Add", longest, op.scalar_int(1, INT32))
    given = [query, key, value, cache.past_key, cache.past_value, last, total]
    attended, *present = op.several("GroupQueryAttention", given, 3, MICROSOFT, **attributes_of(a))
    return [in_output_layout(op, a, attended), *present]


def in_place_integers(
    op: Builder, a: AttentionNode, held: QuantisedCache, *, whole_rows: bool = False
) -> list[ir.Value]:
    """Return attention, present key and value for one query a row, over a cache of integers.

    The operator rounds and writes the new keys, and reads integers as they are.

    Args:
        op: Makes the nodes.
        a: The node.
        held: Its cache.
        whole_rows: Whether to compute all scores of a head before values are read. The kernel does
            so where each head has a sink, a further score without a value; one that adds 0 to the
            sum of the softmax changes nothing else.
    """
    cache = held.cache
    new = dataclasses.replace(a, key=cache.new_key, value=cache.new_value)
    query, key, value = side_by_side(op, new)
    last = op("Cast", cache.lengths, to=INT32)
    total = op("Add", op("ReduceMax", last, keepdims=0), op.scalar_int(1, INT32))
    scales = (held.k_scale, held.v_scale)
    sink = op.array(np.full(a.num_heads, NO_SINK, np.float32)) if whole_rows else None
    given = [
        query, key, value, cache.past_key, cache.past_value, last, total, *[None] * 4, sink,
        *(op.array(s.reshape(1, *s.shape) if s.ndim else s.reshape(1)) for s in scales),
    ]  # fmt: skip
    kinds = ["PER_CHANNEL" if scale.ndim else "PER_TENSOR" for scale in scales]
    attended, *present = op.several(
        "GroupQueryAttention", given, 3, MICROSOFT, **attributes_of(a),
        kv_cache_bit_width=held.bits, k_quant_type=kinds[0], v_quant_type=kinds[1],
    )  # fmt: skip
    return [in_output_layout(op, a, attended), *present]


def attributes_of(a: AttentionNode) -> dict[str, float]:
    """Return the attributes of GroupQueryAttention for a node."""
    return {
        "num_heads": a.num_heads, "kv_num_heads": a.num_kv_heads, "scale": a.scale,
        **({"softcap": a.softcap} if a.softcap else {}),
    }  # fmt: skip


def _bias(op: Builder, a: AttentionNode, L: ir.Value, S: ir.Value) -> ir.Value | None:
    """Return the bias on the scores, `[B or 1, H or 1, L, S]`; -inf hides a key."""
    mask = a.mask
    if mask is None:
        return None
    if dims(a.query)[-2] == 1:  # a single query is the last
        a = dataclasses.replace(a, causal=False)
    # As it is causal, it has all queries and keys.
    bias = as_bias(op, a, allowed_keys(op, a, L, S, grouped=False))
    assert bias is not None
    return bias if len(dims(mask)) == 4 else op("Unsqueeze", bias, op.ints(0, 1))


def _nothing_gives_zero(
    op: Builder, a: AttentionNode, attended: ir.Value, bias: ir.Value
) -> ir.Value:
    """Return the attention in the node's layout, with 0 in the rows whose keys are all hidden.

    Some kernels give NaN for them.
    """
    zero, seen = op.number(0.0, a.dtype), sees_any(op, a, bias)
    if a.gives_joined and same_for_heads(a):
        return op("Where", op("Squeeze", seen, op.ints(1)), attended, zero)
    return as_output(op, a, op("Where", seen, heads_apart(op, a, attended), zero))


def _repeated(op: Builder, a: AttentionNode, x: ir.Value, width: int) -> ir.Value:
    """Repeat the heads of `[B, S, Hkv·D]` to `[B, S, H·D]`, each beside its copies."""
    split = op("Reshape", x, op.ints(0, 0, a.num_kv_heads, 1, width))
    copies = op("Expand", split, op.ints(1, 1, 1, a.q_per_kv, 1))
    return op("Reshape", copies, op.ints(0, 0, a.num_heads * width))


# -- one query a row against many keys ----------------------------------------------------------

# The query heads of one K/V head become the rows of one product (fold). With K as its left operand
# (swap) a CPU streams it through the cache once and packs the few queries instead.


TURNED = [0, 1, 3, 2]


def fold_integers(op: Builder, a: AttentionNode, held: QuantisedCache) -> ir.Value:
    """Return the same as `fold` over a cache of integers, in the layout of the node's output.

    Those of 8 bits are cast as they are: the scales are factors of the query and of the output,
    which are small beside the cache.

    Args:
        op: Makes the nodes.
        a: The node; its query is `[B, H, 1, D]`.
        held: Its cache.
    """
    if held.bits != 8:
        return fold(op, a, a.key, a.value)
    key, value = (op("Cast", x, to=a.dtype) for x in (held.key, held.value))
    for cast, source in ((key, held.key), (value, held.value)):
        cast.dtype, cast.shape = a.dtype, source.shape
    return fold(op, a, key, value, scales=(held.k_scale, held.v_scale))


def fold(
    op: Builder,
    a: AttentionNode,
    key: ir.Value,
    value: ir.Value,
    *,
    transposed: bool = False,
    scales: tuple[np.ndarray, np.ndarray] | None = None,
) -> ir.Value:
    """Return the attention in the layout of the node's output.

    Args:
        op: Makes the nodes.
        a: The node; its query is `[B, H, 1, D]`.
        key: `[B, Hkv, S, D]`, with the past.
        value: `[B, Hkv, S, Dv]`, with the past.
        transposed: Whether it is `[B, Hkv, Dv, S]` instead.
        scales: Factors of key and value, scalars or `[Hkv, 1, D]`; None for 1.
    """
    # With one query it does not matter whether the heads stand before it or behind.
    query = before_split(a.query) or a.query
    scaled = op("Mul", query, op.number(a.scale, a.dtype))
    rows = op("Reshape", scaled, op.ints(0, a.num_kv_heads, a.q_per_kv, a.head_dim))
    if scales is not None:
        rows = op("Mul", rows, op.array(scales[0]))
    scores = _scores(op, a, rows, key)  # [B, Hkv, r, S]
    # Not grouped: a Transpose that is moved past Reshape would make what follows slow.
    scores = capped(op, a, op("Reshape", scores, op.ints(0, a.num_heads, 1, -1)))
    allowed = allowed_keys(op, a, op.ints(1), op.size(key, 2), grouped=False)
    bias = as_bias(op, a, allowed)  # [B, 1 or H, 1, S]
    if bias is not None:
        scores = op("Add", scores, bias)
    weights = op("Softmax", scores, axis=-1)
    weights = op("Reshape", weights, op.ints(0, a.num_kv_heads, a.q_per_kv, -1))
    if transposed:
        attended = op("MatMul", value, op("Transpose", weights, perm=TURNED))
        attended = op("Transpose", attended, perm=TURNED)
    else:
        attended = op("MatMul", weights, value)  # [B, Hkv, r, Dv]
    if scales is not None:
        attended = op("Mul", attended, op.array(scales[1]))
    flat = a.gives_joined and (a.mask is None or same_for_heads(a))
    shape = (1, a.num_heads * a.v_head_dim) if flat else (a.num_heads, 1, a.v_head_dim)
    attended = op("Reshape", attended, op.ints(0, *shape))
    if bias is not None and a.mask is not None:  # without one, a row sees at least its own key
        seen = sees_any(op, a, bias, keepdims=int(not flat))
        attended = op("Where", seen, attended, op.number(0.0, a.dtype))
    return attended if flat else as_output(op, a, attended)


def _scores(op: Builder, a: AttentionNode, rows: ir.Value, key: ir.Value) -> ir.Value:
    if a.q_per_kv == 1:  # one row: there is nothing to pack
        return op("MatMul", rows, op("Transpose", key, perm=TURNED))
    turned = op("MatMul", key, op("Transpose", rows, perm=TURNED))  # [B, Hkv, S, r]
    return op("Transpose", turned, perm=TURNED)
