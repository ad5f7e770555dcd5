"""Queries, keys and values with heads in an axis of their own, or side by side."""

from __future__ import annotations

import onnx_ir as ir

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import dims
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.read import AttentionNode

SWAPPED = [0, 2, 1, 3]


def heads_first(op: Builder, a: AttentionNode) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return `[B, H, L, D]`, `[B, Hkv, S - P, D]` and `[B, Hkv, S - P, Dv]`.

    Args:
        op: Builder of the nodes.
        a: The `Attention` node as plain values.
    """
    if not a.packed:
        return a.query, a.key, a.value
    query, key, value = (
        op("Transpose", op("Reshape", x, op.ints(0, 0, heads, width)), perm=SWAPPED)
        for x, heads, width in _parts(a)
    )
    return query, key, value


def side_by_side(op: Builder, a: AttentionNode) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return `[B, L, H·D]`, `[B, S - P, Hkv·D]` and `[B, S - P, Hkv·Dv]`.

    Args:
        op: Builder of the nodes.
        a: The `Attention` node as plain values.
    """
    if a.packed:
        return a.query, a.key, a.value
    query, key, value = (joined(op, *part) for part in _parts(a))
    return query, key, value


def joined(op: Builder, x: ir.Value, heads: int, width: int) -> ir.Value:
    """Reshape `[B, H, L, D]` to `[B, L, H·D]`.

    Args:
        op: Makes the nodes.
        x: `[B, H, L, D]`.
        heads: H.
        width: D.
    """
    whole = before_split(x)
    if whole is not None:
        return whole
    return op("Reshape", op("Transpose", x, perm=SWAPPED), op.ints(0, 0, heads * width))


def before_split(x: ir.Value) -> ir.Value | None:
    """Return the `[B, L, H·D]` that `[B, H, L, D]` was made of, if there is one."""
    swapped = _only(x.producer(), "Transpose")
    whole = None if swapped is None else _only(swapped.producer(), "Reshape")
    if whole is None or len(dims(x)) != 4:
        return None
    (B, heads, L, width), axes = dims(x), _axes(whole)
    if len(axes) != 3 or not isinstance(heads, int) or not isinstance(width, int):
        return None
    same = axes[2] == heads * width and known_equal(axes[0], B) and known_equal(axes[1], L)
    return whole if same else None


def joins_heads(a: AttentionNode) -> ir.Value | None:
    """Return `[B, L, H·Dv]`, if all readers of the attention join its heads."""
    value = a.output(0)
    for op_type in ("Transpose", "Reshape"):
        uses = () if value is None or value.is_graph_output() else tuple(value.uses())
        node = uses[0].node if len(uses) == 1 and uses[0].idx == 0 else None
        if node is None or _only(node, op_type) is None or node.graph is not a.node.graph:
            return None
        value = node.outputs[0]
    assert value is not None
    B, _, L, _ = dims(a.query)
    shape = dims(value)
    same = len(shape) == 3 and shape[2] == a.num_heads * a.v_head_dim
    return value if same and known_equal(shape[0], B) and known_equal(shape[1], L) else None


def same_for_heads(a: AttentionNode) -> bool:
    """Return whether the mask's shape shows that all heads hide the same keys."""
    return a.mask is not None and dims(a.mask)[:-2][1:] in ((), (1,))


def _only(node: ir.Node | None, op_type: str) -> ir.Value | None:
    """Return the input of a node of this type; a Transpose must swap heads and length."""
    if node is None or node.op_type != op_type or node.domain:
        return None
    perm = node.attributes.get_ints("perm", ()) if op_type == "Transpose" else SWAPPED
    return node.inputs[0] if list(perm) == SWAPPED else None


def _axes(value: ir.Value) -> tuple[Size, ...]:
    """Return the axes of a value; for a product without a shape, those of its factors."""
    node = value.producer()
    if dims(value) or node is None or node.op_type != "MatMul":
        return dims(value)
    left, right = (dims(x) if x is not None else () for x in node.inputs)
    return (*left[:-1], right[-1]) if len(right) == 2 else ()


def as_output(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """Convert `[B, H, L, Dv]` to the layout of the node: joined heads if the query has them.

    Args:
        op: Makes the nodes.
        a: The node.
        attended: `[B, H, L, Dv]`.
    """
    if not a.gives_joined:
        return attended
    if dims(a.query)[-2] == 1:  # the heads are beside each other as it is
        return op("Reshape", attended, op.ints(0, 1, a.num_heads * a.v_head_dim))
    swapped = op("Transpose", attended, perm=SWAPPED)
    return op("Reshape", swapped, op.ints(0, 0, a.num_heads * a.v_head_dim))


def heads_apart(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """Reshape `[B, L, H·Dv]` to `[B, H, L, Dv]`.

    Args:
        op: Makes the nodes.
        a: The node.
        attended: `[B, L, H·Dv]`.
    """
    split = op("Reshape", attended, op.ints(0, 0, a.num_heads, a.v_head_dim))
    return op("Transpose", split, perm=SWAPPED)


def in_output_layout(op: Builder, a: AttentionNode, attended: ir.Value) -> ir.Value:
    """Convert `[B, L, H·Dv]` to the layout of the node's output.

    Args:
        op: Makes the nodes.
        a: The node.
        attended: `[B, L, H·Dv]`.
    """
    return attended if a.gives_joined else heads_apart(op, a, attended)


def replace_output(a: AttentionNode, index: int, value: ir.Value) -> None:
    """Replace an output of the node by `value`, if the output is read.

    Args:
        a: The node.
        index: The index of the output.
        value: The new value.
    """
    old = a.joined if index == 0 and a.joined is not None else a.output(index)
    if old is None:
        return
    value.dtype = a.dtype
    graph, node = a.node.graph, old.producer()
    take_over(old, value)
    while graph is not None and node is not None and node is not a.node:
        before = node.inputs[0]
        graph.remove(node, safe=True)
        node = before.producer() if before is not None else None


def _parts(a: AttentionNode) -> list[tuple[ir.Value, int, int]]:
    return [
        (a.query, a.num_heads, a.head_dim),
        (a.key, a.num_kv_heads, a.head_dim),
        (a.value, a.num_kv_heads, a.v_head_dim),
    ]
