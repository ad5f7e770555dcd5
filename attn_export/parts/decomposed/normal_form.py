"""Normal form of graphs that other exporters wrote, in which attention can be recognised.

Exporters spell the same thing in many ways, note wrong shapes (torch notes 0 for sizes that it does
not know) or none. In normal form, shapes are those that the graph had in runs, constants are
initialisers, what computes them is gone, and so are nodes without effect.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import (
    constant,
    constant_array,
    constant_numbers,
    dims,
    optional_input,
    reference_model,
)
from attn_export.graph.lower.dialects import Observed
from attn_export.graph.lower.tidy import expand_by_position, reshape_by_position, with_types
from attn_export.tensorfile import Array


def normalise(model: ir.Model, observed: Observed) -> ir.Model:
    """Return a graph in normal form.

    `observed`: The shapes of its values in runs.
    """
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    model = with_types(model)
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output() or value.shape is None:
                value.shape = _shape(observed.shapes.get(str(value.name), ()), observed.axes)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _drop_idle_nodes(model)
    _fold_sizes(model)
    reshape_by_position(model)
    expand_by_position(model)
    _drop_idle_nodes(model)
    common.RemoveUnusedNodesPass()(model)
    return model


# -- shapes that were seen in runs ----------------------------------------------------------------


def _shape(
    shapes: Sequence[tuple[int, ...]], axes: Mapping[str, tuple[int, ...]]
) -> ir.Shape | None:
    if not shapes or len(set(map(len, shapes))) > 1:
        return None
    return ir.Shape([_size(sizes, axes) for sizes in zip(*shapes, strict=True)])


def _size(seen: tuple[int, ...], axes: Mapping[str, tuple[int, ...]]) -> Size:
    """Return the size that an axis has in all runs, or the expression of axes that gives it."""
    if len(set(seen)) == 1:
        return seen[0]
    found = next((text for text, sizes in _expressions(seen, axes) if sizes == seen), None)
    return ir.SymbolicDim(found)


def _expressions(
    seen: tuple[int, ...], axes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield expressions of one axis and of two, with a number that fits the first run."""
    for name, sizes in axes.items():
        yield name, sizes
    pairs = itertools.combinations_with_replacement(axes.items(), 2)
    products = [
        (f"{a}*{b}", tuple(map(math.prod, zip(x, y, strict=True)))) for (a, x), (b, y) in pairs
    ]
    for name, sizes in (*axes.items(), *products):
        factor, more = seen[0] // max(sizes[0], 1), seen[0] - sizes[0]
        yield f"{factor}*{name}", tuple(factor * size for size in sizes)
        yield f"{name} {'-' if more < 0 else '+'} {abs(more)}", tuple(more + s for s in sizes)
        divisor = sizes[0] // max(seen[0], 1)
        yield f"({name})//{divisor}", tuple(size // max(divisor, 1) for size in sizes)
    for (a, x), (b, y) in itertools.combinations(axes.items(), 2):
        yield f"{a} + {b}", tuple(map(sum, zip(x, y, strict=True)))
    for name, sizes in products:
        yield name, sizes


# -- constants ------------------------------------------------------------------------------------

_SMALL = 64
"""The largest number of elements of a value that is folded."""

_GROWING = frozenset({
    "ConstantOfShape", "EyeLike", "Expand", "If", "Loop", "NonZero", "OneHot", "Pad", "Range",
    "Resize", "Scan", "Tile",
})  # fmt: skip
"""Operators whose output may be far larger than their inputs, or that hold graphs."""

_AXIS_SIZES = (
    lambda number: 3 + number,
    lambda number: 1009 + 7 * number,
    lambda number: 131_101 + 11 * number,
    lambda _: 1,
)
"""The sizes of the dynamic axes, by number, at which sizes are computed."""


def _fold_sizes(model: ir.Model) -> None:
    """Replace small values that are computed from sizes and are the same for all sizes.

    The width of a head, for example, is often read from the shape of queries.
    """
    names = dict.fromkeys(
        str(symbol) for value in model.graph.inputs for size in dims(value)
        if isinstance(size, ir.SymbolicDim) for symbol in symbols_in(size)
    )  # fmt: skip
    bindings = [
        {name: of_number(number) for number, name in enumerate(names)} for of_number in _AXIS_SIZES
    ]
    known: dict[ir.Value, list[Array]] = {}
    for node in list(model.graph):
        arrays = _at_sizes(node, known, bindings)
        for value, found in zip(node.outputs, arrays, strict=False):
            known[value] = found
            same = all(x.shape == found[0].shape and np.array_equal(x, found[0]) for x in found)
            if same and found[0].dtype.kind in "biuf" and not value.is_graph_output():
                value.replace_all_uses_with(constant(model, found[0]))


def _at_sizes(
    node: ir.Node, known: Mapping[ir.Value, list[Array]], bindings: Sequence[Mapping[str, int]]
) -> list[list[Array]]:
    """Return the outputs of a node for each choice of sizes; [] if it depends on data."""
    if node.domain or not node.inputs or "Random" in node.op_type:
        return []
    if node.op_type == "Shape":
        return (
            [_sizes_of(node, bindings)]
            if node.inputs[0] is not None and node.inputs[0].shape is not None
            else []
        )
    operands = [_operand(value, known, len(bindings)) for value in node.inputs]
    if any(operand is None for operand in operands) or not _stays_small(node, operands):
        return []
    names = [f"x{number}" for number in range(len(operands))]
    inputs = [ir.val(name) for name in names]
    given = [x if value is not None else None for x, value in zip(inputs, node.inputs, strict=True)]
    outputs = [ir.val(f"y{number}") for number in range(len(node.outputs))]
    copy = ir.node(
        node.op_type, given, {n: a.value for n, a in node.attributes.items()}, outputs=outputs
    )
    opset = node.graph.opset_imports.get("", 18) if isinstance(node.graph, ir.Graph) else 18
    try:
        evaluator = reference_model([copy], [x for x in given if x is not None], outputs, opset)
        rows = []
        with np.errstate(all="ignore"):
            for number in range(len(bindings)):
                feed = {n: o[number] for n, o in zip(names, operands, strict=True) if o}
                rows.append(list(evaluator.run(None, feed)))
    except Exception:  # graphs from other tools may hold anything
        return []
    arrays = [[np.asarray(row[index]) for row in rows] for index in range(len(outputs))]
    return arrays if all(a.size <= _SMALL for of_value in arrays for a in of_value) else []


def _operand(
    value: ir.Value | None, known: Mapping[ir.Value, list[Array]], count: int
) -> list[Array] | None:
    if value is None:
        return [np.empty(0)] * count
    array = (
        constant_array(value)
        if value.const_value is None or value.const_value.size <= _SMALL
        else None
    )
    return known.get(value) if array is None else [array] * count


def _stays_small(node: ir.Node, operands: Sequence[Sequence[Array] | None]) -> bool:
    if node.op_type not in _GROWING:
        return True
    if node.op_type not in ("ConstantOfShape", "Expand"):
        return False
    targets = operands[-1] or ()
    return all(math.prod(target.ravel().tolist()) <= _SMALL for target in targets)


def _sizes_of(node: ir.Node, bindings: Sequence[Mapping[str, int]]) -> list[Array]:
    source = node.inputs[0]
    assert source is not None
    start, end = (
        node.attributes.get_int("start", 0),
        node.attributes.get_int("end", len(dims(source))),
    )
    axes = list(enumerate(dims(source)))[start:end]
    return [
        np.array([_evaluate(size, bound, number * 97 + axis) for axis, size in axes], np.int64)
        for number, bound in enumerate(bindings)
    ]


def _evaluate(size: Size, bound: Mapping[str, int], unknown: int) -> int:
    """Return a size, given those of named axes; a number of its own if it is not known."""
    found = size if isinstance(size, int) else evaluated(size, bound)
    return 1_000_003 + unknown if found is None else found


def symbols_in(size: ir.SymbolicDim) -> frozenset[str]:
    """Return the symbols of a symbolic size; none if it is an expression that onnx_ir rejects."""
    try:
        return size.free_symbols()
    except ValueError:
        return frozenset()


def evaluated(size: ir.SymbolicDim, bound: Mapping[str, int]) -> int | None:
    """Return a symbolic size; None if it is not known."""
    try:
        found = None if size.value is None else size.evaluate(bound)
    except ValueError:
        return None  # an expression that onnx_ir rejects
    return found if isinstance(found, int) else None


# -- nodes without effect -------------------------------------------------------------------------


def _drop_idle_nodes(model: ir.Model) -> None:
    """Remove nodes that pass on their input: Identity, Dropout, Casts and moves without effect."""
    for node in list(model.graph):
        source = node.inputs[0] if node.inputs else None
        out = node.outputs[0] if node.outputs else None
        if source is None or out is None or node.domain or not _is_idle(node, source, out):
            continue
        if out.is_graph_output() or any(value.uses() for value in node.outputs[1:]):
            continue
        out.replace_all_uses_with(source)
        model.graph.remove(node, safe=True)


def _is_idle(node: ir.Node, source: ir.Value, out: ir.Value) -> bool:
    match node.op_type:
        case "Identity":
            return True
        case "Dropout":
            training = constant_numbers(optional_input(node, 2))
            return optional_input(node, 2) is None or training == [False]
        case "Cast":
            return source.dtype is not None and source.dtype == node.attributes.get_int("to", 0)
        case "Transpose":
            perm = list(node.attributes.get_ints("perm", ()))
            return bool(perm) and perm == sorted(perm)
        case "Reshape" | "Expand":
            return _same_shape(source, out)
        case "Slice":
            steps = optional_input(node, 4)
            return _same_shape(source, out) and (
                steps is None or set(constant_numbers(steps)) == {1}
            )
    return False


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    shapes = dims(one), dims(other)
    return (
        one.shape is not None
        and other.shape is not None
        and len(shapes[0]) == len(shapes[1])
        and all(map(known_equal, *shapes))
    )
