"""Conversions between split heads, `[B, H, L, D]`, and merged heads, `[B, L, H·D]`."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import dims
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.read import AttentionNode

SWAPPED = [0, 2, 1, 3]


def split_qkv(op: Builder, a: AttentionNode) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return queries, keys and values with split heads.

    Their shapes are `[B, H, L, D]`, `[B, Hkv, S - P, D]` and `[B, Hkv, S - P, Dv]`.

    Args:
        op: Builder of the nodes.
        a: The `Attention` node as plain values.
    """
    if not a.packed:
        return a.query, a.key, a.value
    query, key, value = (
        op("Transpose", op("Reshape", x, op.ints(0, 0, heads, width)), perm=SWAPPED)
        for x, heads, width in _operands(a)
    )
    return query, key, value


def merge_qkv(op: Builder, a: AttentionNode) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return queries, keys and values with merged heads.

    Their shapes are `[B, L, H·D]`, `[B, S - P, Hkv·D]` and `[B, S - P, Hkv·Dv]`.

    Args:
        op: Builder of the nodes.
        a: The `Attention` node as plain values.
    """
    if a.packed:
        return a.query, a.key, a.value
    query, key, value = (merge_heads(op, *part) for part in _operands(a))
    return query, key, value


def merge_heads(op: Builder, x: ir.Value, heads: int, width: int) -> ir.Value:
    """Convert `[B, H, L, D]` to `[B, L, H·D]`, or return the value from which it was split.

    Args:
        op: Makes the nodes.
        x: `[B, H, L, D]`.
        heads: H.
        width: D.
    """
    source = merged_source(x)
    if source is not None:
        return source
    return op("Reshape", op("Transpose", x, perm=SWAPPED), op.ints(0, 0, heads * width))


def merged_source(x: ir.Value) -> ir.Value | None:
    """Return the `[B, L, H·D]` that was split to `x` `[B, H, L, D]`; None if there is none."""
    before_transpose = _input_of(x.producer(), "Transpose")
    source = None if before_transpose is None else _input_of(before_transpose.producer(), "Reshape")
    if source is None or len(dims(x)) != 4:
        return None
    (B, heads, L, width), axes = dims(x), _known_shape(source)
    if len(axes) != 3 or not isinstance(heads, int) or not isinstance(width, int):
        return None
    is_merge = axes[2] == heads * width and known_equal(axes[0], B) and known_equal(axes[1], L)
    return source if is_merge else None


def merged_output(a: AttentionNode) -> ir.Value | None:
    """Return the `[B, L, H·Dv]` to which the only reader merges the heads; None if it does not."""
    value = a.output(0)
    for op_type in ("Transpose", "Reshape"):
        uses = () if value is None or value.is_graph_output() else tuple(value.uses())
        node = uses[0].node if len(uses) == 1 and uses[0].idx == 0 else None
        if node is None or _input_of(node, op_type) is None or node.graph is not a.node.graph:
            return None
        value = node.outputs[0]
    assert value is not None
    B, _, L, _ = dims(a.query)
    shape = dims(value)
    is_merge = len(shape) == 3 and shape[2] == a.num_heads * a.v_head_dim
    return value if is_merge and known_equal(shape[0], B) and known_equal(shape[1], L) else None


def same_for_heads(a: AttentionNode) -> bool:
    """Return whether the mask's shape shows that all heads hide the same keys."""
    return a.mask is not None and dims(a.mask)[:-2][1:] in ((), (1,))


def _input_of(node: ir.Node | None, op_type: str) -> ir.Value | None:
    """Return the first input if the node has this type; a Transpose must swap axes 1 and 2."""
    if node is None or node.op_type != op_type or node.domain:
        return None
    perm = node.attributes.get_ints("perm", ()) if op_type == "Transpose" else SWAPPED
    return node.inputs[0] if list(perm) == SWAPPED else None


def _known_shape(value: ir.Value) -> tuple[Size, ...]:
    """Return the shape of a value, for a MatMul without one from the shapes of its operands."""
    node = value.producer()
    if dims(value) or node is None or node.op_type != "MatMul":
        return dims(value)
    left, right = (dims(x) if x is not None else () for x in node.inputs)
    return (*left[:-1], right[-1]) if len(right) == 2 else ()


def split_to_output(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """Convert `[B, H, L, Dv]` to the layout of the node's output.

    Args:
        op: Makes the nodes.
        a: The node.
        attended: `[B, H, L, Dv]`.
    """
    if not a.merges_heads:
        return attended
    if dims(a.query)[-2] == 1:  # the order of elements is the same
        return op("Reshape", attended, op.ints(0, 1, a.num_heads * a.v_head_dim))
    swapped = op("Transpose", attended, perm=SWAPPED)
    return op("Reshape", swapped, op.ints(0, 0, a.num_heads * a.v_head_dim))


def split_heads(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """Convert `[B, L, H·Dv]` to `[B, H, L, Dv]`.

    Args:
        op: Makes the nodes.
        a: The node.
        attended: `[B, L, H·Dv]`.
    """
    split = op("Reshape", attended, op.ints(0, 0, a.num_heads, a.v_head_dim))
    return op("Transpose", split, perm=SWAPPED)


def merged_to_output(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """Convert `[B, L, H·Dv]` to the layout of the node's output.

    Args:
        op: Makes the nodes.
        a: The node.
        attended: `[B, L, H·Dv]`.
    """
    return attended if a.merges_heads else split_heads(op, a, attended)


def replace_output(a: AttentionNode, index: int, value: ir.Value) -> None:
    """Replace an output of the node by `value`, if the output is read.

    Args:
        a: The node.
        index: The index of the output.
        value: The new value.
    """
    old = a.merged if index == 0 and a.merged is not None else a.output(index)
    if old is None:
        return
    value.dtype = a.dtype
    graph, node = a.node.graph, old.producer()
    take_over(old, value)
    while graph is not None and node is not None and node is not a.node:
        before = node.inputs[0]
        graph.remove(node, safe=True)
        node = before.producer() if before is not None else None


def _operands(a: AttentionNode) -> list[tuple[ir.Value, int, int]]:
    return [
        (a.query, a.num_heads, a.head_dim),
        (a.key, a.num_kv_heads, a.head_dim),
        (a.value, a.num_kv_heads, a.v_head_dim),
    ]
