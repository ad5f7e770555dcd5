"""Lowering of `Attention` to operators of opset 18 that every runtime supports.

K/V heads are shared by a 5-D MatMul, never by Expand. A second Where sets the results of queries
without visible keys to 0. Legend: B, L, S, H, Hkv, D, Dv as everywhere, r = H // Hkv.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.graph.lower.heads import SWAP_LAST_AXES, replace_node, split_qkv, split_to_output
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.read import CAPPED, MASKED, RAW, WEIGHTS, AttentionNode, read_attention
from attn_export.graph.lower.visible_keys import VisibleKeys, visible_keys


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
    visible = visible_keys(op, a, op.size(query, 2), op.size(key, 2), grouped=True)
    scores = stages[MASKED] = _apply_mask(op, a, scores, visible)
    weights = stages[WEIGHTS] = _softmax(op, a, scores, visible)
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


def _apply_mask(op: Builder, a: AttentionNode, scores: ir.Value, visible: VisibleKeys) -> ir.Value:
    if visible.added is not None:
        scores = op("Add", scores, visible.added)
    if visible.keys is None:
        return scores
    return op("Where", visible.keys, scores, op.scalar(-np.inf, a.dtype))


def _softmax(op: Builder, a: AttentionNode, scores: ir.Value, visible: VisibleKeys) -> ir.Value:
    if a.precision is not None:
        scores = op("Cast", scores, to=a.precision)
    weights = op("Softmax", scores, axis=-1)
    if a.precision is not None:
        weights = op("Cast", weights, to=a.dtype)
    if visible.keys is None or not a.may_hide_all:
        return weights
    # The softmax of a query without visible keys is 0/0.
    return op("Where", visible.keys, weights, op.scalar(0.0, a.dtype))


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
