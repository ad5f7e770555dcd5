"""Lowering of attention to contrib operators of ONNX Runtime, or to products for one query."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT
from attn_export.graph.axis_names import BOUNDS
from attn_export.graph.ir_helpers import dims
from attn_export.graph.lower.caches import InPlaceCache
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.portable import apply_softcap, score_bias, sees_any
from attn_export.graph.lower.read import (
    SWAP_HEADS_AND_LENGTH,
    SWAP_LAST_AXES,
    AttentionNode,
    merge_qkv,
    merged_source,
    merged_to_output,
    same_for_heads,
    split_to_output,
)

if TYPE_CHECKING:
    from attn_export.graph.lower.inside_projections import Rotation

# -- contrib operators, which do not hold all `H·L·S` scores in memory --------------------------

# https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. On the CPU,
# `MultiHeadAttention` is used for full attention, and `GroupQueryAttention` for causal attention.

INT32 = ir.DataType.INT32

_MOST_IN_TABLES = 2**17
"""The most positions of tables, which are held in memory."""


def full_attention(op: Builder, a: AttentionNode) -> ir.Value:
    """Return attention in which every query sees every key, in the node's layout."""
    query, key, value = merge_qkv(op, a)
    if a.q_per_kv > 1:  # MultiHeadAttention has no shared K/V heads
        key, value = (
            _repeat_heads(op, a, key, a.head_dim),
            _repeat_heads(op, a, value, a.v_head_dim),
        )
    attended = op(
        "MultiHeadAttention", query, key, value,
        domain=MICROSOFT, num_heads=a.num_heads, scale=a.scale,
    )  # fmt: skip
    return merged_to_output(op, a, attended)


def causal_attention(op: Builder, a: AttentionNode) -> list[ir.Value]:
    """Return causal attention in the node's layout, the present key and the present value.

    Query i sees keys up to P + i that the mask allows. If the past is not empty, the batch size
    must be 1.
    """
    query, key, value = merge_qkv(op, a)
    L = op.size(query, 1)
    total = L if a.past_key is None else op("Add", op.size(a.past_key, 2), L)
    last = op("Cast", op("Sub", total, op.ints(1)), to=INT32)
    bias = _bias(op, a, L, total)
    inputs = [
        query, key, value, a.past_key, a.past_value,
        op("Expand", last, op.size(query, 0)), op("Cast", op("Squeeze", total), to=INT32),
        *([None, None, None, bias] if bias is not None else []),
    ]  # fmt: skip
    attended, *present = op.add_node(
        "GroupQueryAttention", inputs, 3, MICROSOFT, **attributes_of(a)
    )
    if bias is None:
        return [merged_to_output(op, a, attended), *present]
    return [merged_to_output(op, a, _zero_masked_rows(op, a, attended, bias)), *present]


def in_place_attention(op: Builder, a: AttentionNode, cache: InPlaceCache) -> ir.Value:
    """Return attention of one query per batch element to all its keys, in the node's layout.

    The operator writes new keys and values into the past's buffer if the caller binds the same
    buffer to past and present.
    """
    new = dataclasses.replace(a, key=cache.new_key, value=cache.new_value)
    operands: Sequence[ir.Value | None] = merge_qkv(op, new)
    rotation = rotation_inside(a, cache)
    tables: Sequence[ir.Value] = ()
    if rotation is not None:
        operands, tables = rotation.operands(op, new), rotation.tables(op, most_keys(cache))
    last = op("Cast", cache.lengths, to=INT32)
    total = op("Add", op("ReduceMax", last, keepdims=0), op.scalar(1, INT32))
    inputs = [*operands, cache.past_key, cache.past_value, last, total, *tables]
    turned = {} if rotation is None else {"do_rotary": 1}
    attended, *present = op.add_node(
        "GroupQueryAttention", inputs, 3, MICROSOFT, **attributes_of(a), **turned
    )
    for old, written in zip((a.key, a.value), present, strict=True):
        take_over(old, written)
    return merged_to_output(op, a, attended)


def rotation_inside(a: AttentionNode, cache: InPlaceCache) -> Rotation | None:
    """Return the rotary embedding that the operator can do itself; None if there is none.

    It reads cosines and sines from tables, which need a limit of the number of keys.
    """
    if not most_keys(cache) or a.head_dim % 16:
        return None
    from attn_export.graph.lower.inside_projections import find_rotation  # few graphs have limits

    return find_rotation(a.query, cache.new_key, cache.lengths)


def most_keys(cache: InPlaceCache) -> int:
    """Return the largest capacity of a cache, for tables of positions; 0 if it has no limit."""
    graph, axis = cache.past_key.graph, str(dims(cache.past_key)[2])
    allowed = graph.meta.get(BOUNDS, {}).get(axis, [0]) if graph is not None else [0]
    return allowed[-1] if allowed[-1] <= _MOST_IN_TABLES else 0


def attributes_of(a: AttentionNode) -> dict[str, float]:
    """Return the attributes of GroupQueryAttention for a node."""
    return {
        "num_heads": a.num_heads, "kv_num_heads": a.num_kv_heads, "scale": a.scale,
        **({"softcap": a.softcap} if a.softcap else {}),
    }  # fmt: skip


def takes_widths(a: AttentionNode) -> bool:
    """Return whether GroupQueryAttention takes heads of these widths."""
    return a.head_dim == a.v_head_dim and a.head_dim % 8 == 0


def _bias(op: Builder, a: AttentionNode, L: ir.Value, S: ir.Value) -> ir.Value | None:
    """Return the bias on the scores, `[B or 1, H or 1, L, S]`, -inf for hidden keys; or None."""
    mask = a.mask
    if mask is None:
        return None
    if dims(a.query)[-2] == 1:  # a single query is the last
        a = dataclasses.replace(a, causal=False)
    # The causal part gives the bias all L queries and S keys.
    bias = score_bias(op, a, L, S)
    assert bias is not None  # there is a mask
    return bias if len(dims(mask)) == 4 else op("Unsqueeze", bias, op.ints(0, 1))


def _zero_masked_rows(
    op: Builder, a: AttentionNode, attended: ir.Value, bias: ir.Value
) -> ir.Value:
    """Return the result `[B, L, H·Dv]` with 0 for queries whose keys are all hidden.

    Some kernels give NaN for such queries.

    `attended`: `[B, L, H·Dv]`.
    `bias`: The bias on the scores, `[B or 1, H or 1, L, S]`.
    """
    zero, seen = op.scalar(0.0, a.dtype), sees_any(op, a, bias)
    if same_for_heads(a):
        return op("Where", op("Squeeze", seen, op.ints(1)), attended, zero)
    seen = op("Transpose", seen, perm=SWAP_HEADS_AND_LENGTH)
    heads = op("Reshape", attended, op.ints(0, 0, a.num_heads, a.v_head_dim))
    return op("Reshape", op("Where", seen, heads, zero), op.ints(0, 0, a.num_heads * a.v_head_dim))


def _repeat_heads(op: Builder, a: AttentionNode, x: ir.Value, width: int) -> ir.Value:
    """Repeat each head of `[B, S, Hkv·D]` q_per_kv times, to `[B, S, H·D]`."""
    split = op("Reshape", x, op.ints(0, 0, a.num_kv_heads, 1, width))
    copies = op("Expand", split, op.ints(1, 1, 1, a.q_per_kv, 1))
    return op("Reshape", copies, op.ints(0, 0, a.num_heads * width))


# -- products for one query per batch element ---------------------------------------------------

# The query heads of a K/V head become the rows of one matrix (fold). With K as the left operand of
# the product, the CPU reads K once, and packs the small query matrix instead of K.


def fold(
    op: Builder,
    a: AttentionNode,
    key: ir.Value,
    value: ir.Value,
    *,
    transposed: bool = False,
) -> ir.Value:
    """Return attention of one query per batch element by products, in the node's layout.

    `a`: The `Attention` node as plain values; its query is `[B, H, 1, D]`.
    `key`: `[B, Hkv, S, D]`, with the past.
    `value`: `[B, Hkv, S, Dv]`, with the past.
    `transposed`: Whether `value` is `[B, Hkv, Dv, S]` instead.
    """
    # With L = 1, `[B, L, H·D]` and `[B, H, L, D]` have the same order of elements.
    query = merged_source(a.query) or a.query
    scaled = op("Mul", query, op.scalar(a.scale, a.dtype))
    rows = op("Reshape", scaled, op.ints(0, a.num_kv_heads, a.q_per_kv, a.head_dim))
    scores = _scores(op, a, rows, key)  # [B, Hkv, r, S]
    # `[B, H, 1, S]`, not `[B, Hkv, r, 1, S]`: with grouped scores ONNX Runtime would move a
    # Transpose past the Reshape, which is slow.
    scores = apply_softcap(op, a, op("Reshape", scores, op.ints(0, a.num_heads, 1, -1)))
    bias = score_bias(op, a, op.ints(1), op.size(key, 2))  # [B, 1 or H, 1, S]
    if bias is not None:
        scores = op("Add", scores, bias)
    weights = op("Softmax", scores, axis=-1)
    weights = op("Reshape", weights, op.ints(0, a.num_kv_heads, a.q_per_kv, -1))
    if transposed:
        attended = op("MatMul", value, op("Transpose", weights, perm=SWAP_LAST_AXES))
        attended = op("Transpose", attended, perm=SWAP_LAST_AXES)
    else:
        attended = op("MatMul", weights, value)  # [B, Hkv, r, Dv]
    flat = a.merges_heads and (a.mask is None or same_for_heads(a))
    shape = (1, a.num_heads * a.v_head_dim) if flat else (a.num_heads, 1, a.v_head_dim)
    attended = op("Reshape", attended, op.ints(0, *shape))
    if bias is not None and a.mask is not None:  # without a mask, each query sees its own key
        seen = sees_any(op, a, bias, keepdims=int(not flat))
        attended = op("Where", seen, attended, op.scalar(0.0, a.dtype))
    return attended if flat else split_to_output(op, a, attended)


def _scores(op: Builder, a: AttentionNode, rows: ir.Value, key: ir.Value) -> ir.Value:
    if a.q_per_kv == 1:  # one row: nothing would be packed
        return op("MatMul", rows, op("Transpose", key, perm=SWAP_LAST_AXES))
    turned = op("MatMul", key, op("Transpose", rows, perm=SWAP_LAST_AXES))  # [B, Hkv, S, r]
    return op("Transpose", turned, perm=SWAP_LAST_AXES)
