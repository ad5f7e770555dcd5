"""Computation of the visible keys of each query, in operators of opset 18."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.axis_names import Size, known_equal, size_text, terms
from attn_export.graph.ir_helpers import dims, set_type, value_before
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.read import AttentionNode


@dataclasses.dataclass(frozen=True)
class VisibleKeys:
    """Visible keys, which broadcast to the scores, `[B, H, L, S]` or `[B, Hkv, r, L, S]`.

    Attributes:
        keys: Bool, True where a key is visible; None if all keys are visible.
        added: The float mask, which is added to the scores; None if there is none.
    """

    keys: ir.Value | None
    added: ir.Value | None


@dataclasses.dataclass(frozen=True)
class QueryBlock:
    """A block of queries, `first` to `end - 1` of `total`; each is int64 `[1]`."""

    first: ir.Value
    end: ir.Value
    total: ir.Value


def visible_keys(
    op: Builder,
    a: AttentionNode,
    L: ir.Value,
    S: ir.Value,
    *,
    grouped: bool,
    rows: QueryBlock | None = None,
) -> VisibleKeys:
    """Return the keys that the mask, the causal limit and the numbers of valid keys leave visible.

    `L`: The number of queries, int64 `[1]`.
    `S`: The number of keys, with those of the past, int64 `[1]`.
    `grouped`: Whether the scores are `[B, Hkv, r, L, S]`.
    `rows`: The block of queries of the scores; S is then the last key that they see, plus 1. None
    for all queries.
    """
    grouped = grouped and a.q_per_kv > 1
    conditions: list[ir.Value] = []
    added = None
    if a.mask is not None:
        mask = before_expand(a.mask)
        mask = mask if rows is None else _block_of_mask(op, mask, rows, S)
        mask = _pad_to_all_keys(op, a, mask, S)
        mask = _group_heads(op, a, mask) if grouped else mask
        if mask.dtype == ir.DataType.BOOL:
            conditions.append(mask)
        else:
            added = mask
            # NaN is no hidden key: its query is NaN, as in PyTorch.
            conditions.append(op("Not", op("Equal", mask, op.scalar(-np.inf, a.dtype))))
    if a.causal or a.valid_keys is not None:
        keys = op("Range", op.scalar(0), op("Squeeze", S), op.scalar(1))  # [S]
        if a.causal:
            conditions.append(
                op("LessOrEqual", keys, _last_visible(op, a, L, rows, grouped=grouped))
            )
        # With causal and no past, the last query is at the last valid key: the causal limit hides
        # invalid keys, too.
        if a.valid_keys is not None and (not a.causal or a.past_key is not None):
            conditions.append(op("Less", keys, _to_scores_rank(op, a.valid_keys, grouped=grouped)))
    combined = None
    for condition in conditions:
        combined = condition if combined is None else op("And", combined, condition)
    return VisibleKeys(combined, added)


def score_bias(
    op: Builder, a: AttentionNode, L: ir.Value, S: ir.Value, rows: QueryBlock | None = None
) -> ir.Value | None:
    """Return the bias on the scores, with -inf for hidden keys; None if all keys are visible.

    It broadcasts to `[B, H, L, S]`. Adding it is faster than a Where over all scores.

    `L`: The number of queries, int64 `[1]`.
    `S`: The number of keys, with those of the past, int64 `[1]`.
    """
    visible = visible_keys(op, a, L, S, grouped=False, rows=rows)
    if visible.keys is None:
        return None
    shown = visible.added if visible.added is not None else op.scalar(0.0, a.dtype)
    return op("Where", visible.keys, shown, op.scalar(-np.inf, a.dtype))


def sees_any(op: Builder, a: AttentionNode, bias: ir.Value, *, keepdims: int = 1) -> ir.Value:
    """Return whether each query sees any key, bool `[B or 1, H or 1, L, 1]`."""
    best = op("ReduceMax", bias, op.ints(-1), keepdims=keepdims)
    return op("Greater", best, op.scalar(-np.inf, a.dtype))


def _block_of_mask(op: Builder, mask: ir.Value, rows: QueryBlock, S: ir.Value) -> ir.Value:
    """Return the part of a mask for a block of queries and the first S keys."""
    shape: list[Size | None] = list(dims(mask))
    part = op("Slice", mask, op.ints(0), S, op.ints(-1)) if shape[-1] != 1 else mask
    if shape[-2] != 1:
        part = op("Slice", part, rows.first, rows.end, op.ints(-2))
        shape[-2] = None
    return set_type(part, mask.dtype, ir.Shape(shape))


def _last_visible(
    op: Builder, a: AttentionNode, L: ir.Value, rows: QueryBlock | None, *, grouped: bool
) -> ir.Value:
    """Return the last visible key of each query: `[L, 1]`, or with axes for the batch before it."""
    first = op.scalar(0) if rows is None else op("Squeeze", rows.first)
    numbers = op("Range", first, op("Squeeze", L if rows is None else rows.end), op.scalar(1))
    column = op("Unsqueeze", numbers, op.ints(1))  # [L, 1]
    if a.past_key is not None:
        return op("Add", column, op.size(a.past_key, 2))
    if a.valid_keys is not None:  # the queries are the last of the valid keys
        valid = _to_scores_rank(op, a.valid_keys, grouped=grouped)
        return op("Add", column, op("Sub", valid, L))
    return column


def _to_scores_rank(op: Builder, of_batch: ir.Value, *, grouped: bool) -> ir.Value:
    """Reshape `[B]` to int64 `[B, 1, 1, 1]`, or `[B, 1, 1, 1, 1]` for grouped scores."""
    if of_batch.dtype != ir.DataType.INT64:
        of_batch = op("Cast", of_batch, to=ir.DataType.INT64)
    return op("Unsqueeze", of_batch, op.ints(*range(1, 5 if grouped else 4)))


def before_expand(mask: ir.Value) -> ir.Value:
    """Return the mask before an Expand; Where broadcasts, and some runtimes lack dynamic Expand."""
    source = value_before(mask, "Expand")
    if source is None or not dims(source) or len(dims(source)) != len(dims(mask)):
        return mask
    # The last axis must already have all keys.
    return source if dims(source)[-1] == dims(mask)[-1] else mask


def _pad_to_all_keys(op: Builder, a: AttentionNode, mask: ir.Value, S: ir.Value) -> ir.Value:
    """Pad a mask to the number of keys; a shorter mask hides the keys behind its end."""
    if mask.shape is None:
        raise GraphError(f"{a.node.name}: the shape of {mask.name} is not known; declare it")
    if mask.shape[-1] == 1 or not mask_may_be_shorter(a, mask.shape[-1]):
        return mask
    kept = mask
    if mask.dtype == ir.DataType.BOOL:  # not every runtime pads bool
        zero, hidden = op.scalar(0.0, a.dtype), op.scalar(-np.inf, a.dtype)
        kept = set_type(op("Where", mask, zero, hidden), a.dtype, mask.shape)
    missing = op("Sub", S, op("Shape", mask, start=-1))
    before = op.ints(*[0] * (2 * len(mask.shape) - 1))
    pads = op("Concat", before, missing, axis=0)
    padded = op("Pad", kept, pads, op.scalar(-np.inf, a.dtype))
    return set_type(padded, a.dtype, ir.Shape([*mask.shape[:-1], None]))


def mask_may_be_shorter(a: AttentionNode, length: Size | None) -> bool:
    """Return whether a mask may be shorter than the keys: its length is not known to be theirs."""
    past, new = _axis(a.past_key, 2), _axis(a.key, -2)
    known = [_axis(a.output(1), 2), _axis(a.output(3), 3), new if a.past_key is None else None]
    if past is not None and new is not None and isinstance(length, ir.SymbolicDim):
        total = f"{size_text(past)} + {size_text(new)}"
        if terms(size_text(length)) == terms(total):
            return False
    return not any(known_equal(size, length) for size in known)


def _axis(value: ir.Value | None, axis: int) -> Size | None:
    return None if value is None or value.shape is None else value.shape[axis]


def _group_heads(op: Builder, a: AttentionNode, mask: ir.Value) -> ir.Value:
    """Group the heads of a mask: `[.., H, L, S]` to `[.., Hkv, r, L, S]`."""
    rank = len(dims(mask))
    if rank < 3:
        return mask
    heads = dims(mask)[-3]
    if heads == 1:
        grouped = op("Unsqueeze", mask, op.ints(rank - 2))
    elif heads == a.num_heads:
        first = list(range(rank - 3))
        last = op("Transpose", mask, perm=[*first, rank - 2, rank - 1, rank - 3])
        target = op.ints(*[0] * (rank - 1), a.num_kv_heads, a.q_per_kv)
        parts = op("Reshape", last, target)  # [.., L, S, Hkv, r]
        grouped = op("Transpose", parts, perm=[*first, rank - 1, rank, rank - 3, rank - 2])
    else:
        raise GraphError(
            f"{a.node.name}: the heads of {mask.name} are "
            f"{getattr(heads, 'value', heads) or '?'!r}; give 1 or {a.num_heads}"
        )
    return set_type(grouped, mask.dtype, grouped.shape)
