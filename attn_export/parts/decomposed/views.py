"""Values that only rearrange or repeat the elements of another value, proven by index arrays.

Exporters move heads by many routes. A route is followed with an array of indices in place of the
data, at two choices of sizes, and its result is compared with that of one Reshape and Transpose.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import Size, axis_of_an_input, known_equal, reshape_target
from attn_export.graph.ir_helpers import constant_array, dims, set_type, trace_back
from attn_export.graph.lower.node_builder import Builder
from attn_export.parts.decomposed.normal_form import evaluated, symbols_in
from attn_export.tensorfile import Array

MOVES = frozenset({"Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that rearrange or repeat elements of their first input."""

SIZES = ((2, 5, 7, 3, 4, 6), (3, 4, 2, 5, 7, 8))
"""Two choices of the sizes of dynamic axes, in a cycle."""

_MOST_ELEMENTS = 2**22
"""The largest number of elements of an index array."""

_ORDERS = sorted(
    itertools.permutations(range(4)), key=lambda p: (p != (0, 2, 1, 3), p != (2, 0, 1, 3))
)
"""Orders of the axes `[B, H, n, m]` in memory; where sizes of 1 leave a choice, the usual one."""


class NoMatchError(Exception):
    """Error for nodes that are not those of attention."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """Batch and heads of scores, and the leading axes of the product that computes them."""

    batch: Size
    count: int
    leads: tuple[Size, ...]


class Views:
    """Reader of values that rearrange others.

    `model`: The graph, of which all shapes are right, as far as they are known.
    """

    def __init__(self, model: ir.Model) -> None:
        values = (*model.graph.inputs, *(x for node in model.graph for x in node.outputs))
        sizes = (
            size for value in values for size in dims(value) if isinstance(size, ir.SymbolicDim)
        )
        names = dict.fromkeys(s for size in sizes if size.value for s in sorted(symbols_in(size)))
        self._bindings = [
            {name: some[n % len(some)] + n // len(some) for n, name in enumerate(names)}
            for some in SIZES
        ]
        self._known: dict[str, tuple[int | None, ...]] = {}

    def sizes(self, size: Size) -> tuple[int, ...]:
        """Return a size for each choice of sizes."""
        if isinstance(size, int):
            return (size,) * len(self._bindings)
        text = str(size.value)
        if text not in self._known:
            self._known[text] = tuple(evaluated(size, bound) for bound in self._bindings)
        found = self._known[text]
        if size.value is None or None in found:
            raise NoMatchError
        return tuple(number for number in found if number is not None)

    def shapes(self, shape: Sequence[Size]) -> list[tuple[int, ...]]:
        """Return a shape for each choice of sizes."""
        if not shape:
            return [()] * len(self._bindings)
        return list(zip(*map(self.sizes, shape), strict=True))

    def pushed(self, nodes: Sequence[ir.Node], arrays: Sequence[Array]) -> list[Array]:
        """Return arrays after nodes have moved their elements."""
        results = []
        targets = [self.shapes(_shape_of(node.outputs[0])) for node in nodes]
        for number, array in enumerate(arrays):
            for node, shapes in zip(nodes, targets, strict=True):
                if node.op_type == "Transpose":
                    perm = node.attributes.get_ints("perm", range(array.ndim)[::-1])
                    array = array.transpose(perm)
                elif node.op_type == "Expand":
                    array = np.broadcast_to(array, shapes[number])
                elif node.op_type in MOVES:
                    array = array.reshape(shapes[number])
            results.append(array)
        return results

    def indices(self, shape: Sequence[Size]) -> list[Array]:
        """Return arrays of the shape that hold the index of each element."""
        shapes = self.shapes(shape)
        if any(math.prod(found) > _MOST_ELEMENTS for found in shapes):
            raise NoMatchError
        return [np.arange(math.prod(found)).reshape(found) for found in shapes]

    def with_heads(
        self, op: Builder, value: ir.Value, heads: Heads, *,
        perm: Sequence[int | None] = (), scaled: bool = False, count: int = 0,
    ) -> tuple[ir.Value, float]:  # fmt: skip
        """Return a value as `[B, H, n, m]`, and the factor on it that is left out.

        Heads that are repeated are returned once: `[B, Hkv, n, m]`. A batch of 1 stays 1.

        `perm`: The order of its axes in which it has this form, with None for an axis of 1; () for
        that of the value.
        """
        perm = perm or range(len(dims(value)))
        last = [1 if axis is None else dims(value)[axis] for axis in perm][-2:]
        for source, nodes, factor in reversed(list(_sources(value, scaled=scaled))):
            try:
                layout = self._layout(source, nodes, perm, heads, last)
            except (NoMatchError, ValueError):
                continue
            if layout is not None and (not count or layout[0][1] == count):
                shape, order = layout
                if (found := _arranged(op, source, shape, order)) is not None:
                    return found, factor
        raise NoMatchError

    def _layout(
        self, source: ir.Value, nodes: Sequence[ir.Node], perm: Sequence[int | None],
        heads: Heads, last: Sequence[Size],
    ) -> tuple[tuple[Size, ...], tuple[int, ...]] | None:  # fmt: skip
        """Return shape `[B, H, n, m]` and order in memory of a source's elements, or None."""
        arrays = self.pushed(nodes, self.indices(_shape_of(source)))
        batches, leads = self.sizes(heads.batch), self.shapes(heads.leads)
        targets = self.shapes(last)
        moved = [
            np.broadcast_to(_ordered(a, perm), (*lead, *two)).reshape(b, heads.count, *two)
            for a, lead, two, b in zip(arrays, leads, targets, batches, strict=True)
        ]
        for batch in (heads.batch, 1) if heads.batch != 1 else (1,):
            rest = [b * math.prod(two) for b, two in zip(self.sizes(batch), targets, strict=True)]
            counts = {
                a.size / n if n else 0
                for a, n in zip(self.indices(_shape_of(source)), rest, strict=True)
            }
            count = int(min(counts))
            if len(counts) > 1 or counts != {count} or not count or heads.count % count:
                continue
            step = heads.count // count
            firsts = [
                a[: b if batch != 1 else 1, ::step] for a, b in zip(moved, batches, strict=True)
            ]
            if not all(
                np.array_equal(
                    np.repeat(np.broadcast_to(f, (len(a), *f.shape[1:])), step, axis=1), a
                )
                for f, a in zip(firsts, moved, strict=True)
            ):
                continue
            for order in _ORDERS:
                if all((f.transpose(order).ravel() == np.arange(f.size)).all() for f in firsts):
                    return (batch, count, *last), order
        return None

    def leading_axes(self, value: ir.Value) -> Iterator[Size]:
        """Yield the first axes of the values that a value rearranges, where batches may be."""
        for source, _, _ in reversed(list(_sources(value, scaled=True))):
            yield from dims(source)[:2]

    def replace_furthest(
        self, op: Builder, attended: ir.Value, product: ir.Value, perm: Sequence[int]
    ) -> tuple[ir.Value, ir.Value]:
        """Return the last value that rearranges the product, and the one to replace it.

        `attended`: The result, `[B, H, L, Dv]`.
        `perm`: The order of the axes of the product in which it is `[..., L, Dv]`.
        """
        whole, back = self.indices(dims(attended)), list(np.argsort(perm))
        shapes = self.shapes([dims(product)[axis] for axis in perm])
        arrays = [a.reshape(s).transpose(back) for a, s in zip(whole, shapes, strict=True)]
        ways, value = list[tuple[ir.Value, Sequence[int]]](), product
        while True:
            ways += [(value, order) for order in _ORDERS if _is_ordered(whole, arrays, order)][:1]
            uses = tuple(value.uses())
            if len(uses) != 1 or uses[0].idx or value.is_graph_output():
                break
            reader = uses[0].node
            if reader.op_type not in MOVES - {"Expand"} or reader.graph is not op.graph:
                break
            try:
                arrays = self.pushed([reader], arrays)
            except (NoMatchError, ValueError):
                break
            value = reader.outputs[0]
        for last, order in reversed(ways):
            new = reordered(op, attended, order, dims(last))
            if new is not None:
                return last, new
        raise NoMatchError


def _is_ordered(whole: Sequence[Array], arrays: Sequence[Array], order: Sequence[int]) -> bool:
    """Return whether arrays hold the elements of others in another order of axes."""
    return all(
        (w.transpose(order).ravel() == a.ravel()).all() for w, a in zip(whole, arrays, strict=True)
    )


def _ordered(array: Array, perm: Sequence[int | None]) -> Array:
    moved = array.transpose([axis for axis in perm if axis is not None])
    return np.expand_dims(moved, [n for n, axis in enumerate(perm) if axis is None])


def _shape_of(value: ir.Value) -> tuple[Size, ...]:
    if value.shape is None:
        raise NoMatchError
    return dims(value)


def _sources(value: ir.Value, *, scaled: bool) -> Iterator[tuple[ir.Value, list[ir.Node], float]]:
    """Yield the values that a value rearranges, the nodes that do, and the factor between them."""
    nodes: list[ir.Node] = []
    factor = 1.0
    while True:
        yield value, nodes[::-1], factor
        node = value.producer()
        if node is None or node.domain or not node.inputs:
            return
        source = node.inputs[0]
        if node.op_type not in MOVES:
            found = scaling(node) if scaled else None
            if found is None:
                return
            source, number = found
            factor *= number
        if source is None:
            return
        value = source
        nodes.append(node)


def scaling(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return what a node multiplies or divides by a number, and the factor; None for others."""
    if node.op_type not in ("Mul", "Div") or node.domain or None in node.inputs:
        return None
    one, other = node.inputs
    assert one is not None
    assert other is not None
    number = number_of(other)
    if number is None and node.op_type == "Mul":
        one, number = other, number_of(one)
    if number is None or not math.isfinite(number) or number == 0:
        return None
    # A number of higher rank than the value would add axes.
    same_rank = len(dims(one)) == len(dims(node.outputs[0]))
    return (one, number if node.op_type == "Mul" else 1 / number) if same_rank else None


def number_of(value: ir.Value | None) -> float | None:
    """Return the number that all elements of a constant are; None for other values."""
    if value is None:
        return None
    source = trace_back(value, {"Cast", "Identity", *MOVES})
    array = constant_array(source)
    node = source.producer()
    if node is not None and node.op_type == "ConstantOfShape":
        fill = node.attributes.get_tensor("value", None)
        array = np.zeros(1) if fill is None else fill.numpy()
    if (
        array is None
        or not array.size
        or array.dtype.kind not in "biuf"
        or not (array == array.flat[0]).all()
    ):
        return None
    return float(array.flat[0])


# -- nodes that give a value another order of axes and another shape ----------------------------


def _arranged(
    op: Builder, source: ir.Value, shape: Sequence[Size], order: Sequence[int]
) -> ir.Value | None:
    """Return a source as `[B, H, n, m]`; None if its new shape cannot be stated.

    `shape`: The shape `[B, H, n, m]`.
    `order`: The axes of `shape` in the order in which the source holds them.
    """
    in_memory = [shape[axis] for axis in order]
    value = _reshaped(op, source, in_memory)
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
    return _reshaped(op, value, shape)


def _reshaped(op: Builder, value: ir.Value, shape: Sequence[Size]) -> ir.Value | None:
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
