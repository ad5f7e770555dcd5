"""Attention over blocks of queries: products of each block with the keys that it sees.

Where hiding is causal, half of the products fall away, and no scores of all queries with all keys
are in memory, as in FlashAttention (https://arxiv.org/abs/2205.14135), of which the blocks of keys
and the running maximum are left out: the scores of a block of queries fit in a cache as they are.
"""

from __future__ import annotations

import onnx_ir as ir

from attn_export.graph.axis_names import known_equal
from attn_export.graph.ir_helpers import dims
from attn_export.graph.lower.heads import as_output
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.portable import capped
from attn_export.graph.lower.read import AttentionNode
from attn_export.graph.lower.visible_keys import (
    QueryBlock,
    allowed_keys,
    as_bias,
    before_expand,
    sees_any,
)

TURNED = [0, 1, 3, 2]


def fits_blocks(a: AttentionNode) -> bool:
    """Return whether the queries of a node can be taken in blocks.

    The scores must be unused, and the mask, if there is one, have 2 or 4 axes of known meaning.

    Args:
        a: The `Attention` node as plain values.
    """
    if a.output(3) is not None or a.precision not in (None, a.dtype):
        return False
    if a.past_key is None and (a.output(1) is not None or a.output(2) is not None):
        return False
    if a.mask is None:
        return True
    shape = dims(before_expand(a.mask))
    rows = shape[-2] if len(shape) in (2, 4) else None
    return rows is not None and (rows == 1 or known_equal(rows, dims(a.query)[-2]))


def in_blocks(
    op: Builder,
    a: AttentionNode,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    block: int,
    *,
    transposed: bool = False,
) -> ir.Value:
    """Return the attention in the layout of the node's output.

    Args:
        op: Builder of the nodes.
        a: The `Attention` node as plain values.
        query: `[B, H, L, D]`.
        key: `[B, Hkv, S, D]`, with the past.
        value: `[B, Hkv, S, Dv]`, with the past.
        block: The number of queries of a block.
        transposed: Whether the value is `[B, Hkv, Dv, S]` instead.
    """
    if a.scale != 1:
        query = op("Mul", query, op.number(a.scale, a.dtype))
    length, size = op.size(a.query, -2), op.ints(block)
    count = op("Div", op("Add", length, op.ints(block - 1)), size)
    unseen = _unseen_by_all(op, a, length)

    def of_block(inner: Builder, index: ir.Value) -> ir.Value:
        first = inner("Mul", inner("Reshape", index, inner.ints(1)), size)
        rows = QueryBlock(first, inner("Min", inner("Add", first, size), length), length)
        seen = None if unseen is None else inner("Add", rows.end, unseen)
        return _attended(inner, a, rows, seen, (query, key, value), transposed=transposed)

    axis = 1 if a.gives_joined else 2
    return op.concatenated(op("Squeeze", count), of_block, a.dtype, axis)


def _unseen_by_all(op: Builder, a: AttentionNode, length: ir.Value) -> ir.Value | None:
    """Return how many more keys than its own number the last query of a block sees, `[1]`.

    None where all keys may be visible.
    """
    if not a.causal:
        return None
    if a.past_key is not None:
        return op.size(a.past_key, 2)
    if a.valid_keys is None:
        return op.ints(0)
    valid = a.valid_keys
    if valid.dtype != ir.DataType.INT64:
        valid = op("Cast", valid, to=ir.DataType.INT64)
    # At least one key for the first block: Softmax over no axis has no meaning.
    return op("Max", op("Sub", op("ReduceMax", valid, keepdims=1), length), op.ints(0))


def _attended(
    op: Builder,
    a: AttentionNode,
    rows: QueryBlock,
    seen: ir.Value | None,
    operands: tuple[ir.Value, ir.Value, ir.Value],
    *,
    transposed: bool,
) -> ir.Value:
    """Return the attention of one block, in the layout of the node's output.

    Args:
        op: Builder of the nodes within the loop.
        a: The node.
        rows: The queries of the block.
        seen: The number of keys from the first on that some query of it sees; None for all.
        operands: Scaled queries, keys and values.
        transposed: Whether the values are `[B, Hkv, Dv, S]`.
    """
    query, key, value = operands
    query = op("Slice", query, rows.first, rows.end, op.ints(2))
    if seen is not None:
        key = op("Slice", key, op.ints(0), seen, op.ints(2))
        value = op("Slice", value, op.ints(0), seen, op.ints(3 if transposed else 2))
    # Queries of one K/V head are rows of one product, so K and V are read once.
    if a.q_per_kv > 1:
        query = op("Reshape", query, op.ints(0, a.num_kv_heads, -1, a.head_dim))
    scores = op("MatMul", query, op("Transpose", key, perm=TURNED))
    if a.q_per_kv > 1:
        S = op("Shape", scores, start=3)
        shape = op("Concat", op.ints(0, a.num_heads, -1), S, axis=0)
        scores = op("Reshape", scores, shape)  # [B, H, block, S]
    scores = capped(op, a, scores)
    visible = op("Shape", scores, start=3)
    allowed = allowed_keys(op, a, rows.total, visible, grouped=False, rows=rows)
    bias = as_bias(op, a, allowed)
    if bias is not None:
        scores = op("Add", scores, bias)
    weights = op("Softmax", scores, axis=-1)
    if a.q_per_kv > 1:
        shape = op("Concat", op.ints(0, a.num_kv_heads, -1), S, axis=0)
        weights = op("Reshape", weights, shape)
    if transposed:
        value = op("Transpose", value, perm=TURNED)
    attended = op("MatMul", weights, value)
    if a.q_per_kv > 1:
        attended = op("Reshape", attended, op.ints(0, a.num_heads, -1, a.v_head_dim))
    if bias is None or not allowed.may_hide_all:
        return as_output(op, a, attended)
    # Softmax over nothing is NaN.
    shown = sees_any(op, a, bias)
    return as_output(op, a, op("Where", shown, attended, op.number(0.0, a.dtype)))
