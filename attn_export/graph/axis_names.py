"""Names of dynamic axes, set in every value of a graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

Size = int | ir.SymbolicDim

SYMBOL = re.compile(r"[A-Za-z_]\w*")
CANCELLED = re.compile(r"\(*(\d+)\*([A-Za-z_]\w*)\)//\2\)*")
"""An axis of constant size that the exporter writes with symbols: ``((8*batch)//batch)``."""


def name_axes(model: ir.Model, axes: Mapping[str, Mapping[int, str]]) -> None:
    """Replace the exporter's symbols (``s26``) by names, also within expressions."""
    names: dict[str, str] = {}
    inputs = {value.name: value for value in model.graph.inputs}
    for name, labels in axes.items():
        for axis, label in labels.items():
            dim = (inputs[name].shape or ())[axis]
            if isinstance(dim, ir.SymbolicDim) and SYMBOL.fullmatch(str(dim.value)):
                names[str(dim.value)] = label
    for shape, axis, symbol in _symbols(model):
        named = SYMBOL.sub(lambda match: names.get(match[0], match[0]), symbol)
        constant_match = CANCELLED.fullmatch(named)
        shape[axis] = int(constant_match[1]) if constant_match else ir.SymbolicDim(named)
    for name, labels in axes.items():
        for axis, label in labels.items():
            dim = (inputs[name].shape or ())[axis]
            # The exporter may have found this axis to be a sum, such as "past_len + query_len".
            if isinstance(dim, ir.SymbolicDim) and dim.value != label:
                _rename(model, str(dim.value), label)


def name_sums_of_axes(model: ir.Model, relations: Mapping[str, str]) -> None:
    """Replace sums such as ``past_len + query_len`` by one name in all values."""
    names = {terms(expression): name for name, expression in relations.items()}
    for shape, axis, symbol in _symbols(model):
        if terms(symbol) in names:
            shape[axis] = ir.SymbolicDim(names[terms(symbol)])


def known_equal(one: Size | None, other: Size | None) -> bool:
    """Return whether two sizes are known to be equal; two unknown sizes are not."""
    return one == other and getattr(one, "value", one) is not None


def size_text(size: Size) -> str:
    """Return a size, or the name of a dynamic axis, as text."""
    return str(size.value if isinstance(size, ir.SymbolicDim) else size)


def reshape_target(before: Sequence[Size], after: Sequence[Size]) -> list[int] | None:
    """Return the constant target of a Reshape: 0 for a kept axis, -1 for one to infer.

    It is None if several sizes would have to be inferred.

    `before`: The shape before it.
    `after`: The shape after it.
    """
    target: list[int] = []
    for axis, size in enumerate(after):
        if isinstance(size, int):
            target.append(size)
        else:
            is_kept = axis < len(before) and known_equal(size, before[axis])
            target.append(0 if is_kept else -1)
    return target if target.count(-1) <= 1 else None


def axis_of_an_input(model: ir.Model, size: Size) -> tuple[ir.Value, int] | None:
    """Return a graph input with an axis of this symbolic size, and the axis, or None."""
    for value in model.graph.inputs:
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, ir.SymbolicDim) and known_equal(dim, size):
                return value, axis
    return None


def common_axis(model: ir.Model, sizes: Iterable[Size]) -> str:
    """Return the name of the graph input axis that all sizes are; "" if they are not the same."""
    names = {size.value if isinstance(size, ir.SymbolicDim) else None for size in sizes}
    shapes = [value.shape or () for value in model.graph.inputs]
    axes = {dim.value for shape in shapes for dim in shape if not isinstance(dim, int)}
    return str(names.pop()) if len(names) == 1 and names <= axes - {None} else ""


def terms(expression: str) -> tuple[str, ...]:
    """Return the sorted terms of a sum, so that "a + b" equals "b + a"."""
    return tuple(sorted(term.strip() for term in expression.split("+")))


def fix_axis(model: ir.Model, name: str, size: int) -> None:
    """Fix a dynamic axis at one size in all values, also within sums ("past_len + 1")."""
    for shape, axis, symbol in _symbols(model):
        fixed = SYMBOL.sub(lambda match: str(size) if match[0] == name else match[0], symbol)
        shape[axis] = int(fixed) if fixed.isdigit() else ir.SymbolicDim(fixed)


def _rename(model: ir.Model, old: str, new: str) -> None:
    for shape, axis, symbol in _symbols(model):
        if symbol == old:
            shape[axis] = ir.SymbolicDim(new)


def _symbols(model: ir.Model) -> Iterator[tuple[ir.Shape, int, str]]:
    """Yield the symbols in all shapes, each with its shape and axis."""
    for value in (*model.graph.inputs, *(v for node in model.graph for v in node.outputs)):
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, ir.SymbolicDim) and dim.value:
                assert value.shape is not None  # it has an axis
                yield value.shape, axis, str(dim.value)
