"""Reader of the weights of attention that is written out, from their product to the softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import Size
from attn_export.graph.ir_helpers import (
    computed,
    constant_numbers,
    dims,
    optional_input,
)
from attn_export.parts.decomposed.scores import Operand, factors, keeps_rows
from attn_export.parts.decomposed.views import MOVES, NoMatchError, number_of

MOST_NODES = 16
"""The largest number of nodes between a softmax and the product, and of those of a guard."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """A product of weights and values.

    Attributes:
        value: The values, `[..., S, Dv]`.
        order: The order in which the axes of the product are `[..., L, Dv]`.
        path: The weights as they are from the softmax to the product.
        seen: The condition on which weights are kept and are 0 otherwise, if data decides it.
        drops_last: Whether the last weight of each row, that of a sink, is left out.
    """

    softmax: ir.Node
    product: ir.Node
    value: Operand
    order: tuple[int, ...]
    leads: tuple[Size, ...]
    path: tuple[ir.Value, ...]
    seen: ir.Value | None = None
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
                softmax, path, seen, drops_last = found
                yield Weights(softmax, product, value, order, leads, path, seen, drops_last)


def _trace(
    value: ir.Value, perm: list[int]
) -> tuple[ir.Node, tuple[ir.Value, ...], ir.Value | None, bool] | None:
    """Return the softmax behind weights, the values on the way, and the condition if data sets 0.

    The last item is whether the last weight of each row is left out on the way.

    `perm` is the order in which the axes of the weights are `[..., L, S]`.
    """
    path, guards, seen, drops_last = [value], list[ir.Node](), None, False
    for _ in range(MOST_NODES):
        node = value.producer()
        source = node.inputs[0] if node is not None and not node.domain and node.inputs else None
        if node is None or source is None:
            return None
        if node.op_type == "Softmax":
            if (
                perm != sorted(perm)
                or not _is_over_keys(node)
                or not _only_replace_nan(node, guards)
            ):
                return None
            return node, tuple(path[::-1]), seen, drops_last
        if node.op_type == "Transpose":
            moved = node.attributes.get_ints("perm", range(len(perm))[::-1])
            perm = [moved[axis] for axis in perm]
        elif node.op_type == "Slice" and not drops_last and _drops_last(node, value):
            drops_last = True
        elif node.op_type == "Where" and seen is None and (found := _guarded(node)) is not None:
            source, seen = found
            guards += [] if seen is not None else [node]
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


def _guarded(node: ir.Node) -> tuple[ir.Value, ir.Value | None] | None:
    """Return the weights that a Where passes on, and its condition if data decides it.

    The other branch is a number.
    """
    condition, yes, no = node.inputs
    if condition is None or yes is None or no is None:
        return None
    if number_of(yes) is not None:
        return no, None
    if number_of(no) is None:
        return None
    return yes, condition if number_of(no) == 0 and not _depends_on_scores(condition) else None


def _depends_on_scores(condition: ir.Value) -> bool:
    values = [condition]
    for value in values:
        node = value.producer()
        if node is not None and node.op_type == "Softmax":
            return True
        if node is not None and len(values) < MOST_NODES:
            values += [x for x in node.inputs if x is not None]
    return False


def _only_replace_nan(softmax: ir.Node, guards: list[ir.Node]) -> bool:
    """Return whether guards change weights only where they are NaN, since all keys are hidden.

    They are run on scores of which a row, and a part of another, is -inf.
    """
    source, made = softmax.inputs[0], softmax.outputs[0]
    if not guards or source is None:
        return not guards
    shape = [size if isinstance(size, int) else 2 for size in dims(source)[:-2]]
    rows = [size if isinstance(size, int) else 3 for size in dims(source)[-2:]]
    scores = np.random.default_rng(0).standard_normal((*shape, *rows)).astype(np.float32)
    scores[..., 0, :] = scores[..., -1, :1] = -np.inf
    if min(rows) < 2:
        return False
    with np.errstate(all="ignore"):
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        weights = powers / powers.sum(-1, keepdims=True)
    found = computed(guards[0].outputs[0], {source: scores, made: weights})
    if found is None:
        return False
    guarded, expected = found, np.where(np.isnan(weights), 0, weights)
    same = guarded.size == expected.size
    return same and bool(np.array_equal(guarded.reshape(expected.shape), expected))
