"""Reader of `Attention` nodes, from which every dialect starts.

https://onnx.ai/onnx/operators/onnx__Attention.html, opsets 23 and 24.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import dims, nodes_of, optional_input, producer_of, value_before
from attn_export.graph.lower.node_builder import Builder, take_over

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


# -- split heads, `[B, H, L, D]`, and merged heads, `[B, L, H·D]` ---------------------------------


SWAP_HEADS_AND_LENGTH = (0, 2, 1, 3)
"""Permutation between `[B, H, L, D]` and `[B, L, H, D]`."""

SWAP_LAST_AXES = (0, 1, 3, 2)
"""Permutation between `[B, H, L, D]` and `[B, H, D, L]`."""


def split_qkv(op: Builder, a: AttentionNode) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return queries, keys and values with split heads.

    Their shapes are `[B, H, L, D]`, `[B, Hkv, S - P, D]` and `[B, Hkv, S - P, Dv]`.
    """
    if not a.packed:
        return a.query, a.key, a.value
    query, key, value = (
        op("Transpose", op("Reshape", x, op.ints(0, 0, heads, width)), perm=SWAP_HEADS_AND_LENGTH)
        for x, heads, width in _operands(a)
    )
    return query, key, value


def merge_qkv(op: Builder, a: AttentionNode) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return queries, keys and values with merged heads.

    Their shapes are `[B, L, H·D]`, `[B, S - P, Hkv·D]` and `[B, S - P, Hkv·Dv]`.
    """
    if a.packed:
        return a.query, a.key, a.value
    query, key, value = (merge_heads(op, *part) for part in _operands(a))
    return query, key, value


def merge_heads(op: Builder, x: ir.Value, heads: int, width: int) -> ir.Value:
    """Return `[B, L, H·D]` of `[B, H, L, D]`: the value from which it was split, if there is one.

    `x`: `[B, H, L, D]`.
    """
    source = merged_source(x)
    if source is not None:
        return source
    swapped = _before_swap(x)
    if swapped is None:
        swapped = op("Transpose", x, perm=SWAP_HEADS_AND_LENGTH)
    return op("Reshape", swapped, op.ints(0, 0, heads * width))


def merged_source(x: ir.Value) -> ir.Value | None:
    """Return the `[B, L, H·D]` that was split to `x` `[B, H, L, D]`; None if there is none."""
    source = _before_swap(x)
    source = None if source is None else value_before(source, "Reshape")
    if source is None or len(dims(x)) != 4:
        return None
    (B, heads, L, width), axes = dims(x), _known_shape(source)
    if len(axes) != 3 or not isinstance(heads, int) or not isinstance(width, int):
        return None
    is_merge = axes[2] == heads * width and known_equal(axes[0], B) and known_equal(axes[1], L)
    return source if is_merge else None


def read_with_merge(node: ir.Node) -> AttentionNode:
    """Read an `Attention` node; `merged` is set if the output's one reader merges heads."""
    a = read_attention(node)
    return a if a.packed else dataclasses.replace(a, merged=_merged_output(a))


def _merged_output(a: AttentionNode) -> ir.Value | None:
    """Return the `[B, L, H·Dv]` to which the only reader merges the heads; None if it does not."""
    swapped = _only_reader(a, a.output(0))
    merge = None if swapped is None or _before_swap(swapped) is None else _only_reader(a, swapped)
    if merge is None or value_before(merge, "Reshape") is None:
        return None
    (B, _, L, _), shape = dims(a.query), dims(merge)
    is_merge = len(shape) == 3 and shape[2] == a.num_heads * a.v_head_dim
    return merge if is_merge and known_equal(shape[0], B) and known_equal(shape[1], L) else None


def _only_reader(a: AttentionNode, value: ir.Value | None) -> ir.Value | None:
    """Return the output of the only node of a's graph that reads a value, as its first input."""
    uses = () if value is None or value.is_graph_output() else tuple(value.uses())
    is_only = len(uses) == 1 and uses[0].idx == 0 and uses[0].node.graph is a.node.graph
    return uses[0].node.outputs[0] if is_only else None


def same_for_heads(a: AttentionNode) -> bool:
    """Return whether the mask's shape shows that all heads hide the same keys."""
    return a.mask is not None and dims(a.mask)[:-2][1:] in ((), (1,))


def _before_swap(value: ir.Value) -> ir.Value | None:
    """Return the input of the Transpose that computes a value by swapping heads and length."""
    node = producer_of(value, "Transpose")
    perm = () if node is None else tuple(node.attributes.get_ints("perm", ()))
    return node.inputs[0] if node is not None and perm == SWAP_HEADS_AND_LENGTH else None


def _known_shape(value: ir.Value) -> tuple[Size, ...]:
    """Return the shape of a value, for a MatMul without one from the shapes of its operands."""
    node = producer_of(value, "MatMul")
    if dims(value) or node is None:
        return dims(value)
    left, right = (dims(x) if x is not None else () for x in node.inputs)
    return (*left[:-1], right[-1]) if len(right) == 2 else ()


def split_to_output(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """Return `[B, H, L, Dv]` converted to the layout of the node's output.

    `attended`: `[B, H, L, Dv]`.
    """
    if not a.merges_heads:
        return attended
    if dims(a.query)[-2] == 1:  # the order of elements is the same
        return op("Reshape", attended, op.ints(0, 1, a.num_heads * a.v_head_dim))
    swapped = op("Transpose", attended, perm=SWAP_HEADS_AND_LENGTH)
    return op("Reshape", swapped, op.ints(0, 0, a.num_heads * a.v_head_dim))


def merged_to_output(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """Return `[B, L, H·Dv]` converted to the layout of the node's output.

    `attended`: `[B, L, H·Dv]`.
    """
    if a.merges_heads:
        return attended
    split = op("Reshape", attended, op.ints(0, 0, a.num_heads, a.v_head_dim))
    return op("Transpose", split, perm=SWAP_HEADS_AND_LENGTH)


def replace_node(model: ir.Model, a: AttentionNode, outputs: Sequence[ir.Value]) -> None:
    """Replace the outputs of the node that are read, and remove the node."""
    for index, value in enumerate(outputs):
        old = a.merged if index == 0 and a.merged is not None else a.output(index)
        if old is None:
            continue
        value.dtype = a.dtype
        node = old.producer()
        take_over(old, value)
        # The nodes that merged the heads.
        while node is not None and node is not a.node:
            before = node.inputs[0]
            model.graph.remove(node, safe=True)
            node = before.producer() if before is not None else None
    model.graph.remove(a.node, safe=True)


def _operands(a: AttentionNode) -> list[tuple[ir.Value, int, int]]:
    return [
        (a.query, a.num_heads, a.head_dim),
        (a.key, a.num_kv_heads, a.head_dim),
        (a.value, a.num_kv_heads, a.v_head_dim),
    ]
