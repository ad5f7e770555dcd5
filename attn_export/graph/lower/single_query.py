"""One query a row against many keys: each key is read once, for all query heads that share it.

The query heads of one K/V head become the rows of one product (fold). With K as its left operand
(swap) a CPU streams it through the cache once and packs the few queries instead.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.graph.lower.heads import as_output, before_split, same_for_heads
from attn_export.graph.lower.node_builder import Builder
from attn_export.graph.lower.portable import capped
from attn_export.graph.lower.read import AttentionNode
from attn_export.graph.lower.visible_keys import allowed_keys, as_bias

TURNED = [0, 1, 3, 2]


def fold(
    op: Builder, a: AttentionNode, key: ir.Value, value: ir.Value, *, transposed: bool = False
) -> ir.Value:
    """Return the attention in the layout of the node's output.

    Args:
        op: Makes the nodes.
        a: The node; its query is `[B, H, 1, D]`.
        key: `[B, Hkv, S, D]`, with the past.
        value: `[B, Hkv, S, Dv]`, with the past.
        transposed: Whether it is `[B, Hkv, Dv, S]` instead.
    """
    # With one query it does not matter whether the heads stand before it or behind.
    query = before_split(a.query) or a.query
    scaled = op("Mul", query, op.number(a.scale, a.dtype))
    rows = op("Reshape", scaled, op.ints(0, a.num_kv_heads, a.q_per_kv, a.head_dim))
    scores = _scores(op, a, rows, key)  # [B, Hkv, r, S]
    # Not grouped: a Transpose that is moved past Reshape would make what follows slow.
    scores = capped(op, a, op("Reshape", scores, op.ints(0, a.num_heads, 1, -1)))
    allowed = allowed_keys(op, a, op.ints(1), op.size(key, 2), grouped=False)
    bias = as_bias(op, a, allowed)  # [B, 1 or H, 1, S]
    if bias is not None:
        scores = op("Add", scores, bias)
    weights = op("Softmax", scores, axis=-1)
    weights = op("Reshape", weights, op.ints(0, a.num_kv_heads, a.q_per_kv, -1))
    if transposed:
        attended = op("MatMul", value, op("Transpose", weights, perm=TURNED))
        attended = op("Transpose", attended, perm=TURNED)
    else:
        attended = op("MatMul", weights, value)  # [B, Hkv, r, Dv]
    flat = a.gives_joined and (a.mask is None or same_for_heads(a))
    shape = (1, a.num_heads * a.v_head_dim) if flat else (a.num_heads, 1, a.v_head_dim)
    attended = op("Reshape", attended, op.ints(0, *shape))
    if bias is not None and a.mask is not None:  # without one, a row sees at least its own key
        best = op("ReduceMax", bias, op.ints(-1), keepdims=int(not flat))
        seen = op("Greater", best, op.number(-np.inf, a.dtype))
        attended = op("Where", seen, attended, op.number(0.0, a.dtype))
    return attended if flat else as_output(op, a, attended)


def _scores(op: Builder, a: AttentionNode, rows: ir.Value, key: ir.Value) -> ir.Value:
    if a.q_per_kv == 1:  # one row: there is nothing to pack
        return op("MatMul", rows, op("Transpose", key, perm=TURNED))
    turned = op("MatMul", key, op("Transpose", rows, perm=TURNED))  # [B, Hkv, S, r]
    return op("Transpose", turned, perm=TURNED)
