"""`Attention` in operators of opset 18 that every runtime has.

K/V heads are shared by a 5-D MatMul, never by Expand; rows that see nothing become 0 by a second
Where. Legend: B, L, S, H, Hkv, D, Dv as everywhere, r = H // Hkv.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.graph.lower.build import Builder, take_over
from attn_export.graph.lower.masks import Allowed, allowed_keys
from attn_export.graph.lower.read import (
    CAPPED,
    MASKED,
    RAW,
    WEIGHTS,
    AttentionNode,
    read_attention,
)


def lower_to_portable(model: ir.Model, node: ir.Node) -> None:
    """Put portable operators in the place of one `Attention` node.

    Raises:
        GraphError: If heads or widths of the node are not known.
    """
    a = read_attention(node)
    op = Builder(model, node)
    query, key, value = _heads_first(op, a)
    present_key, present_value = key, value
    if a.past_key is not None and a.past_value is not None:
        present_key = op("Concat", a.past_key, key, axis=2)  # [B, Hkv, S, D]
        present_value = op("Concat", a.past_value, value, axis=2)
    scores = _scores(op, a, query, present_key)  # [B, H, L, S] or [B, Hkv, r, L, S]
    stages = {RAW: scores}
    if a.softcap:
        cap = op.number(a.softcap, a.dtype)
        scores = op("Mul", op("Tanh", op("Div", scores, cap)), cap)
    stages[CAPPED] = scores
    allowed = allowed_keys(op, a, query, present_key)
    scores = _masked(op, a, scores, allowed)
    stages[MASKED] = scores
    weights = stages[WEIGHTS] = _softmax(op, a, scores, allowed)
    attended = _attended(op, a, weights, present_value)
    _replace(a, 0, attended)
    _replace(a, 1, _own(op, a, present_key, key))
    _replace(a, 2, _own(op, a, present_value, value))
    if a.output(3) is not None:
        _replace(a, 3, _ungrouped(op, a, stages[a.mode]))
    model.graph.remove(node, safe=True)


def _heads_first(op: Builder, a: AttentionNode) -> tuple[ir.Value, ir.Value, ir.Value]:
    """`[B, H, L, D]`, `[B, Hkv, S - P, D]` and `[B, Hkv, S - P, Dv]`."""
    if not a.packed:
        return a.query, a.key, a.value
    found = []
    for x, heads, width in (
        (a.query, a.num_heads, a.head_dim),
        (a.key, a.num_kv_heads, a.head_dim),
        (a.value, a.num_kv_heads, a.v_head_dim),
    ):
        split = op("Reshape", x, op.ints(0, 0, heads, width))
        found.append(op("Transpose", split, perm=[0, 2, 1, 3]))
    return found[0], found[1], found[2]


def _scores(op: Builder, a: AttentionNode, query: ir.Value, key: ir.Value) -> ir.Value:
    scaled = query if a.scale == 1 else op("Mul", query, op.number(a.scale, a.dtype))
    if a.q_per_kv == 1:
        return op("MatMul", scaled, op("Transpose", key, perm=[0, 1, 3, 2]))
    # The query heads of one K/V head beside each other, and an axis of 1 for them in the keys.
    grouped = op("Reshape", scaled, op.ints(0, a.num_kv_heads, a.q_per_kv, -1, a.head_dim))
    turned = op("Unsqueeze", op("Transpose", key, perm=[0, 1, 3, 2]), op.ints(2))
    return op("MatMul", grouped, turned)  # [B, Hkv, r, L, S]


def _masked(op: Builder, a: AttentionNode, scores: ir.Value, allowed: Allowed) -> ir.Value:
    if allowed.added is not None:
        scores = op("Add", scores, allowed.added)
    if allowed.keys is None:
        return scores
    return op("Where", allowed.keys, scores, op.number(-np.inf, a.dtype))


def _softmax(op: Builder, a: AttentionNode, scores: ir.Value, allowed: Allowed) -> ir.Value:
    wide = a.precision is not None and a.precision != a.dtype
    if wide:
        scores = op("Cast", scores, to=a.precision)
    weights = op("Softmax", scores, axis=-1)
    if wide:
        weights = op("Cast", weights, to=a.dtype)
    if allowed.keys is None or not allowed.may_hide_all:
        return weights
    # Softmax over nothing is 0/0.
    return op("Where", allowed.keys, weights, op.number(0.0, a.dtype))


def _attended(op: Builder, a: AttentionNode, weights: ir.Value, value: ir.Value) -> ir.Value:
    if a.q_per_kv > 1:
        grouped = op("MatMul", weights, op("Unsqueeze", value, op.ints(2)))
        attended = op("Reshape", grouped, op.ints(0, a.num_heads, -1, a.v_head_dim))
    else:
        attended = op("MatMul", weights, value)  # [B, H, L, Dv]
    if not a.packed:
        return attended
    joined = op("Transpose", attended, perm=[0, 2, 1, 3])
    return op("Reshape", joined, op.ints(0, 0, a.num_heads * a.v_head_dim))


def _ungrouped(op: Builder, a: AttentionNode, scores: ir.Value) -> ir.Value:
    """`[B, H, L, S]`: the heads are joined at the end, where Reshape can keep L and S."""
    if a.q_per_kv == 1:
        return scores
    last = op("Transpose", scores, perm=[0, 3, 4, 1, 2])  # [B, L, S, Hkv, r]
    joined = op("Reshape", last, op.ints(0, 0, 0, a.num_heads))
    return op("Transpose", joined, perm=[0, 3, 1, 2])


def _own(op: Builder, a: AttentionNode, present: ir.Value, new: ir.Value) -> ir.Value:
    """A value that may be an output: not what somebody else gives."""
    return op("Identity", present) if present is new and not a.packed else present


def _replace(a: AttentionNode, index: int, value: ir.Value) -> None:
    old = a.output(index)
    if old is not None:
        value.dtype = a.dtype
        take_over(old, value)
