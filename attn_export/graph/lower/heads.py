"""Queries, keys and values with heads in an axis of their own, or side by side."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.graph.lower.build import Builder, take_over
from attn_export.graph.lower.read import AttentionNode


def heads_first(op: Builder, a: AttentionNode) -> tuple[ir.Value, ir.Value, ir.Value]:
    """`[B, H, L, D]`, `[B, Hkv, S - P, D]` and `[B, Hkv, S - P, Dv]`."""
    if not a.packed:
        return a.query, a.key, a.value
    query, key, value = (
        op("Transpose", op("Reshape", x, op.ints(0, 0, heads, width)), perm=[0, 2, 1, 3])
        for x, heads, width in _parts(a)
    )
    return query, key, value


def side_by_side(op: Builder, a: AttentionNode) -> tuple[ir.Value, ir.Value, ir.Value]:
    """`[B, L, H·D]`, `[B, S - P, Hkv·D]` and `[B, S - P, Hkv·Dv]`."""
    if a.packed:
        return a.query, a.key, a.value
    query, key, value = (
        op("Reshape", op("Transpose", x, perm=[0, 2, 1, 3]), op.ints(0, 0, heads * width))
        for x, heads, width in _parts(a)
    )
    return query, key, value


def as_output(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """`[B, H, L, Dv]` as the node gives it: the heads side by side if those of the query are."""
    if not a.packed:
        return attended
    joined = op("Transpose", attended, perm=[0, 2, 1, 3])
    return op("Reshape", joined, op.ints(0, 0, a.num_heads * a.v_head_dim))


def heads_apart(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """`[B, L, H·Dv]` as `[B, H, L, Dv]`."""
    split = op("Reshape", attended, op.ints(0, 0, a.num_heads, a.v_head_dim))
    return op("Transpose", split, perm=[0, 2, 1, 3])


def as_given(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """`[B, L, H·Dv]` as the node gives it."""
    return attended if a.packed else heads_apart(op, a, attended)


def replace_output(a: AttentionNode, index: int, value: ir.Value) -> None:
    """Let `value` be an output of the node, if somebody reads it."""
    old = a.output(index)
    if old is not None:
        value.dtype = a.dtype
        take_over(old, value)


def _parts(a: AttentionNode) -> list[tuple[ir.Value, int, int]]:
    return [
        (a.query, a.num_heads, a.head_dim),
        (a.key, a.num_kv_heads, a.head_dim),
        (a.value, a.num_kv_heads, a.v_head_dim),
    ]
