"""Search for the first value of a graph that its reference (a module or graph) does not have.

It serves graphs that were not exported here. Their values have other names than the reference's,
so values are matched by their contents.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import numpy as np
import onnx
from onnx import helper

from attn_export.errors import printable
from attn_export.explain.explanation import Cause, Deviation, Lines, OutOfTime
from attn_export.explain.relations import relation
from attn_export.float64 import ReferenceStep
from attn_export.float64.evaluate import ROUNDED_TO, Evaluation, Values
from attn_export.measures import measure_strictly
from attn_export.results import Arrays, Golden
from attn_export.tensorfile import Array

_MODULE_AGREES = 1e-6
"""The largest relative distance at which two values match, both computed in float64.

Constants of a graph may be float32, those of the module are float64."""

_MOST_AXES = 4
"""The largest number of axes for which all orders are tried."""

_LEAST_MATCHED = 0.25
"""The least share of computed values that must match for a node to be named. If fewer match, the
reference computes in another way."""

_HUGE = 1e30
"""The size above which a number hides keys."""

_MOST_LETTERS = 60
"""The most letters of a name of a value in a sentence."""

_NEAR_WEIGHT = 1.0
"""The largest relative distance of a weight from the parameter that it is taken for."""

MANY_NUMBERS = 4
"""An array with more distinct numbers than this does not match by coincidence."""


@dataclasses.dataclass(frozen=True)
class ValueReference:
    """The reference for the values of a wrong graph.

    Attributes:
        name: Its name, as in "the graph differs from …".
        steps: Takes the inputs of a case, and returns the operations of the reference.
        cause: Searches for the change of the reference under which it gives the outputs of a case.
            It takes the case with its reference, the outputs, and a function that returns whether
            the time is over. None if the graph may be of another model than the reference.
        is_float_model: Whether a quantised graph has none of its values: nothing is explained.
    """

    name: str = "the bundle's"
    steps: Callable[[Mapping[str, Array]], Sequence[ReferenceStep]] | None = None
    cause: Callable[[Golden, Arrays, OutOfTime], Cause | None] | None = None
    is_float_model: bool = False


def first_unmatched_node(
    graph: Evaluation, values: Values, whose: ValueReference, steps: Sequence[ReferenceStep],
    lines: Lines, near: float = _MODULE_AGREES,
) -> Deviation | None:  # fmt: skip
    """Return the first node with a value that matches no step of the reference.

    Nodes whose inputs match those of a step, and whose output does not, take precedence. Return
    None if all values match, or if so few do that the reference computes in another way.

    `near`: The largest relative distance at which two values match.
    """
    source = None if any(map(_has_nan, (s.value for s in steps))) else _source_of_nan(graph, values)
    if source is not None:
        return source
    comparable = {
        name: value
        for name, value in values.items()
        # Masks of the same model may be made in many ways, also of huge numbers, or of 0 and 1.
        if _is_comparable(value) and (whose.cause is None or not is_mask(value))
    }
    matches: dict[str, list[int]] = {}
    for name, value in comparable.items():
        numbers = [n for n, step in enumerate(steps) if _are_equal(value, step.value, near)]
        if numbers:
            matches[name] = numbers
    varied = {name for name in matches if _is_varied(comparable[name])}
    right_values = _with_sources(graph, set(matches), varied)
    computed = [name for name in comparable if name in graph.producer]
    is_other = sum(name in matches for name in computed) < _LEAST_MATCHED * len(computed)
    if is_other and whose.cause is None:
        return None
    matched = {number for numbers in matches.values() for number in numbers}
    wrong_values = comparable.keys() - right_values
    nodes = [node for node in graph.nodes if not wrong_values.isdisjoint(node.output)]
    for node in nodes:
        weights = _wrong_weight(graph, node, values, matches, steps)
        if weights is not None:
            return dataclasses.replace(
                _deviation(node, values, whose.name, None, lines), says=weights
            )
        unmatched_step = _unmatched_step(node, matches, matched, steps)
        constant = _other_constant(node, values, matches, unmatched_step, steps, whose.name)
        if constant:
            found = _deviation(node, values, whose.name, None, lines)
            return dataclasses.replace(found, says=constant)
        if unmatched_step is not None:
            return _deviation(node, values, whose.name, unmatched_step, lines)
    return _deviation(nodes[0], values, whose.name, None, lines) if nodes else None


def _is_comparable(value: object) -> TypeGuard[Array]:
    """Return whether a value is a floating or bool tensor of several elements."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "fb" and value.size > 1


def _has_nan(value: object) -> TypeGuard[Array]:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and bool(np.isnan(value).any())


def _source_of_nan(graph: Evaluation, values: Values) -> Deviation | None:
    """Return the first node that makes NaN of numbers; None if there is none."""
    for node in graph.nodes:
        value = values.get(node.output[0])
        if not _has_nan(value) or any(_has_nan(values.get(name)) for name in node.input):
            continue
        says = "it gives NaN, which no value of the model is"
        read = values.get(node.input[0])
        if node.op_type == "Softmax" and read is not None and (read == -np.inf).all(-1).any():
            says = f"{says}: all keys of a query are hidden by -Inf"
        return Deviation(
            node.name or node.output[0], node.op_type, node.output[0], "", math.inf, says
        )
    return None


def is_mask(value: Array) -> bool:
    """Return whether a value hides keys: by truth values, by 0 and 1, or by huge numbers."""
    if value.dtype == np.bool_:
        return True
    return bool((np.abs(value) > _HUGE).any() or np.isin(value, (0, 1)).all())


def _is_varied(value: Array) -> bool:
    """Return whether a value has enough distinct numbers for a match to be no coincidence."""
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value[:0]
    return len(np.unique(finite)) > MANY_NUMBERS


def _with_sources(graph: Evaluation, matched: set[str], varied: set[str]) -> set[str]:
    """Return the matched values, and all values from which a varied matched value is computed."""
    sources = set(varied)
    for node in reversed(graph.nodes):
        if sources.intersection(node.output):
            # Of queries, caches show nothing.
            is_cache = node.op_type in _CACHING and node.output[0] not in sources
            sources.update(node.input[is_cache and bool("".join(node.input[1:3])) :])
    return matched | sources


_CACHING = ("Attention", "GroupQueryAttention", "MultiHeadAttention")
"""Operators whose first input are queries, and whose outputs after the first are caches."""


def _wrong_weight(
    graph: Evaluation, node: onnx.NodeProto, values: Values, matches: Mapping[str, Sequence[int]],
    steps: Sequence[ReferenceStep],
) -> str | None:  # fmt: skip
    """Return how a weight that a node reads differs from that of the model; None if it does not.

    It is near to a parameter of its size, and all else that the node reads is right.
    """
    read = [name for name in node.input if _is_comparable(values.get(name))]
    wrong = [name for name in read if name not in matches]
    if len(wrong) != 1 or wrong[0] not in graph.initializers:
        return None
    weight = graph.initializers[wrong[0]]
    found = [
        (distance(turned, step.value), number, turned)
        for number, step in enumerate(steps)
        if not step.reads and not step.line and step.value.dtype.kind == "f"
        for turned in (weight, weight.T)
        if turned.shape == step.value.shape
    ]
    least, number, turned = min(found, key=lambda each: each[:2], default=(math.inf, 0, weight))
    if least > _NEAR_WEIGHT:
        return None
    own = steps[number]
    units = ("row", "column") if weight.ndim == 2 else ("element",) if weight.ndim == 1 else ()
    changed = relation([(turned, own.value)], units) or _rows_apart(turned, own.value)
    name = printable(wrong[0], _MOST_LETTERS)
    return f"its weight {name}, {own.operation} in the model, {changed}"


def _rows_apart(weight: Array, right: Array) -> str:
    """Return where a weight differs, and by how much."""
    differs = np.abs(weight - right) > _MODULE_AGREES * np.abs(right).max()
    return (
        f"is {distance(weight, right):.1e} away in {int(differs.sum())} of {differs.size} elements"
    )


def _unmatched_step(
    node: onnx.NodeProto,
    matches: Mapping[str, Sequence[int]],
    matched_steps: set[int],
    steps: Sequence[ReferenceStep],
) -> ReferenceStep | None:
    """Return a step that reads values of the node, and whose result the graph does not have.

    It is the one that does what the node should, as far as the names of operations tell, and a line
    of the module's rather than one of our own call.
    """
    read = {number for name in node.input for number in matches.get(name, ())}
    found = [
        (_does(node, step), bool(step.line), len(read.intersection(step.reads)), -number, step)
        for number, step in enumerate(steps)
        if number not in matched_steps and read.intersection(step.reads)
    ]
    return max(found, key=lambda each: each[:4])[-1] if found else None


_OPERATIONS: Mapping[str, str] = {
    "Attention": "bmm|.*scaled_dot_product.*", "Cast": "_to_copy", "Concat": "cat|stack",
    "Conv": "convolution", "Gather": "embedding|index.*",
    "Gemm": "addmm|mm", "LayerNormalization": "native_layer_norm", "MatMul": "(ba?d?d?b)?mm|addmm",
    "ReduceMax": "a?max", "ReduceMean": "mean", "ReduceSum": "sum", "Reshape": "_?(unsafe_)?view",
    "Softmax": "_(safe_)?softmax", "Sqrt": "r?sqrt", "Swish": "silu",
    "Transpose": "transpose|permute|t", "Where": "where|masked_fill",
}  # fmt: skip
"""What operators are in PyTorch, as patterns, where it has other names."""


def _does(node: onnx.NodeProto, step: ReferenceStep) -> bool:
    """Return whether a step of PyTorch is of the sort of a node, by name."""
    pattern = _OPERATIONS.get(node.op_type, node.op_type.lower())
    return re.fullmatch(pattern, step.operation) is not None


def _deviation(
    node: onnx.NodeProto, values: Values, reference: str, step: ReferenceStep | None, lines: Lines
) -> Deviation:
    name = node.output[0]
    value = values[name]
    line = lines.get(node.name, "") or (step.line if step else "")
    says, error = f"{reference} has no such value", math.inf
    rounded = next((a.i for a in node.attribute if a.name == ROUNDED_TO), None)
    if rounded is not None:
        kind = helper.tensor_dtype_to_np_dtype(rounded).name
        says = f"it rounds {printable(node.input[0], _MOST_LETTERS)} to {kind}"
    elif step is not None:
        there = f" at {step.line}" if step.line not in ("", line) else ""
        reads = ", ".join(printable(x, _MOST_LETTERS) for x in node.input[:3] if x)
        says = f"it is {node.op_type} of {reads}, where {reference} has {step.operation}{there}"
        if _is_comparable(value) and value.shape == step.value.shape:
            error = distance(value, step.value)
            units = [f"part of axis {axis}" for axis in range(value.ndim)]
            changed = relation([(value, step.value)], units)
            away = f", {error:.1e} away" if math.isfinite(error) else ""
            if changed:
                says = f"it {changed}, by {step.operation} of {reference}{there}"
            elif _does(node, step):
                says = f"its numbers are not those of {step.operation} of {reference}{there}{away}"
            else:
                says += away
    return Deviation(node.name or name, node.op_type, name, line, error, says)


def _are_equal(value: Array, other: Array, near: float) -> bool:
    """Return whether two arrays hold the same elements, in any shape and order of axes."""
    if value.size != other.size or (value.dtype == np.bool_) != (other.dtype == np.bool_):
        return False
    if distance(value, other) <= near:
        return True
    if value.ndim > _MOST_AXES or other.ndim > _MOST_AXES or other.ndim < 2:
        return False
    orders = itertools.islice(itertools.permutations(range(other.ndim)), 1, None)
    return any(distance(value, other.transpose(order)) <= near for order in orders)


def distance(value: Array, other: Array) -> float:
    """Return the relative L2 distance of two values of a graph, or infinity.

    It is infinite if other elements are NaN or infinite, and if integers or booleans differ.

    `value`: A value of any shape.
    """
    # Flattened: in a row that is 0 in float64, a value within a graph may have rounding errors.
    value, other = value.ravel(), other.ravel()
    if value.dtype.kind != "f" or other.dtype.kind != "f":
        return 0.0 if np.array_equal(value, other) else math.inf
    return measure_strictly(value, other).whole


# -- small constants, as of the denominator of a router, that a graph lacks or has another of ---

_EXACT = 1e-12
"""The largest difference of two float64 sums that are equal, relative to the largest element."""

_LETTERS = 60


def _other_constant(
    node: onnx.NodeProto, values: Values, matches: Mapping[str, Sequence[int]],
    step: ReferenceStep | None, steps: Sequence[ReferenceStep], whose: str,
) -> str:  # fmt: skip
    """Return how a number that a node adds differs from that of the reference; "" if it does not.

    `matches`: The numbers of the steps that are equal to values, but for rounding.
    `step`: What the reference computes where the node is; None if that is not known.
    """
    for name in filter(matches.get, node.input):
        near = set(matches[name])
        sums = {
            number: added
            for number, each in enumerate(steps)
            if len(each.reads) == 1 and near.issuperset(each.reads)
            for added in [_added(each, steps[each.reads[0]].value)]
            if added is not None
        }
        shown = printable(name, _LETTERS)
        own = _constant(node, name, values)
        if own is not None and sums:
            added = next(iter(sums.values()))
            given = f"adds {added:.3g}" if added else "adds none that shows"
            return f"it adds {own:.3g} to {shown}, where {whose} {given}"
        if own is not None and step is not None:
            return f"it adds {own:.3g} to {shown}, where {whose} has {step.operation} of it"
        for number in step.reads if step is not None and own is None else ():
            # The value is the sum before, not the one after.
            value, right = values[name], steps[number].value
            if value is None or value.size != right.size:
                continue
            if sums.get(number) and _added(steps[number], value.reshape(right.shape)):
                return f"it reads {shown}, to which {whose} adds {sums[number]:.3g} first"
    return ""


def _added(step: ReferenceStep, read: Array) -> float | None:
    """Return the number that a step adds to a value; 0 if none shows, None if it does not add."""
    value = step.value
    if not step.operation.startswith(("add", "sub")) or value.shape != read.shape:
        return None
    difference = value - read
    number, limit = float(np.median(difference)), _EXACT * float(np.abs(value).max())
    if not np.abs(difference - number).max() <= limit:
        return None
    return number if abs(number) > limit else 0.0


def _constant(node: onnx.NodeProto, name: str, values: Values) -> float | None:
    """Return the number that a node adds to one of its inputs; None if it does not."""
    if node.op_type not in ("Add", "Sub") or len(node.input) != 2:
        return None
    other = values.get(next((x for x in node.input if x != name), ""))
    if not isinstance(other, np.ndarray) or other.size != 1:
        return None
    return float(other.item()) * (-1 if node.op_type == "Sub" else 1)
