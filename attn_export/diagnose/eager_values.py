"""The first value of a graph that its reference does not have: a module, or another graph.

For graphs that were not exported here: their values have names of their own, so that they are
compared by what they hold.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import numpy as np
import onnx

from attn_export.diagnose.evaluate import Evaluation, Values
from attn_export.diagnose.explanation import Deviation, Lines, Step
from attn_export.parity.measures import distance
from attn_export.tensorfile import Array

MODULE_AGREES = 1e-6
"""Largest difference at which the graph holds a value of the module, both in float64.

Constants in a graph may be float32, those of the module are float64."""

MOST_AXES = 4
"""The most axes of which all orders are tried."""

LEAST = 0.25
"""The share of floating values that the module must have too, if the first that it has not is to be
named: otherwise it computes in another way."""

VARIED = 4
"""More different numbers than this are no coincidence."""


@dataclasses.dataclass(frozen=True)
class Witness:
    """The reference for the values of a wrong graph.

    Attributes:
        name: Its name at the end of "the graph differs from".
        steps: Returns the operations of a reference for the inputs of a case.
    """

    name: str = "the bundle's"
    steps: Callable[[Mapping[str, Array]], Sequence[Step]] | None = None


def first_unmatched_node(
    graph: Evaluation, values: Values, whose: str, steps: Sequence[Step], lines: Lines
) -> Deviation | None:
    """Return the first node with a value that no step of the witness has.

    A node is preferred that reads what a step reads, where the results are different.

    Args:
        graph: The graph.
        values: Its values in a case.
        whose: The name of the witness.
        steps: Its operations in the same case.
        lines: The line of the module that each node came from.
    """
    by_size: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        by_size.setdefault(step.value.size, []).append(number)
    comparable = {name: value for name, value in values.items() if _tells(value)}
    found: dict[str, list[int]] = {}
    for name, value in comparable.items():
        same = [n for n in by_size.get(value.size, ()) if _alike(value, steps[n].value)]
        if same:
            found[name] = same
    right = _with_sources(graph, set(found), {n for n in found if _is_varied(comparable[n])})
    made = [name for name in comparable if name in graph.producer]
    if sum(name in found for name in made) < LEAST * len(made):
        return None
    matched = {number for numbers in found.values() for number in numbers}
    nodes = [
        node for node in graph.nodes if any(n in comparable and n not in right for n in node.output)
    ]
    for node in nodes:
        other = _other_result(node, found, matched, steps)
        if other is not None:
            return _deviation(node, values, whose, other, lines)
    return _deviation(nodes[0], values, whose, None, lines) if nodes else None


def _tells(value: object) -> TypeGuard[Array]:
    """Return whether a value is a tensor of numbers or a mask; sizes are alike in all graphs."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "fb" and value.size > 1


def _is_varied(value: Array) -> bool:
    """Return whether a value says something of what it is made of: an array of ones does not."""
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value[:0]
    return len(np.unique(finite)) > VARIED


def _with_sources(graph: Evaluation, found: set[str], varied: set[str]) -> set[str]:
    """Return the values that are right, and those that something right and varied is made of."""
    sources = set(varied)
    for node in reversed(graph.nodes):
        if sources.intersection(node.output):
            sources.update(node.input)
    return found | sources


def _other_result(
    node: onnx.NodeProto,
    found: Mapping[str, Sequence[int]],
    matched: set[int],
    steps: Sequence[Step],
) -> Step | None:
    """Return a step that reads what the node reads, and whose result the graph does not have."""
    read = {number for name in node.input for number in found.get(name, ())}
    return next(
        (
            step
            for number, step in enumerate(steps)
            if number not in matched and read.intersection(step.reads)
        ),
        None,
    )


def _deviation(
    node: onnx.NodeProto, values: Values, whose: str, step: Step | None, lines: Lines
) -> Deviation:
    name = node.output[0]
    value = values[name]
    line = lines.get(node.name, "") or (step.line if step else "")
    says, error = f"{whose} has no such value", math.inf
    if step is not None:
        at = f" at {step.line}" if step.line not in ("", line) else ""
        says = f"{step.operation} of {whose}{at} gives other numbers there"
        if _tells(value) and value.shape == step.value.shape:
            error = _distance(value, step.value)
            says += f", {error:.1e} away" if math.isfinite(error) else ""
    return Deviation(node.name or name, node.op_type, name, line, error, says)


def _alike(value: Array, other: Array) -> bool:
    """Return whether two arrays hold the same, in any shape and order of axes."""
    if (value.dtype == np.bool_) != (other.dtype == np.bool_):
        return False
    if _close(value, other):
        return True
    if value.ndim > MOST_AXES or other.ndim > MOST_AXES or other.ndim < 2:
        return False
    orders = itertools.islice(itertools.permutations(range(other.ndim)), 1, None)
    return any(_close(value, other.transpose(order)) for order in orders)


def _close(value: Array, other: Array) -> bool:
    return _distance(value.ravel(), other.ravel()) <= MODULE_AGREES


def _distance(value: Array, other: Array) -> float:
    """Return the relative L2 distance; infinite where other elements are not finite."""
    if value.dtype.kind != "f" or other.dtype.kind != "f":
        return 0.0 if np.array_equal(value, other) else math.inf
    # As one row: a row of zeros that is not exact counts as far as it is away.
    return distance(value.ravel(), other.ravel()).whole
