"""Names of dynamic axes, set in every value of a graph, and relations between axes.

A file does not state, for example, that the last axis of the mask is past plus new keys. Exporters
may also give each axis a name of its own, although several must be equal.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from attn_export.interface import Shape, axes_in, renamed, size_of, terms_of

Size = int | ir.SymbolicDim

BOUNDS = "attn_export.bounds"
"""The key in `Graph.meta` of the least and the largest size of axes, by name."""

SYMBOL = re.compile(r"[A-Za-z_]\w*")
_PRODUCT = re.compile(r"\(([\w.*]+)\)")
_CANCELLED = re.compile(r"\(*(\d+)\*([A-Za-z_]\w*)\)//\2\)*")
"""An axis of constant size that the exporter writes with symbols: ``((8*batch)//batch)``."""

_COMPUTED = re.compile(r"[(+*-]")
"""A sign of a size that is an expression, such as ``past_len + capacity - past_len``."""

_FUNCTIONS = {"PythonMod": "Mod"}
"""Functions in sizes by their names in torch, with those that onnx_ir knows."""


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
        named = SYMBOL.sub(lambda match: {**_FUNCTIONS, **names}.get(match[0], match[0]), symbol)
        constant_match = _CANCELLED.fullmatch(named)
        shape[axis] = int(constant_match[1]) if constant_match else ir.SymbolicDim(named)
    for name, labels in axes.items():
        for axis, label in labels.items():
            dim = (inputs[name].shape or ())[axis]
            # The exporter may have found this axis to be a sum, such as "past_len + query_len".
            if isinstance(dim, ir.SymbolicDim) and dim.value != label:
                _rename(model, str(dim.value), label)


def name_sums_of_axes(model: ir.Model, relations: Mapping[str, str]) -> None:
    """Replace sums such as ``past_len + query_len`` by one name in all values."""
    sums = [(terms_of(text), name) for name, text in relations.items()]
    for shape, axis, symbol in _symbols(model):
        terms = terms_of(_PRODUCT.sub(r"\1", symbol))
        for name in (name for of_sum, name in sums if of_sum == terms):
            shape[axis] = ir.SymbolicDim(name)


def name_output_axes(model: ir.Model, run: Callable[[], Mapping[str, Shape]]) -> None:
    """Name axes of outputs whose sizes are expressions, if runs show that they are named axes.

    `run`: Runs the module, and returns the shapes of its outputs.
    """
    shapes = {value.name: value.shape for value in model.graph.outputs if value.shape is not None}
    if any(_COMPUTED.search(size_text(dim)) for shape in shapes.values() for dim in shape):
        for name, named in run().items():
            for axis, label in enumerate(named):
                is_computed = _COMPUTED.search(size_text(shapes[name][axis]))
                if isinstance(label, str) and label and is_computed:
                    shapes[name][axis] = ir.SymbolicDim(label)


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


# -- axes that must be equal, or be sums of others, for a graph to run ----------------------------


@dataclasses.dataclass(frozen=True)
class Misfit:
    """Shapes of which some sizes do not fit each other.

    Attributes:
        reached: The number of nodes that were computed before.
        shapes: The shapes.
    """

    reached: int
    shapes: Sequence[Sequence[int]]


_Attempt = Callable[[Mapping[str, int]], Misfit | None]
"""Function that runs a graph at the sizes of all axes; None if it runs."""

_MOST_ATTEMPTS = 150
"""The largest number of runs of a graph."""


def find_relations(
    axes: Sequence[str], known: Mapping[str, str], fixed: Collection[int], attempt: _Attempt
) -> dict[str, str] | None:
    """Return the axes that equal others or sums of them; None if the graph runs with none.

    The graph runs at sizes of which each tells its axis or sum. Where a node does not take its
    operands, two of their sizes must be equal.
    """
    relations, attempts = dict(known), 1
    misfit = attempt(_sizes(axes, relations, fixed))
    while misfit is not None:
        for more in _combined(_equalities(misfit, axes, relations, fixed)):
            changed, attempts = _joined(relations, more), attempts + 1
            if attempts > _MOST_ATTEMPTS:
                return None
            after = attempt(_sizes(axes, changed, fixed))
            if after is None or after.reached > misfit.reached:
                relations, misfit = changed, after
                break
        else:
            return None
    return relations


def find_sums(
    axes: Sequence[str], known: Mapping[str, str], runs: Callable[[Mapping[str, int]], bool]
) -> dict[str, str] | None:
    """Return the axes that must be sums of others for a graph to run; None if no choice runs.

    Each choice of one relation is tried, then of two, where no node tells which do not fit.
    """
    free = [axis for axis in axes if axis not in known]
    single = [
        {axis: text}
        for axis in reversed(free)
        for text in _sums_of([other for other in free if other != axis])
    ]
    for more in itertools.islice(itertools.chain([{}], _combined(single)), _MOST_ATTEMPTS):
        relations = {**known, **more}
        if runs(_sizes(axes, relations, ())):
            return relations
    return None


def _sums_of(axes: Sequence[str]) -> Iterator[str]:
    yield from axes
    yield from (" + ".join(pair) for pair in itertools.combinations(axes, 2))
    yield from (f"{axis} + 1" for axis in axes)


def _free(axes: Sequence[str], relations: Mapping[str, str]) -> dict[str, int]:
    return {axis: number for number, axis in enumerate(axes) if axis not in relations}


def _distinct(free: Collection[str], fixed: Collection[int]) -> dict[str, int]:
    """Return sizes of which no two sums of up to two, or a size plus 1, are equal."""
    sizes: dict[str, int] = {}
    seen: set[int] = {0, 1, 2, *fixed}
    size = 3
    for axis in free:
        while True:
            new = [size, size + 1, *(size + other for other in sizes.values())]
            if not seen & {*new} and len({*new}) == len(new):
                break
            size += 1
        seen |= {*new, 2 * size}
        sizes[axis] = size
        size += 1
    return sizes


def _sizes(
    axes: Sequence[str], relations: Mapping[str, str], fixed: Collection[int]
) -> dict[str, int]:
    sizes = _distinct(_free(axes, relations), fixed)
    of_relations = {
        axis: size_of(text, {**dict.fromkeys(axes_in(text), 1), **sizes})
        for axis, text in relations.items()
    }
    return {**sizes, **of_relations}


def _equalities(
    misfit: Misfit, axes: Sequence[str], relations: Mapping[str, str], fixed: Collection[int]
) -> list[dict[str, str]]:
    """Return the relations that make a size of one shape equal to one of another shape."""
    order = _free(axes, relations)
    sizes = _distinct(order, fixed)
    sums = {size + 1: [axis, "1"] for axis, size in sizes.items()} | {
        a + b: [one, other]
        for (one, a), (other, b) in itertools.combinations_with_replacement(sizes.items(), 2)
    }
    sums |= {size: [axis] for axis, size in sizes.items()}
    found: dict[tuple[str, str], None] = {}
    for one, other in itertools.permutations(misfit.shapes, 2):
        for size, equal in itertools.product(one, other):
            if size == equal or size not in sums or equal not in sums:
                continue
            # Of past + new = other + new, it is the past that equals the other.
            left, right = list(sums[size]), list(sums[equal])
            for term in sums[size]:
                if term in right:
                    left.remove(term)
                    right.remove(term)
            is_first = len(right) == 1 and order.get(right[0], -1) > order.get("".join(left), -1)
            if len(left) == 1 and left[0] in order and right and not is_first:
                found[left[0], " + ".join(right)] = None
    return [{axis: text} for axis, text in found]


def _combined(equalities: Sequence[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield each relation alone, then each two: operands may differ in two axes."""
    yield from equalities
    for one, other in itertools.combinations(equalities, 2):
        terms = {axis for text in (*one.values(), *other.values()) for axis in axes_in(text)}
        if one.keys() != other.keys() and not terms & (one.keys() | other.keys()):
            yield {**one, **other}


def _joined(relations: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return all relations, with the terms that are relations now replaced by theirs."""
    return {
        axis: renamed(text, lambda term: more.get(term, term)) for axis, text in relations.items()
    } | dict(more)
