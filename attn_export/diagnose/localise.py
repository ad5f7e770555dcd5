"""The first node whose output leaves the float64 run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from attn_export.diagnose.evaluate import Evaluation, Values, is_float
from attn_export.diagnose.explanation import Deviation, Lines
from attn_export.graph.load import load_model
from attn_export.parity.measures import measure
from attn_export.tensorfile import Array

GRAPHS_AGREE = 1e-9
"""Largest difference at which two graphs, both evaluated in float64, hold the same value."""

MIN_TOLERANCE_EPS = 64
"""The error that the output of one node may have, in eps of float32."""

MAX_UNMATCHED = 4
"""The most unmatched values before a wrong node at which the first of them is named instead."""

MIN_SHARED = 0.6
"""The least share of values that right graphs must have, too: below it the graph may compute the
same in another way."""

MAX_FOREIGN_NAMES = 0.5
"""The share of value names unknown to the right graph from which on another exporter chose them:
then the first wrong node may be anywhere."""

NO_SUCH_NODE = "the right graph has no such node"


def first_difference(
    wrong: Evaluation, wrong_values: Values, right: Evaluation, right_values: Values, lines: Lines
) -> Deviation | None:
    """Return the first difference between two graphs whose values share names.

    Args:
        wrong: The graph in question.
        wrong_values: Its values in a case.
        right: The graph that it should equal.
        right_values: Its values in the same case.
        lines: The line of the module that each node came from.
    """
    known = {
        name
        for name in wrong_values
        if name in right_values and _error(wrong_values[name], right_values[name]) <= GRAPHS_AGREE
    }
    for node in wrong.nodes:
        for name in node.output:
            if name in right_values and name not in known:
                error = _error(wrong_values[name], right_values[name])
                return _deviation(node, name, error, wrong, right, known, lines)
    return None


def first_value_in_no_right_graph(
    wrong: Evaluation, cases: Sequence[tuple[Values, Sequence[Values]]], lines: Lines
) -> Deviation | None:
    """Return the first deviation of a graph from right graphs with any names.

    Args:
        wrong: The graph in question.
        cases: Its values in some cases, with those of right graphs.
        lines: The line of the module that each node came from.
    """
    compared = [name for name in wrong.producer if all(_tells(mine.get(name)) for mine, _ in cases)]
    right = {name for name in compared if all(_among(mine[name], theirs) for mine, theirs in cases)}
    for node in reversed(wrong.nodes):  # what something right is made of is right
        made = [name for name in node.output if name in compared]
        if made and right.issuperset(made):
            right.update(node.input)
    if len(right.intersection(compared)) < MIN_SHARED * len(compared):
        return None
    for node in wrong.nodes:
        for name in node.output:
            if name in compared and name not in right:
                says = "no right graph has such a value"
                line = lines.get(node.name, "")
                return Deviation(node.name, node.op_type, name, line, np.inf, says)
    return None


def _tells(value: object) -> bool:
    """Return whether a value is a tensor of numbers or a mask; sizes are alike in all graphs."""
    return isinstance(value, np.ndarray) and (value.dtype.kind == "f" or value.dtype == np.bool_)


def _among(value: Array | None, others: Sequence[Values]) -> bool:
    arrays = (array for values in others for array in values.values())
    return any(isinstance(a, np.ndarray) and _error(value, a) <= GRAPHS_AGREE for a in arrays)


def _deviation(
    node: onnx.NodeProto,
    name: str,
    error: float,
    wrong: Evaluation,
    right: Evaluation,
    known: set[str],
    lines: Lines,
) -> Deviation | None:
    """Return a wrong node, or the first before it that the right graph does not have."""
    between = _unmatched(node, wrong, known)
    strangers = sum(name not in right.producer for name in wrong.producer)
    if len(between) > MAX_UNMATCHED and strangers > MAX_FOREIGN_NAMES * len(wrong.producer):
        return None
    theirs = {(n.op_type, n.name) for n in right.nodes}
    strange = (n for n in wrong.nodes if (n.op_type, n.name) not in theirs)
    first = next((n for n in strange if not between.isdisjoint(n.output)), node)
    twin = right.producer.get(name)
    if first is node:
        says = _change(node, wrong, right, twin, known)
    elif len(between) > MAX_UNMATCHED:
        first = node
        changed = _change(node, wrong, right, twin, known)
        more = f"{len(between)} values before it are not in the right graph"
        says = "; ".join(filter(None, [changed, more]))
    else:
        says = f"{NO_SUCH_NODE} before {node.op_type} {node.name}"
        attributes = _attributes(node, twin)
        says = "; ".join([says, *(f"there {change}" for change in attributes)])
    line = lines.get(first.name, "")
    return Deviation(first.name, first.op_type, first.output[0], line, error, says)


def first_runtime_deviation(
    evaluation: Evaluation,
    truth: Values,
    noise: Values,
    actual: Mapping[str, Array],
    lines: Lines,
) -> Deviation | None:
    """Return the first deviation of a runtime from the float64 run of its graph.

    Args:
        evaluation: The graph.
        truth: Its values in float64.
        noise: Its values where each output is rounded to the graph's own type.
        actual: The runtime's outputs, by name.
        lines: The line of the module that each node came from.
    """
    least = MIN_TOLERANCE_EPS * float(np.finfo(np.float32).eps)
    for node in evaluation.nodes:
        for name in node.output:
            right = truth.get(name)
            if name not in actual or right is None:
                continue
            error = _error(actual[name], right)
            if error > max(8 * _error(noise.get(name), right), least):
                line = lines.get(node.name, "")
                return Deviation(node.name, node.op_type, name, line, error, "")
    return None


def write_with_all_outputs(path: Path, values: Values, target: Path) -> None:
    """Write the graph with every value as an output.

    Args:
        path: The graph.
        values: The values of any case: they give the types.
        target: The file to write.
    """
    model = load_model(path)
    graph = model.graph
    floats = next(
        (i.type.tensor_type.elem_type for i in graph.input if is_float(values.get(i.name))),
        onnx.TensorProto.FLOAT,
    )
    given = {output.name for output in graph.output}
    for node in graph.node:
        for name in node.output:
            array = values.get(name)
            if name and isinstance(array, np.ndarray) and name not in given:
                kind = floats if is_float(array) else helper.np_dtype_to_tensor_dtype(array.dtype)
                graph.output.append(helper.make_tensor_value_info(name, kind, None))
    onnx.save(model, target)


def _unmatched(node: onnx.NodeProto, graph: Evaluation, known: set[str]) -> set[str]:
    """Return the values between a node and those that are known to be right."""
    found: set[str] = set()
    waiting = list(node.input)
    while waiting:
        name = waiting.pop()
        producer = graph.producer.get(name)
        if producer is not None and name not in known and name not in found:
            found.add(name)
            waiting.extend(producer.input)
    return found


def _error(x: object, right: object) -> float:
    """Return the relative L2 distance; infinite if shapes or non-finite values differ."""
    if x is None or right is None:
        return 0.0 if x is right else np.inf
    if not (isinstance(x, np.ndarray) and isinstance(right, np.ndarray)):
        return 0.0  # a sequence: what is made of it is compared
    if x.shape != right.shape:
        return np.inf
    if right.dtype.kind != "f" or x.dtype.kind != "f":
        return 0.0 if np.array_equal(x, right) else np.inf
    x = x.astype(np.float64)
    alike: Callable[[Array], Array]
    for alike in (np.isnan, np.isposinf, np.isneginf):
        if not np.array_equal(alike(x), alike(right)):
            return np.inf
    found = measure(x, right)
    if not found.row and not np.array_equal(x[np.isfinite(x)], right[np.isfinite(right)]):
        return np.inf  # rows that have to be 0
    return max(found.whole, found.row)


def _change(
    node: onnx.NodeProto,
    wrong: Evaluation,
    right: Evaluation,
    twin: onnx.NodeProto | None,
    known: set[str],
) -> str:
    """Return all differences between a node and its counterpart in the right graph."""
    changed = [n for n in node.input if n in wrong.initializers and n not in known]
    found = [f"the initialiser {n} has other values" for n in changed if n in right.initializers]
    if twin is None or twin.op_type != node.op_type:
        other = f"{twin.op_type} should be there" if twin is not None else ""
        if twin is not None and twin.name in {n.name for n in wrong.nodes}:
            other = "the right graph has no such node"
        return "; ".join(found) or other
    found += _inputs(node, twin)
    return "; ".join([*found, *_attributes(node, twin)])


def _inputs(node: onnx.NodeProto, twin: onnx.NodeProto) -> list[str]:
    pairs = itertools.zip_longest(node.input, twin.input, fillvalue="")
    return [
        f"its input {mine or 'nothing'} should be {theirs or 'nothing'}"
        for mine, theirs in pairs
        if mine != theirs
    ]


def _attributes(node: onnx.NodeProto, twin: onnx.NodeProto | None) -> list[str]:
    """Return the attributes of a node that differ from its twin's, and differences in branches."""
    if twin is None or twin.op_type != node.op_type:
        return []
    found = []
    mine, theirs = (
        {a.name: helper.get_attribute_value(a) for a in n.attribute} for n in (node, twin)
    )
    for name in sorted(mine.keys() | theirs.keys()):
        one, other = mine.get(name), theirs.get(name)
        if one == other:
            continue
        if isinstance(one, onnx.GraphProto) and isinstance(other, onnx.GraphProto):
            found.append(f"its {name} is another one{_in_branch(one, other)}")
        else:
            found.append(f"its {name} is {_shown(one)}, and should be {_shown(other)}")
    return found


def _in_branch(branch: onnx.GraphProto, right: onnx.GraphProto) -> str:
    """Return the first difference between a branch and the right one, as text."""
    for node, twin in zip(branch.node, right.node, strict=False):
        if node.op_type != twin.op_type:
            return f": {twin.op_type} should be there in place of {node.op_type} {node.name}"
        changed = [*_inputs(node, twin), *_attributes(node, twin)]
        if changed:
            return f": in {node.op_type} {node.name}, {'; '.join(changed)}"
    return ""


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return (
        f"{value:.7g}" if isinstance(value, float) else "not set" if value is None else str(value)
    )
