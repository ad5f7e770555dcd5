"""Attention over blocks of queries: by products, or by ONNX Runtime's causal kernel.

By products, each block of queries is multiplied with the keys that it sees. A causal mask then
saves half of the products, and never are all scores in memory at once, as in
FlashAttention (https://arxiv.org/abs/2205.14135). Keys are not divided into blocks, so there is no
running maximum: the scores of a block of queries fit into the CPU's cache.

The kernel divides keys into blocks of up to 1024, which fit the cache of a core, and computes all
scores of a block if any query sees any of its keys. One call with 2048 queries therefore takes
twice as long as calls with 128 queries that get only the keys that they see. After a past, the
operator allows several queries only for batch size 1, so a Scan runs over the batch. All keys are
passed as its past, with no new ones, so that it reads them in place (ONNX Runtime 1.31).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT
from attn_export.graph.axis_names import known_equal
from attn_export.graph.ir_helpers import dims, set_type
from attn_export.graph.lower.caches import InPlaceCache, transpose_value_cache
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.ort import Form, holds_values_transposed
from attn_export.graph.lower.ort_kernels import INT32, attributes_of, zero_masked_rows
from attn_export.graph.lower.portable import (
    QueryBlock,
    apply_softcap,
    before_expand,
    score_bias,
    sees_any,
)
from attn_export.graph.lower.read import (
    SWAP_LAST_AXES,
    AttentionNode,
    merge_heads,
    merged_to_output,
    split_qkv,
    split_to_output,
)


def in_blocks(block: int, *, by_kernel: bool = False) -> Form:
    """Return the form of so many queries in a block, by products or by the causal kernel."""
    attend = functools.partial(_attend_in_blocks, block=block, by_kernel=by_kernel)
    return Form(f"{'kernels in ' if by_kernel else ''}blocks of {block} queries", attend=attend)


def _fits_blocks(a: AttentionNode) -> bool:
    """Return whether a node can be computed by products over blocks of queries.

    Its scores must be unused, its softmax in its own type, and its present outputs unused unless it
    has a past. A mask must have 2 or 4 axes, with 1 or L queries.
    """
    if not a.is_plain:
        return False
    if a.past_key is None and (a.output(1) is not None or a.output(2) is not None):
        return False
    if a.mask is None:
        return True
    shape = dims(before_expand(a.mask))
    rows = shape[-2] if len(shape) in (2, 4) else None
    return rows is not None and (rows == 1 or known_equal(rows, dims(a.query)[-2]))


def _attend_in_blocks(
    op: Builder,
    a: AttentionNode,
    cache: InPlaceCache | None,
    fits_kernel: bool,
    *,
    block: int,
    by_kernel: bool,
) -> Sequence[ir.Value] | None:
    """Return the outputs of a node, computed over blocks of queries; None if it does not fit."""
    if not (fits_kernel if by_kernel else _fits_blocks(a)):
        return None
    transposed = cache is not None and holds_values_transposed(a, cache)
    if cache is not None and transposed:
        query, key, value = a.query, a.key, transpose_value_cache(op, a, cache)
    else:
        query, key, value = split_qkv(op, a)
    present: list[ir.Value] = []
    past = op.ints(0) if cache is None else cache.lengths
    if a.past_key is not None and a.past_value is not None:
        past = op.size(a.past_key, 2)
        key = op("Concat", a.past_key, key, axis=2)
        value = op("Concat", a.past_value, value, axis=2)
        present = [key, value]
    if not by_kernel:
        attended = _attend_by_products(op, a, query, key, value, block, transposed=transposed)
        return [attended, *present]
    if transposed:
        value = op("Transpose", value, perm=SWAP_LAST_AXES)
    for operand in (key, value):
        operand.dtype = a.dtype
    return [_attend_by_kernel(op, a, key, value, past, block), *present]


def _attend_by_products(
    op: Builder,
    a: AttentionNode,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    block: int,
    *,
    transposed: bool,
) -> ir.Value:
    """Return the output in the node's layout, by products; the value may be `[B, Hkv, Dv, S]`."""
    if a.scale != 1:
        query = op("Mul", query, op.scalar(a.scale, a.dtype))
    length, size = op.size(a.query, -2), op.ints(block)
    count = op("Div", op("Add", length, op.ints(block - 1)), size)
    unseen = _keys_beyond_block_end(op, a, length)

    def attend_block(block_op: Builder, index: ir.Value) -> ir.Value:
        first = block_op("Mul", block_op("Reshape", index, block_op.ints(1)), size)
        rows = QueryBlock(first, block_op("Min", block_op("Add", first, size), length), length)
        seen = None if unseen is None else block_op("Add", rows.end, unseen)
        return _attend_block(block_op, a, rows, seen, (query, key, value), transposed=transposed)

    axis = 1 if a.merges_heads else 2
    return op.add_loop(op("Squeeze", count), attend_block, a.dtype, axis)


def _keys_beyond_block_end(op: Builder, a: AttentionNode, length: ir.Value) -> ir.Value | None:
    """Return the number of keys that any query of a block sees, minus the end of the block.

    It is int64 `[1]`; None if all keys may be visible.
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
    # Not negative, so that the first block sees a key: Softmax over an empty axis is undefined.
    return op("Max", op("Sub", op("ReduceMax", valid, keepdims=1), length), op.ints(0))


def _attend_block(
    op: Builder,
    a: AttentionNode,
    rows: QueryBlock,
    seen: ir.Value | None,
    operands: tuple[ir.Value, ir.Value, ir.Value],
    *,
    transposed: bool,
) -> ir.Value:
    """Return the attention of one block of queries, in the layout of the node's output.

    The block sees the first `seen` keys, or all for None. Operands are scaled queries, keys and
    values, and these are `[B, Hkv, Dv, S]` if `transposed`.
    """
    query, key, value = operands
    query = op("Slice", query, rows.first, rows.end, op.ints(2))
    if seen is not None:
        key = op("Slice", key, op.ints(0), seen, op.ints(2))
        value = op("Slice", value, op.ints(0), seen, op.ints(3 if transposed else 2))
    # The queries of one K/V head are the rows of one product, so K and V are read once.
    if a.q_per_kv > 1:
        query = op("Reshape", query, op.ints(0, a.num_kv_heads, -1, a.head_dim))
    scores = op("MatMul", query, op("Transpose", key, perm=SWAP_LAST_AXES))
    if a.q_per_kv > 1:
        S = op("Shape", scores, start=3)
        shape = op("Concat", op.ints(0, a.num_heads, -1), S, axis=0)
        scores = op("Reshape", scores, shape)  # [B, H, block, S]
    scores = apply_softcap(op, a, scores)
    bias = score_bias(op, a, rows.total, op("Shape", scores, start=3), rows)
    if bias is not None:
        scores = op("Add", scores, bias)
    weights = op("Softmax", scores, axis=-1)
    if a.q_per_kv > 1:
        shape = op("Concat", op.ints(0, a.num_kv_heads, -1), S, axis=0)
        weights = op("Reshape", weights, shape)
    if transposed:
        value = op("Transpose", value, perm=SWAP_LAST_AXES)
    attended = op("MatMul", weights, value)
    if a.q_per_kv > 1:
        attended = op("Reshape", attended, op.ints(0, a.num_heads, -1, a.v_head_dim))
    if bias is None or not a.may_hide_all:
        return split_to_output(op, a, attended)
    # The softmax of a query without visible keys is NaN.
    shown = sees_any(op, a, bias)
    return split_to_output(op, a, op("Where", shown, attended, op.scalar(0.0, a.dtype)))


def _attend_by_kernel(
    op: Builder, a: AttentionNode, key: ir.Value, value: ir.Value, past: ir.Value, block: int
) -> ir.Value:
    """Return the output in the node's layout, by the causal kernel.

    `past` is the number of keys before the first query of each batch element, `[B]` or `[1]`.
    """
    query = a.query if a.packed else merge_heads(op, a.query, a.num_heads, a.head_dim)
    rows = op("Expand", past, op.size(query, 0))
    rows.type = past.type or ir.TensorType(ir.DataType.INT64)
    length, size = op.size(query, 1), op.ints(block)
    count = op("Squeeze", op("Div", op("Add", length, op.ints(block - 1)), size))
    empty = op.array(np.zeros((1, 0, a.num_kv_heads * a.head_dim), ir.DataType(a.dtype).numpy()))
    mask = None if a.mask is None else _to_rank_4(op, before_expand(a.mask))
    mask_by_row = mask is not None and dims(mask)[0] != 1

    def attend_element(element_op: Builder, values: Sequence[ir.Value]) -> ir.Value:
        queries, keys, cached, past_length, *masks = values
        for element_mask in masks:
            assert mask is not None
            set_type(element_mask, mask.dtype, ir.Shape([1, *dims(mask)[1:]]))
        valid = None if a.valid_keys is None else element_op("Add", past_length, length)
        element = dataclasses.replace(a, mask=masks[0] if masks else mask, valid_keys=valid)

        def attend_block(block_op: Builder, index: ir.Value) -> ir.Value:
            first = block_op("Mul", block_op("Reshape", index, block_op.ints(1)), size)
            end = block_op("Min", block_op("Add", first, size), length)
            block_query = block_op("Slice", queries, first, end, block_op.ints(1))
            total = block_op("Add", past_length, end)
            bias = None
            if element.mask is not None:
                # The bias includes the causal limit: a query may see none of the mask's keys.
                block_rows = QueryBlock(first, end, length)
                bias = score_bias(block_op, element, length, total, block_rows)
            total_length = block_op("Cast", total, to=INT32)
            last_index = block_op("Sub", total_length, block_op.array(np.ones(1, np.int32)))
            optional = () if bias is None else (None, None, None, bias)
            attended = block_op(
                "GroupQueryAttention", block_query, empty, empty, keys, cached,
                last_index, total_length, *optional,
                domain=MICROSOFT, **attributes_of(a),
            )  # fmt: skip
            return attended if bias is None else zero_masked_rows(block_op, a, attended, bias)

        return element_op.add_loop(count, attend_block, a.dtype, 1)

    values = (query, key, value, rows, *((mask,) if mask is not None and mask_by_row else ()))
    shape = ("", a.num_heads * a.head_dim)
    return merged_to_output(op, a, op.add_scan(values, attend_element, shape, a.dtype))


def _to_rank_4(op: Builder, mask: ir.Value) -> ir.Value:
    """Reshape a mask `[L, S]` to `[1, 1, L, S]`; return masks of rank 4 unchanged."""
    if len(dims(mask)) == 4:
        return mask
    whole = op("Unsqueeze", mask, op.ints(0, 1))
    return set_type(whole, mask.dtype, ir.Shape([1, 1, *dims(mask)]))
