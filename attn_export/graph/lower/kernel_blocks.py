"""Causal attention by ONNX Runtime's kernel for a block of queries at a time.

The kernel divides keys into blocks that fit the cache of a core, up to 1024 of them. If any query
sees any key of a block, it computes all scores of that block. So one call with 2048 queries takes
twice as long as calls with 128 queries, each given only the keys that they see.

The operator takes several queries after a past in batches of one row only, so a Scan takes the rows
apart. It reads keys where they lie: they are its past, to which it adds none (ONNX Runtime 1.31).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import dims
from attn_export.graph.lower.heads import SWAPPED, in_output_layout, joined
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.ort_kernels import INT32, MICROSOFT, attributes_of
from attn_export.graph.lower.read import AttentionNode
from attn_export.graph.lower.visible_keys import (
    QueryBlock,
    allowed_keys,
    as_bias,
    before_expand,
    sees_any,
)


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
