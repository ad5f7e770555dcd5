"""Reader of `Attention` nodes, from which every dialect starts.

https://onnx.ai/onnx/operators/onnx__Attention.html, opsets 23 and 24.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.ir_helpers import nodes_of, optional_input

RAW, CAPPED, MASKED, WEIGHTS = range(4)
"""Values of `qk_matmul_output_mode`: the scores that the fourth output holds."""


@dataclasses.dataclass(frozen=True)
class AttentionNode:
    """An `Attention` node with its inputs and attributes as plain values.

    Attributes:
        query: `[B, H, L, D]`, or `[B, L, H·D]` if packed.
        key: `[B, Hkv, S - P, D]`, or `[B, S - P, Hkv·D]` if packed.
        value: `[B, Hkv, S - P, Dv]`, or `[B, S - P, Hkv·Dv]` if packed.
        mask: The mask, of 2 to 4 axes, or None.
        past_key: `[B, Hkv, P, D]`, or None.
        past_value: `[B, Hkv, P, Dv]`, or None.
        valid_keys: `nonpad_kv_seqlen`, the number of keys of each batch element, `[B]`, or None.
        packed: Whether queries, keys and values are 3-D, `[B, L, H·D]`.
        precision: The type in which softmax computes, if it is not that of the query; else None.
        merged: The value `[B, L, H·Dv]` that the graph makes of the 4-D output, if nothing else
            reads that output; else None.
    """

    node: ir.Node
    query: ir.Value
    key: ir.Value
    value: ir.Value
    mask: ir.Value | None
    past_key: ir.Value | None
    past_value: ir.Value | None
    valid_keys: ir.Value | None
    packed: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    softcap: float
    causal: bool
    precision: ir.DataType | None
    mode: int
    dtype: ir.DataType
    merged: ir.Value | None = None

    @property
    def merges_heads(self) -> bool:
        """Return whether the attention must be `[B, L, H·Dv]`."""
        return self.packed or self.merged is not None

    @property
    def is_plain(self) -> bool:
        """Return whether the scores are unused, and the softmax is in the type of the query."""
        return self.output(3) is None and self.precision is None

    @property
    def may_hide_all(self) -> bool:
        """Return whether a query may see no key."""
        return self.mask is not None or self.valid_keys is not None

    @property
    def q_per_kv(self) -> int:
        """H // Hkv."""
        return self.num_heads // self.num_kv_heads

    def output(self, index: int) -> ir.Value | None:
        """Return the output if it is read: attention, present key, present value or scores."""
        if index >= len(self.node.outputs):
            return None
        value = self.node.outputs[index]
        return value if value.name and (value.uses() or value.is_graph_output()) else None


def read_attention(node: ir.Node) -> AttentionNode:
    """Read an `Attention` node."""
    known = {"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale",
             "softcap", "softmax_precision"}  # fmt: skip
    for name in node.attributes:
        if name not in known:
            raise GraphError(
                f"{node.name}: the attribute {name} is newer than opset 24; export at opset 24"
            )
    query, key, value, mask, past_key, past_value, valid_keys = (
        optional_input(node, i) for i in range(7)
    )
    if query is None or key is None or value is None:
        raise GraphError(f"{node.name} lacks queries, keys or values; export it again")
    if query.dtype is None:
        raise GraphError(f"the type of {query.name} is not known; declare it")
    packed = len(_shape(node, query)) == 3
    if packed:
        H, Hkv = (node.attributes.get_int(f"{side}_num_heads", 0) for side in ("q", "kv"))
        widths = [_fixed(node, x, 2) for x in (query, value)]
        D, Dv = widths[0] // max(H, 1), widths[1] // max(Hkv, 1)
    else:
        H, Hkv = (_fixed(node, x, 1) for x in (query, key))
        D, Dv = _fixed(node, query, 3), _fixed(node, value, 3)
    if not H or not Hkv or H % Hkv:
        raise GraphError(f"{node.name} has {H} query heads and {Hkv} K/V heads; give a multiple")
    precision = node.attributes.get_int("softmax_precision", 0)
    return AttentionNode(
        node, query, key, value, mask, past_key, past_value, valid_keys,
        packed=packed, num_heads=H, num_kv_heads=Hkv, head_dim=D, v_head_dim=Dv,
        scale=node.attributes.get_float("scale", 1.0 / math.sqrt(D)),
        softcap=node.attributes.get_float("softcap", 0.0),
        causal=bool(node.attributes.get_int("is_causal", 0)),
        precision=None if precision in (0, query.dtype) else ir.DataType(precision),
        mode=node.attributes.get_int("qk_matmul_output_mode", RAW),
        dtype=query.dtype,
    )  # fmt: skip


def attentions_of(model: ir.Model) -> list[AttentionNode]:
    """Return the `Attention` nodes of a graph as plain values."""
    return [read_attention(node) for node in nodes_of(model, "Attention")]


def _shape(node: ir.Node, value: ir.Value) -> ir.Shape:
    if value.shape is None:
        raise GraphError(f"{node.name}: the shape of {value.name} is not known; declare it")
    return value.shape


def _fixed(node: ir.Node, value: ir.Value, axis: int) -> int:
    size = _shape(node, value)[axis]
    if not isinstance(size, int):
        raise GraphError(
            f"{node.name}: axis {axis} of {value.name}, heads or their width, is "
            f"{size.value or '?'!r}; give it a size"
        )
    return size
