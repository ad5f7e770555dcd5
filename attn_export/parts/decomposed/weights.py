"""Reader of the weights of attention that is written out, from their product to the softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from attn_export.graph.axis_names import Size
from attn_export.graph.ir_helpers import constant_numbers, dims, optional_input
from attn_export.parts.decomposed.scores import Operand, factors, keeps_rows
from attn_export.parts.decomposed.views import MOVES, NoMatchError, number_of

_MOST_NODES = 16
"""The largest number of nodes between a softmax and the product."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """A product of weights and values.

    Attributes:
        value: The values, `[..., S, Dv]`.
        order: The order in which the axes of the product are `[..., L, Dv]`.
        path: The weights as they are from the softmax to the product.
        drops_last: Whether the last weight of each row, that of a sink, is left out.
    """

    softmax: ir.Node
    product: ir.Node
    value: Operand
    order: tuple[int, ...]
    leads: tuple[Size, ...]
    path: tuple[ir.Value, ...]
    drops_last: bool = False


def weights_of(product: ir.Node) -> Iterator[Weights]:
    """Yield how a product may be read as one of weights and values."""
    for first in (0, 1):
        try:
            weights, value, order, leads = factors(product, first)
        except NoMatchError:
            continue
        if None not in weights.perm:
            perm = [axis for axis in weights.perm if axis is not None]
            found = _trace(weights.value, perm)
            if found is not None:
                softmax, path, drops_last = found
                yield Weights(softmax, product, value, order, leads, path, drops_last)


def _trace(value: ir.Value, perm: list[int]) -> tuple[ir.Node, tuple[ir.Value, ...], bool] | None:
    """Return the softmax behind weights, the values on the way, and if each row loses its last one.

    `perm` is the order in which the axes of the weights are `[..., L, S]`.
    """
    path, drops_last = [value], False
    for _ in range(_MOST_NODES):
        node = value.producer()
        source = node.inputs[0] if node is not None and not node.domain and node.inputs else None
        if node is None or source is None:
            return None
        if node.op_type == "Softmax":
            if perm != sorted(perm) or not _is_over_keys(node):
                return None
            return node, tuple(path[::-1]), drops_last
        if node.op_type == "Transpose":
            moved = node.attributes.get_ints("perm", range(len(perm))[::-1])
            perm = [moved[axis] for axis in perm]
        elif node.op_type == "Slice" and not drops_last and _drops_last(node, value):
            drops_last = True
        elif node.op_type == "Where" and (guarded := _guarded(node)) is not None:
            source = guarded
        elif node.op_type in MOVES and perm == sorted(perm) and keeps_rows(source, value):
            perm = list(range(len(dims(source))))
        elif node.op_type not in ("Cast", "Identity"):
            return None
        value = source
        path.append(value)
    return None


def _drops_last(node: ir.Node, out: ir.Value) -> bool:
    """Return whether a Slice leaves out the last element of each row."""
    starts, ends, axes = (constant_numbers(optional_input(node, index)) for index in (1, 2, 3))
    steps = constant_numbers(optional_input(node, 4)) or [1]
    last = len(dims(out)) - 1
    return starts == [0] and ends == [-1] and axes in ([-1], [last]) and steps == [1]


def _is_over_keys(softmax: ir.Node) -> bool:
    graph = softmax.graph
    opset = graph.opset_imports.get("", 13) if isinstance(graph, ir.Graph) else 13
    source = softmax.inputs[0]
    rank = len(dims(source)) if source is not None else 0
    return (
        softmax.attributes.get_int("axis", -1 if opset >= 13 else 1) in (-1, rank - 1) and rank > 1
    )


def _guarded(node: ir.Node) -> ir.Value | None:
    """Return the weights that a Where passes on, where its other branch is a number.

    That it replaces only NaN, of queries whose keys are all hidden, is left to the comparison with
    the source.
    """
    _, yes, no = node.inputs
    if yes is None or no is None:
        return None
    if number_of(yes) is not None:
        return no
    return None if number_of(no) is None else yes
