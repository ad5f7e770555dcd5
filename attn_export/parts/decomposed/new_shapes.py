"""Nodes that give a value another order of axes and another shape."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from attn_export.graph.axis_names import Size, axis_of_an_input, known_equal, reshape_target
from attn_export.graph.ir_helpers import dims, set_type
from attn_export.graph.lower.node_builder import Builder


def arranged(
    op: Builder, source: ir.Value, shape: Sequence[Size], order: Sequence[int]
) -> ir.Value | None:
    """Return a source as `[B, H, n, m]`; None if its new shape cannot be stated.

    `shape`: The shape `[B, H, n, m]`.
    `order`: The axes of `shape` in the order in which the source holds them.
    """
    in_memory = [shape[axis] for axis in order]
    value = reshaped(op, source, in_memory)
    back = [order.index(axis) for axis in range(4)]
    if value is None or back == sorted(back):
        return value
    return set_type(op("Transpose", value, perm=back), source.dtype, ir.Shape(shape))


def reordered(
    op: Builder, value: ir.Value, order: Sequence[int], shape: Sequence[Size]
) -> ir.Value | None:
    """Return a value with its axes in another order, in a new shape; None if it cannot be stated.

    `shape`: The shape after that.
    """
    if list(order) != sorted(order):
        moved = ir.Shape([dims(value)[axis] for axis in order])
        value = set_type(op("Transpose", value, perm=list(order)), value.dtype, moved)
    return reshaped(op, value, shape)


def reshaped(op: Builder, value: ir.Value, shape: Sequence[Size]) -> ir.Value | None:
    """Return a value in a new shape; the value itself if it has it, None if it cannot be stated.

    `shape`: The shape.
    """
    before = dims(value)
    if len(before) == len(shape) and all(map(known_equal, before, shape)):
        return value
    target = reshape_target(before, shape)
    numbers = None if target is None else op.ints(*target)
    if numbers is None:  # one size is inferred, and the others are read
        parts, inferred = list[ir.Value](), 0
        for size in shape:
            axis = next((n for n, old in enumerate(before) if known_equal(old, size)), None)
            seen = axis_of_an_input(op.model, size) if axis is None else (value, axis)
            inferred += seen is None and not isinstance(size, int)
            known = op.ints(size if isinstance(size, int) else -1)
            parts.append(known if seen is None else op.size(*seen))
        if inferred > 1:
            return None
        numbers = op("Concat", *parts, axis=0)
    return set_type(op("Reshape", value, numbers), value.dtype, ir.Shape(shape))
