"""Attention over blocks of queries: by products, or by ONNX Runtime's causal kernel.

By products, each block is multiplied with the keys that it sees. Where hiding is causal, half of
the products fall away, and no scores of all queries with all keys are in memory, as in
FlashAttention (https://arxiv.org/abs/2205.14135), of which the blocks of keys and the running
maximum are left out: the scores of a block of queries fit in a cache as they are.

The kernel divides keys into blocks that fit the cache of a core, up to 1024 of them. If any query
sees any key of a block, it computes all scores of that block. So one call with 2048 queries takes
twice as long as calls with 128 queries, each given only the keys that they see. The operator takes
several queries after a past in batches of one row only, so a Scan takes the rows apart. It reads
keys where they lie: they are its past, to which it adds none (ONNX Runtime 1.31).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import known_equal
from attn_export.graph.ir_helpers import dims
from attn_export.graph.lower.heads import SWAPPED, as_output, in_output_layout, joined
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.ort_kernels import INT32, MICROSOFT, attributes_of
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


def causal_in_blocks(
    op: Builder, a: AttentionNode, key: ir.Value, value: ir.Value, past: ir.Value, block: int
) -> ir.Value:
    """Return the attention in the layout of the node's output.

    Args:
        op: Builder of the nodes.
        a: The `Attention` node as plain values.
        key: `[B, Hkv, S, D]`, with the past.
        value: `[B, Hkv, S, D]`, with the past.
        past: The number of keys before the first query of each row, int64 `[B]` or `[1]`.
        block: The number of queries of a block.
    """
    query = a.query if a.packed else joined(op, a.query, a.num_heads, a.head_dim)
    rows = op("Expand", past, op.size(query, 0))
    rows.type = past.type or ir.TensorType(ir.DataType.INT64)
    length, size = op.size(query, 1), op.ints(block)
    count = op("Squeeze", op("Div", op("Add", length, op.ints(block - 1)), size))
    empty = op.array(np.zeros((1, 0, a.num_kv_heads * a.head_dim), ir.DataType(a.dtype).numpy()))
    mask = None if a.mask is None else _of_four_axes(op, before_expand(a.mask))
    mask_by_row = mask is not None and dims(mask)[0] != 1

    def of_row(row: Builder, values: Sequence[ir.Value]) -> ir.Value:
        queries, keys, cached, past_length, *masks = values
        for each in masks:
            assert mask is not None
            each.type, each.shape = mask.type, ir.Shape([1, *dims(mask)[1:]])
        valid = None if a.valid_keys is None else row("Add", past_length, length)
        own = dataclasses.replace(a, mask=masks[0] if masks else mask, valid_keys=valid)

        def of_block(inner: Builder, index: ir.Value) -> ir.Value:
            first = inner("Mul", inner("Reshape", index, inner.ints(1)), size)
            end = inner("Min", inner("Add", first, size), length)
            taken = inner("Slice", queries, first, end, inner.ints(1))
            total = inner("Add", past_length, end)
            bias = _bias(inner, own, QueryBlock(first, end, length), total)
            total_length = inner("Cast", total, to=INT32)
            last_index = inner("Sub", total_length, inner.array(np.ones(1, np.int32)))
            optional = () if bias is None else (None, None, None, bias)
            attended = inner(
                "GroupQueryAttention", taken, empty, empty, keys, cached, last_index, total_length,
                *optional,
                domain=MICROSOFT, **attributes_of(a),
            )  # fmt: skip
            return attended if bias is None else _nothing_gives_zero(inner, a, attended, bias)

        return row.concatenated(count, of_block, a.dtype, 1)

    values = (query, key, value, rows, *((mask,) if mask is not None and mask_by_row else ()))
    shape = ("", a.num_heads * a.head_dim)
    return in_output_layout(op, a, op.for_each_row(values, of_row, shape, a.dtype))


def _of_four_axes(op: Builder, mask: ir.Value) -> ir.Value:
    """Return a mask `[L, S]` as `[1, 1, L, S]`, and others as they are."""
    if len(dims(mask)) == 4:
        return mask
    whole = op("Unsqueeze", mask, op.ints(0, 1))
    whole.type, whole.shape = mask.type, ir.Shape([1, 1, *dims(mask)])
    return whole


def _bias(op: Builder, a: AttentionNode, rows: QueryBlock, total: ir.Value) -> ir.Value | None:
    """Return the bias on the scores of a block, `[1, H or 1, L, S]`; None without a mask.

    Args:
        op: Builder of the nodes of the block.
        a: The node, with the mask and the number of valid keys of one row of the batch.
        rows: The queries of the block.
        total: The number of keys up to the last that they see, int64 `[1]`.
    """
    if a.mask is None:
        return None
    # The bias has the causal limit: a query may see nothing of what the mask shows.
    return as_bias(op, a, allowed_keys(op, a, rows.total, total, grouped=False, rows=rows))


def _nothing_gives_zero(
    op: Builder, a: AttentionNode, attended: ir.Value, bias: ir.Value
) -> ir.Value:
    """Return the attention `[1, L, H·D]` with 0 in the rows whose keys are all hidden.

    Some kernels give NaN for them.
    """
    seen = op("Transpose", sees_any(op, a, bias), perm=SWAPPED)
    heads = op("Reshape", attended, op.ints(0, 0, a.num_heads, a.head_dim))
    kept = op("Where", seen, heads, op.number(0.0, a.dtype))
    return op("Reshape", kept, op.ints(0, 0, a.num_heads * a.head_dim))
