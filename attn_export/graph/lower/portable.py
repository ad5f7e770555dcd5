"""Lowering of `Attention` to operators of opset 18 that every runtime supports.

K/V heads are shared by a 5-D MatMul, never by Expand. A second Where sets the results of queries
without visible keys to 0. Legend: B, L, S, H, Hkv, D, Dv as everywhere, r = H // Hkv.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.axis_names import Size, known_equal, size_text
from attn_export.graph.ir_helpers import dims, set_type, value_before
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.read import (
    CAPPED,
    MASKED,
    RAW,
    SWAP_LAST_AXES,
    WEIGHTS,
    AttentionNode,
    read_attention,
    replace_node,
    split_qkv,
    split_to_output,
)
from attn_export.interface import terms_of

_VisibleKeys = tuple[ir.Value | None, ir.Value | None]
"""Visible keys, which broadcast to the scores, `[B, H, L, S]` or `[B, Hkv, r, L, S]`: bool, True
where a key is visible, or None if all are; and the float mask that is added, or None."""


def visible_keys(
    op: Builder,
    a: AttentionNode,
    L: ir.Value,
    S: ir.Value,
    *,
    grouped: bool,
) -> _VisibleKeys:
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
            conditions.append(op("LessOrEqual", keys, _last_visible(op, a, L, grouped=grouped)))
        # With causal and no past, the last query is at the last valid key: the causal limit hides
        # invalid keys, too.
        if a.valid_keys is not None and (not a.causal or a.past_key is not None):
            conditions.append(op("Less", keys, _to_scores_rank(op, a.valid_keys, grouped=grouped)))
    combined = None
    for condition in conditions:
        combined = condition if combined is None else op("And", combined, condition)
    return combined, added


def score_bias(op: Builder, a: AttentionNode, L: ir.Value, S: ir.Value) -> ir.Value | None:
    """Return the bias on the scores, with -inf for hidden keys; None if all keys are visible.

    It broadcasts to `[B, H, L, S]`. Adding it is faster than a Where over all scores.

    `L`: The number of queries, int64 `[1]`.
    `S`: The number of keys, with those of the past, int64 `[1]`.
    """
    keys, added = visible_keys(op, a, L, S, grouped=False)
    if keys is None:
        return None
    shown = added if added is not None else op.scalar(0.0, a.dtype)
    return op("Where", keys, shown, op.scalar(-np.inf, a.dtype))


def sees_any(op: Builder, a: AttentionNode, bias: ir.Value, *, keepdims: int = 1) -> ir.Value:
    """Return whether each query sees any key, bool `[B or 1, H or 1, L, 1]`."""
    best = op("ReduceMax", bias, op.ints(-1), keepdims=keepdims)
    return op("Greater", best, op.scalar(-np.inf, a.dtype))


def _last_visible(op: Builder, a: AttentionNode, L: ir.Value, *, grouped: bool) -> ir.Value:
    """Return the last visible key of each query: `[L, 1]`, or with axes for the batch before it."""
    numbers = op("Range", op.scalar(0), op("Squeeze", L), op.scalar(1))
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
        if terms_of(size_text(length)) == terms_of(total):
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


# -- attention ------------------------------------------------------------------------------------


def lower_to_portable(model: ir.Model, node: ir.Node) -> None:
    """Replace one `Attention` node by portable operators."""
    a = read_attention(node)
    replace_node(model, a, attend(Builder(model, node), a))


def attend(op: Builder, a: AttentionNode) -> list[ir.Value]:
    """Return the output, present key and present value, and the scores if they are read."""
    query, key, value = split_qkv(op, a)
    present_key, present_value = key, value
    if a.past_key is not None and a.past_value is not None:
        present_key = op("Concat", a.past_key, key, axis=2)  # [B, Hkv, S, D]
        present_value = op("Concat", a.past_value, value, axis=2)
    attended, scores = decompose(op, a, query, present_key, present_value)
    present = [_as_own_value(op, a, present_key, key), _as_own_value(op, a, present_value, value)]
    wanted = [] if a.output(3) is None else [_ungroup(op, a, scores)]
    return [split_to_output(op, a, attended), *present, *wanted]


def decompose(
    op: Builder,
    a: AttentionNode,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    *,
    transposed: bool = False,
) -> tuple[ir.Value, ir.Value]:
    """Return the output, `[B, H, L, Dv]`, and the scores of the fourth output.

    The scores are `[B, H, L, S]` or `[B, Hkv, r, L, S]`.

    `query`: `[B, H, L, D]`.
    `key`: `[B, Hkv, S, D]`, with the past.
    `value`: `[B, Hkv, S, Dv]`, with the past.
    `transposed`: Whether `value` is `[B, Hkv, Dv, S]` instead.
    """
    scores = _scores(op, a, query, key)  # [B, H, L, S] or [B, Hkv, r, L, S]
    stages = {RAW: scores}
    scores = stages[CAPPED] = apply_softcap(op, a, scores)
    keys, added = visible_keys(op, a, op.size(query, 2), op.size(key, 2), grouped=True)
    scores = scores if added is None else op("Add", scores, added)
    if keys is not None:
        scores = op("Where", keys, scores, op.scalar(-np.inf, a.dtype))
    stages[MASKED] = scores
    weights = stages[WEIGHTS] = _softmax(op, a, scores, keys)
    attended = _weigh_values(op, a, weights, value, transposed=transposed)
    return attended, stages[a.mode]


def apply_softcap(op: Builder, a: AttentionNode, scores: ir.Value) -> ir.Value:
    """Return softcap · tanh(scores / softcap), or the scores if the node has no softcap."""
    if not a.softcap:
        return scores
    cap = op.scalar(a.softcap, a.dtype)
    return op("Mul", op("Tanh", op("Div", scores, cap)), cap)


def _scores(op: Builder, a: AttentionNode, query: ir.Value, key: ir.Value) -> ir.Value:
    scaled = query if a.scale == 1 else op("Mul", query, op.scalar(a.scale, a.dtype))
    if a.q_per_kv == 1:
        return op("MatMul", scaled, op("Transpose", key, perm=SWAP_LAST_AXES))
    # Group the query heads of each K/V head, and give the keys an axis of 1 to broadcast.
    grouped = op("Reshape", scaled, op.ints(0, a.num_kv_heads, a.q_per_kv, -1, a.head_dim))
    turned = op("Unsqueeze", op("Transpose", key, perm=SWAP_LAST_AXES), op.ints(2))
    return op("MatMul", grouped, turned)  # [B, Hkv, r, L, S]


def _softmax(op: Builder, a: AttentionNode, scores: ir.Value, keys: ir.Value | None) -> ir.Value:
    if a.precision is not None:
        scores = op("Cast", scores, to=a.precision)
    weights = op("Softmax", scores, axis=-1)
    if a.precision is not None:
        weights = op("Cast", weights, to=a.dtype)
    if keys is None or (a.mask is None and a.valid_keys is None):
        return weights
    # The softmax of a query without visible keys is 0/0.
    return op("Where", keys, weights, op.scalar(0.0, a.dtype))


def _weigh_values(
    op: Builder, a: AttentionNode, weights: ir.Value, value: ir.Value, *, transposed: bool
) -> ir.Value:
    if a.q_per_kv > 1:
        value = op("Unsqueeze", value, op.ints(2))
    if transposed:  # directly before MatMul, into which runtimes fuse it
        value = op("Transpose", value, perm=SWAP_LAST_AXES if a.q_per_kv == 1 else [0, 1, 2, 4, 3])
    attended = op("MatMul", weights, value)
    if a.q_per_kv == 1:
        return attended
    return op("Reshape", attended, op.ints(0, a.num_heads, -1, a.v_head_dim))


def _ungroup(op: Builder, a: AttentionNode, scores: ir.Value) -> ir.Value:
    """Merge the groups of scores to `[B, H, L, S]`; with heads last, Reshape can keep L and S."""
    if a.q_per_kv == 1:
        return scores
    last = op("Transpose", scores, perm=[0, 3, 4, 1, 2])  # [B, L, S, Hkv, r]
    joined = op("Reshape", last, op.ints(0, 0, 0, a.num_heads))
    return op("Transpose", joined, perm=[0, 3, 1, 2])


def _as_own_value(op: Builder, a: AttentionNode, present: ir.Value, new: ir.Value) -> ir.Value:
    """Return a value that may become a graph output: a copy if it is the node's input."""
    return op("Identity", present) if present is new and not a.packed else present
