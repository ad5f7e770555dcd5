"""Replacements of nodes that ONNX Runtime refuses, or computes differently from PyTorch.

PyTorch broadcasts masks, batches and rotary caches, takes any scale, and hides a key only for
-inf. ONNX Runtime does none of this. Each pass is one function on an `onnx_ir.Model` that leaves
a correct graph behind. Nodes that are right already are not changed, and axes are expanded only if
their size is 1, or a quotient that may be 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import Size, axis_of_an_input, known_equal
from attn_export.graph.ir_helpers import (
    MASK_INPUT,
    PAST_KEY_INPUT,
    constant,
    constant_array,
    dims,
    every_node,
    insert,
    ints,
    nodes_of,
    optional_input,
    producer_of,
    set_type,
)
from attn_export.interface import MASK_FLOOR

_PASSING_OPERATORS = frozenset({
    "Add", "Cast", "Clip", "Concat", "Expand", "Gather", "GatherElements", "GatherND", "Identity",
    "Max", "Min", "Mul", "Neg", "Pad", "Reshape", "ScatterND", "Slice", "Squeeze", "Sub", "Tile",
    "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators that may pass a huge constant on to a mask."""

_PRODUCTS_AND_MOVES = frozenset({
    "Add", "Concat", "Div", "Expand", "Identity", "Mul", "Reshape", "Slice", "Squeeze", "Transpose",
    "Unsqueeze",
})  # fmt: skip
"""Operators after which a number that nearly vanishes may be all of a row."""


class _AxisSize(NamedTuple):
    """Size of an axis: as a number or symbol, and as a value of the graph, int64 `[1]`."""

    dim: Size
    value: ir.Value


def make_ort_compatible(model: ir.Model) -> None:
    """Run all passes of this file."""
    clamp_masks(model)
    _note_unsqueezed(model)
    spread_masks(model)
    spread_batches(model)
    make_scales_positive(model)
    spread_rotary_caches(model)
    has_linear = bool(nodes_of(model, "LinearAttention"))  # its gates are products of many tokens
    for node in list(every_node(model.graph)):
        if node.op_type == "Sigmoid" and (has_linear or _reaches_output(node)):
            _write_sigmoid(model, node)
        elif node.op_type == "Where" and node.outputs[0].dtype == ir.DataType.BOOL:
            _write_choice(node)


def _note_unsqueezed(model: ir.Model) -> None:
    """Note the types of operands with added axes, which translations leave out."""
    for node in nodes_of(model, "Attention"):
        for value in filter(None, node.inputs):
            unsqueeze = producer_of(value, "Unsqueeze")
            axes = constant_array(unsqueeze.inputs[1]) if unsqueeze is not None else None
            if unsqueeze is None or axes is None or value.shape is not None:
                continue
            source = unsqueeze.inputs[0]
            if source is not None and (shape := list(dims(source))):
                rank = len(shape) + axes.size
                for axis in sorted(int(a) % rank for a in axes.ravel()):
                    shape.insert(axis, 1)
                set_type(value, source.dtype, ir.Shape(shape))


def clamp_masks(model: ir.Model) -> None:
    """Keep the finite values of float masks above `MASK_FLOOR`.

    ONNX Runtime treats finfo.min as -inf: a query whose mask is finfo.min for all keys gets 0, and
    in PyTorch the mean of the values. Only masks that may hold such values are clamped: graph
    inputs, and masks that are computed from such a constant. Clip would make 3.4e38 of Inf.
    """
    for node, mask in _masks(model):
        if mask.dtype != ir.DataType.FLOAT or not _may_be_huge(mask):
            continue
        floor = constant(model, np.array(MASK_FLOOR, np.float32))
        lowest = constant(model, np.array(-np.inf, np.float32))
        clipped = insert(node, ir.node("Max", [mask, floor]), mask)
        hidden = insert(node, ir.node("Equal", [mask, lowest]), mask, ir.DataType.BOOL)
        kept = insert(node, ir.node("Where", [hidden, mask, clipped]), mask)
        node.replace_input_with(MASK_INPUT, kept)


def write_sigmoids(model: ir.Model) -> None:
    """Write each Sigmoid of float32 values as 1 / (1 + exp(-x)).

    ONNX Runtime's kernel has the absolute error 1e-7, so that a gate that is nearly closed is
    wrong: at -16 by half, and below -18 it is 0. Beside products both take as long.
    """
    for node in nodes_of(model, "Sigmoid"):
        _write_sigmoid(model, node)


def _write_sigmoid(model: ir.Model, node: ir.Node) -> None:
    x = node.inputs[0]
    if x is None or ir.DataType.FLOAT not in (x.dtype, node.outputs[0].dtype):
        return
    one = constant(model, np.array(1, np.float32))
    power = insert(node, ir.node("Exp", [insert(node, ir.node("Neg", [x]), x)]), x)
    divisor = insert(node, ir.node("Add", [power, one]), x)
    node.op_type = "Div"
    node.resize_inputs(2)
    node.replace_input_with(0, one)
    node.replace_input_with(1, divisor)


def _reaches_output(node: ir.Node) -> bool:
    """Return whether an output of a graph or of a body has rows that are no more than a product.

    A sum over many numbers, as in a projection, hides the error of one that nearly vanishes.
    """
    values, seen = list(node.outputs), set(node.outputs)
    while values:
        value = values.pop()
        if value.is_graph_output():
            return True
        readers = (n for n, _ in value.uses() if n.op_type in _PRODUCTS_AND_MOVES)
        new = {output for reader in readers for output in reader.outputs} - seen
        values += new
        seen |= new
    return False


def _write_choice(node: ir.Node) -> None:
    """Write a Where of bool values by And and Or: ONNX Runtime has no kernel for it."""
    chosen, first, second = node.inputs
    other = insert(node, ir.node("Not", [chosen]), chosen)
    node.op_type = "Or"
    node.resize_inputs(2)
    for index, pair in enumerate(((chosen, first), (other, second))):
        node.replace_input_with(index, insert(node, ir.node("And", pair), node.outputs[0]))


def spread_masks(model: ir.Model) -> None:
    """Expand masks to rank 2 or 4, with all L queries and all S keys.

    ONNX Runtime refuses masks whose L or S axis is 1, such as key-padding masks. Runtimes read
    rank 3 differently; it means `[H, L, S]`, by numpy's broadcasting.
    """
    for node, mask in _masks(model):
        rank = len(dims(mask))
        if rank not in (2, 3, 4):
            continue
        grown_axes: dict[int, _AxisSize] = {}
        full = 2 if rank == 2 else 4
        for axis, size in ((-2, _query_length), (-1, _key_length)):
            if _may_be_one(dims(mask)[axis]):
                length = size(model, node)
                if length.dim != 1 and not known_equal(length.dim, dims(mask)[axis]):
                    grown_axes[full + axis] = length
        if grown_axes:
            node.replace_input_with(MASK_INPUT, _expand(model, node, mask, grown_axes, full))
        elif rank == 3:
            unsqueeze = ir.node("Unsqueeze", [mask, ints(model, 0)])
            with_batch = insert(node, unsqueeze, mask, shape=ir.Shape([1, *dims(mask)]))
            node.replace_input_with(MASK_INPUT, with_batch)


def spread_batches(model: ir.Model) -> None:
    """Expand queries, keys or values of batch size 1 to the batch size of the others.

    Learned queries, for example, have batch size 1. PyTorch broadcasts it, the operator does not.
    """
    for node in nodes_of(model, "Attention"):
        operands = [value for value in node.inputs[:3] if value is not None and dims(value)]
        full_batch = [value for value in operands if dims(value)[0] != 1]
        if len(operands) < 3 or not full_batch or optional_input(node, PAST_KEY_INPUT) is not None:
            continue
        for index, value in enumerate(operands):
            if dims(value)[0] == 1:
                batch = _size(model, node, full_batch[0], 0)
                expanded = _expand(model, node, value, {0: batch}, len(dims(value)))
                node.replace_input_with(index, expanded)


def make_scales_positive(model: ir.Model) -> None:
    """Multiply the query by -1 or 0 if the scale is not positive, which ONNX Runtime refuses."""
    for node in nodes_of(model, "Attention"):
        scale = node.attributes.get_float("scale", 1.0)
        query = node.inputs[0]
        if scale > 0 or query is None or query.dtype is None:
            continue
        # The sign is -1 or 0, so the product is exact.
        sign = constant(model, np.array(np.sign(scale), query.dtype.numpy()))
        node.replace_input_with(0, insert(node, ir.node("Mul", [query, sign]), query))
        node.attributes["scale"] = ir.AttrFloat32("scale", -scale or 1.0)


def spread_rotary_caches(model: ir.Model) -> None:
    """Expand the cos and sin `[1, L, …]` of RotaryEmbedding nodes to `[B, L, …]`.

    The operator requires `[B, L, …]`, and ONNX Runtime refuses others if B is not 1.
    """
    for node in nodes_of(model, "RotaryEmbedding"):
        rotated, positions = node.inputs[0], optional_input(node, 3)
        if rotated is None or positions is not None or dims(rotated)[:1] in ((), (1,)):
            continue
        for index in (1, 2):
            cache = node.inputs[index]
            if cache is not None and len(dims(cache)) == 3 and dims(cache)[0] == 1:
                batch = _size(model, node, rotated, 0)
                node.replace_input_with(index, _expand(model, node, cache, {0: batch}, 3))


def _may_be_huge(mask: ir.Value) -> bool:
    """Return whether the nodes of a mask may give finite values below `MASK_FLOOR`."""
    values, seen = [mask], {mask}
    while values:
        value = values.pop()
        node = value.producer()
        if node is None:
            if _holds_huge(value.dtype, constant_array(value)):
                return True
        elif node.op_type == "ConstantOfShape":
            fill = node.attributes.get_tensor("value", None)
            if fill is not None and _holds_huge(value.dtype, fill.numpy()):
                return True
        elif node.op_type in _PASSING_OPERATORS and not _is_clamped(node):
            new = {i for i in node.inputs if i is not None and i.dtype != ir.DataType.BOOL} - seen
            values += new
            seen |= new
    return False


def _holds_huge(dtype: ir.DataType | None, array: np.ndarray | None) -> bool:
    """Return whether a constant has, or an input may have, huge finite values of either sign."""
    if array is None:
        return dtype == ir.DataType.FLOAT
    # Twice the floor: the floor itself is rounded to float32.
    return bool((np.isfinite(array) & (np.abs(array) > -2 * MASK_FLOOR)).any())


def _is_clamped(node: ir.Node) -> bool:
    """Return whether the node is the Where that clamps a mask, also in `functional.clamp_mask`."""
    made = [producer_of(value, name) for value in node.inputs for name in ("Clip", "Max")]
    return node.op_type == "Where" and any(made)


def _may_be_one(dim: Size) -> bool:
    """Return whether the size of an axis may be 1; a quotient such as ``batch//batch`` may."""
    return "//" in str(dim.value) if isinstance(dim, ir.SymbolicDim) else dim == 1


def _masks(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield every `Attention` node that has a mask, with the mask."""
    for node in nodes_of(model, "Attention"):
        mask = optional_input(node, MASK_INPUT)
        if mask is not None:
            yield node, mask


def _query_length(model: ir.Model, node: ir.Node) -> _AxisSize:
    query = node.inputs[0]
    assert query is not None  # required by the operator
    return _size(model, node, query, -2)


def _key_length(model: ir.Model, node: ir.Node) -> _AxisSize:
    key, past = node.inputs[1], optional_input(node, PAST_KEY_INPUT)
    assert key is not None  # required by the operator
    new = _size(model, node, key, -2)
    if past is None:
        return new
    terms = [_size(model, node, past, -2).value, new.value]
    present = dims(node.outputs[1]) if len(node.outputs) > 1 else ()
    total = present[-2] if present else ir.SymbolicDim(None)
    return _AxisSize(total, insert(node, ir.node("Add", terms), terms[0]))


def _size(model: ir.Model, node: ir.Node, value: ir.Value, axis: int) -> _AxisSize:
    """Return the size of an axis, read from a graph input if possible, so that layers share it."""
    dim = dims(value)[axis] if dims(value) else ir.SymbolicDim(None)
    if isinstance(dim, int):
        return _AxisSize(dim, ints(model, dim))
    # The rank of a value of unknown shape is taken to be 4.
    axis %= len(dims(value)) or 4
    value, axis = axis_of_an_input(model, dim) or (value, axis)
    shape = ir.node("Shape", [value], {"start": axis, "end": axis + 1})
    return _AxisSize(dim, insert(node, shape, None, ir.DataType.INT64, ir.Shape([1])))


def _expand(
    model: ir.Model, node: ir.Node, value: ir.Value, grown_axes: Mapping[int, _AxisSize], rank: int
) -> ir.Value:
    """Insert an Expand of `value` before `node`, which enlarges axes that are or may be 1."""
    sizes = {axis: size.dim for axis, size in grown_axes.items()}
    if all(isinstance(size, int) for size in sizes.values()):
        target = ints(model, *(int(str(sizes.get(axis, 1))) for axis in range(rank)))
    else:
        one = ints(model, 1)
        parts = [grown_axes[axis].value if axis in grown_axes else one for axis in range(rank)]
        concat = ir.node("Concat", parts, {"axis": 0})
        target = insert(node, concat, None, ir.DataType.INT64, ir.Shape([rank]))
    before = (1,) * (rank - len(dims(value))) + dims(value)
    shape = ir.Shape([sizes.get(axis, before[axis]) for axis in range(rank)])
    return insert(node, ir.node("Expand", [value, target]), value, shape=shape)
