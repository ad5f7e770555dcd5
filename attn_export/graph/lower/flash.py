"""Attention without `H·L·S` scores in memory: the flash kernels of ONNX Runtime's own operators.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. On the CPU
`MultiHeadAttention` has one where nothing is hidden, `GroupQueryAttention` one that is causal.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import dims
from attn_export.graph.lower.heads import (
    as_given,
    as_output,
    heads_apart,
    same_for_heads,
    side_by_side,
)
from attn_export.graph.lower.in_place_cache import InPlaceCache
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.read import AttentionNode
from attn_export.graph.lower.visible_keys import allowed_keys, as_bias

MICROSOFT = "com.microsoft"
INT32 = ir.DataType.INT32


def full(op: Builder, a: AttentionNode) -> ir.Value:
    """Return the attention in which every query sees every key, in the node's layout."""
    query, key, value = side_by_side(op, a)
    if a.q_per_kv > 1:  # it shares no heads; they are small beside the scores
        key, value = _repeated(op, a, key, a.head_dim), _repeated(op, a, value, a.v_head_dim)
    attended = op(
        "MultiHeadAttention", query, key, value,
        domain=MICROSOFT, num_heads=a.num_heads, scale=a.scale,
    )  # fmt: skip
    return as_given(op, a, attended)


def causal(op: Builder, a: AttentionNode) -> list[ir.Value]:
    """Return attention, present key and value; query i sees keys up to P + i within the mask.

    With a past, this holds only for batches of one row, or for queries that are the first.
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
    attended, *present = op.several("GroupQueryAttention", given, 3, MICROSOFT, **_attributes(a))
    if bias is None:
        return [as_given(op, a, attended), *present]
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
    attended, *present = op.several("GroupQueryAttention", given, 3, MICROSOFT, **_attributes(a))
    return [as_given(op, a, attended), *present]


def _attributes(a: AttentionNode) -> dict[str, float]:
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
    zero, best = op.number(0.0, a.dtype), op("ReduceMax", bias, op.ints(-1), keepdims=1)
    seen = op("Greater", best, op.number(-np.inf, a.dtype))  # [B or 1, H or 1, L, 1]
    if a.gives_joined and same_for_heads(a):
        return op("Where", op("Squeeze", seen, op.ints(1)), attended, zero)
    return as_output(op, a, op("Where", seen, heads_apart(op, a, attended), zero))


def _repeated(op: Builder, a: AttentionNode, x: ir.Value, width: int) -> ir.Value:
    """Repeat the heads of `[B, S, Hkv·D]` to `[B, S, H·D]`, each beside its copies."""
    split = op("Reshape", x, op.ints(0, 0, a.num_kv_heads, 1, width))
    copies = op("Expand", split, op.ints(1, 1, 1, a.q_per_kv, 1))
    return op("Reshape", copies, op.ints(0, 0, a.num_heads * width))
