"""Changes to nodes that ONNX Runtime refuses or computes otherwise than PyTorch.

PyTorch broadcasts masks, batches and rotary caches, takes any scale, and masks a key by -inf
only. ONNX Runtime does none of this. Each pass is one function on an `onnx_ir.Model` that leaves
a correct graph behind, and leaves alone what is right already or of which too little is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import axis_of_an_input, known_equal
from attn_export.graph.ir_helpers import constant, dims, insert, ints, nodes_of, optional_input
from attn_export.spec.inputs import MASK_FLOOR

PASSED_ON = frozenset(
    {
        "Add", "Cast", "Concat", "Expand", "Identity", "Mul", "Reshape", "Slice", "Squeeze",
        "Sub", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
"""Operators through which a huge constant gets into a mask."""


class AxisSize(NamedTuple):
    """Size of an axis: its known part, and a value that holds it as int64 `[1]`."""

    dim: int | ir.SymbolicDim
    value: ir.Value


def make_ort_compatible(model: ir.Model) -> None:
    """Run all passes of this file, in the cheapest order."""
    clamp_masks(model)
    spread_masks(model)
    spread_batches(model)
    make_scales_positive(model)
    spread_rotary_caches(model)


def clamp_masks(model: ir.Model) -> None:
    """Keep the finite values of float masks above `MASK_FLOOR`.

    ONNX Runtime takes finfo.min for -inf, so a row of it is 0 there and an average in PyTorch.
    Only masks that may hold such values are clamped: those that the caller gives, and those
    with such a constant in their making.
    """
    for node, mask in _masks(model):
        if mask.dtype != ir.DataType.FLOAT or not _may_be_huge(mask):
            continue
        floor = constant(model, np.array(MASK_FLOOR, np.float32))
        lowest = constant(model, np.array(-np.inf, np.float32))
        clipped = insert(node, ir.node("Clip", [mask, floor]), mask)
        hidden = insert(node, ir.node("Equal", [mask, lowest]), mask, ir.DataType.BOOL)
        kept = insert(node, ir.node("Where", [hidden, mask, clipped]), mask)
        node.replace_input_with(3, kept)


def spread_masks(model: ir.Model) -> None:
    """Write masks out as rank 2 or 4, with all L rows and all S columns.

    ONNX Runtime refuses a mask whose L or S axis is 1 (every key-padding mask), and runtimes
    read rank 3 differently: it is `[H, L, S]`, as numpy broadcasts it.
    """
    for node, mask in _masks(model):
        rank = len(dims(mask))
        if rank not in (2, 3, 4):
            continue
        grown: dict[int, AxisSize] = {}
        full = 2 if rank == 2 else 4
        for axis, size in ((-2, _query_length), (-1, _key_length)):
            if _may_be_one(dims(mask)[axis]):
                length = size(model, node)
                if length.dim != 1 and not known_equal(length.dim, dims(mask)[axis]):
                    grown[full + axis] = length
        if grown:
            node.replace_input_with(3, _expanded(model, node, mask, grown, full))
        elif rank == 3:
            first = ints(model, 0)
            lifted = insert(node, ir.node("Unsqueeze", [mask, first]), mask)
            lifted.shape = ir.Shape([1, *dims(mask)])
            node.replace_input_with(3, lifted)


def spread_batches(model: ir.Model) -> None:
    """Repeat a query, key or value whose batch is 1 beside others whose batch is not.

    Learned queries are such. PyTorch broadcasts the batch, the operator does not.
    """
    for node in nodes_of(model, "Attention"):
        parts = [value for value in node.inputs[:3] if value is not None and dims(value)]
        whole = [value for value in parts if dims(value)[0] != 1]
        if len(parts) < 3 or not whole or optional_input(node, 4) is not None:
            continue
        for index, value in enumerate(parts):
            if dims(value)[0] == 1:
                batch = _size(model, node, whole[0], 0)
                spread = _expanded(model, node, value, {0: batch}, len(dims(value)))
                node.replace_input_with(index, spread)


def make_scales_positive(model: ir.Model) -> None:
    """Move the sign of a scale that is 0 or less into the query: ONNX Runtime refuses it."""
    for node in nodes_of(model, "Attention"):
        scale = node.attributes.get_float("scale", 1.0)
        query = node.inputs[0]
        if scale > 0 or query is None or query.dtype is None:
            continue
        # -1 or 0: multiplying by them is exact.
        sign = constant(model, np.array(np.sign(scale), query.dtype.numpy()))
        node.replace_input_with(0, insert(node, ir.node("Mul", [query, sign]), query))
        node.attributes["scale"] = ir.AttrFloat32("scale", -scale or 1.0)


def spread_rotary_caches(model: ir.Model) -> None:
    """Repeat the cos and sin of a RotaryEmbedding, where they are `[1, L, .]`, for the batch.

    The operator requires `[B, L, .]`; ONNX Runtime refuses others if B is not 1.
    """
    for node in nodes_of(model, "RotaryEmbedding"):
        turned = node.inputs[0]
        if turned is None or optional_input(node, 3) is not None or dims(turned)[:1] in ((), (1,)):
            continue
        for index in (1, 2):
            cache = node.inputs[index]
            if cache is not None and len(dims(cache)) == 3 and dims(cache)[0] == 1:
                batch = _size(model, node, turned, 0)
                node.replace_input_with(index, _expanded(model, node, cache, {0: batch}, 3))


def _may_be_huge(mask: ir.Value) -> bool:
    """Return whether a mask may hold finite values below `MASK_FLOOR`, judging by its nodes."""
    values, seen = [mask], {mask}
    while values:
        value = values.pop()
        node = value.producer()
        if node is None:
            if _holds_huge(value):
                return True
        elif node.op_type in PASSED_ON and not _is_clamped(node):
            new = {i for i in node.inputs if i is not None and i.dtype != ir.DataType.BOOL} - seen
            values += new
            seen |= new
    return False


def _holds_huge(value: ir.Value) -> bool:
    """Return whether an initializer has, or an input may have, finite values below `MASK_FLOOR`."""
    if value.const_value is None:
        return value.dtype == ir.DataType.FLOAT
    array = value.const_value.numpy()
    # Twice the floor: the floor itself is rounded to float32.
    return bool((np.isfinite(array) & (array < 2 * MASK_FLOOR)).any())


def _is_clamped(node: ir.Node) -> bool:
    """Return whether the node is the Where that clamps a mask."""
    producers = [value.producer() for value in node.inputs if value is not None]
    return node.op_type == "Where" and any(p is not None and p.op_type == "Clip" for p in producers)


def _may_be_one(dim: int | ir.SymbolicDim) -> bool:
    """Return whether an axis may be 1: a quotient may, such as ``batch//batch`` of a Reshape."""
    return "//" in str(dim.value) if isinstance(dim, ir.SymbolicDim) else dim == 1


def _masks(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield every Attention node that has a mask, with the mask."""
    for node in nodes_of(model, "Attention"):
        mask = optional_input(node, 3)
        if mask is not None:
            yield node, mask


def _query_length(model: ir.Model, node: ir.Node) -> AxisSize:
    query = node.inputs[0]
    assert query is not None  # required by the operator
    return _size(model, node, query, -2)


def _key_length(model: ir.Model, node: ir.Node) -> AxisSize:
    key, past = node.inputs[1], optional_input(node, 4)
    assert key is not None  # required by the operator
    new = _size(model, node, key, -2)
    if past is None:
        return new
    terms = [_size(model, node, past, -2).value, new.value]
    present = dims(node.outputs[1]) if len(node.outputs) > 1 else ()
    total = present[-2] if present else ir.SymbolicDim(None)
    return AxisSize(total, insert(node, ir.node("Add", terms), terms[0]))


def _size(model: ir.Model, node: ir.Node, value: ir.Value, axis: int) -> AxisSize:
    """Return the size of an axis; taken from an input if possible, so that layers share it."""
    dim = dims(value)[axis] if dims(value) else ir.SymbolicDim(None)
    if isinstance(dim, int):
        return AxisSize(dim, ints(model, dim))
    # Of rank 3 where it has three axes, and of rank 4 where nothing is known.
    axis %= len(dims(value)) or 4
    value, axis = axis_of_an_input(model, dim) or (value, axis)
    shape = ir.node("Shape", [value], {"start": axis, "end": axis + 1})
    return AxisSize(dim, insert(node, shape, None, ir.DataType.INT64, ir.Shape([1])))


def _expanded(
    model: ir.Model, node: ir.Node, value: ir.Value, grown: Mapping[int, AxisSize], rank: int
) -> ir.Value:
    """Return `value` with some axes grown that are or may be 1, by an Expand before `node`."""
    sizes = {axis: size.dim for axis, size in grown.items()}
    if all(isinstance(size, int) for size in sizes.values()):
        numbers = [int(str(sizes.get(axis, 1))) for axis in range(rank)]
        target = ints(model, *numbers)
    else:
        one = ints(model, 1)
        parts = [grown[axis].value if axis in grown else one for axis in range(rank)]
        concat = ir.node("Concat", parts, {"axis": 0})
        target = insert(node, concat, None, ir.DataType.INT64, ir.Shape([rank]))
    out = insert(node, ir.node("Expand", [value, target]), value)
    before = [1] * (rank - len(dims(value))) + list(dims(value))
    out.shape = ir.Shape([sizes.get(axis, before[axis]) for axis in range(rank)])
    return out
