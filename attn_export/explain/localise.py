"""The first node whose output leaves the float64 run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper

from attn_export.explain.explanation import Deviation, Lines
from attn_export.parity.measures import measure

if TYPE_CHECKING:
    from attn_export.explain.evaluate import Evaluation, Values

Array = np.ndarray
SAME = 1e-9
"""How far two float64 runs of the same thing may be apart: constants in a graph are float32."""

ROUNDINGS = 64
"""Of the graph's type, by which the output of one node may be off."""

BETWEEN = 4
"""How many values may lie between what is known to be right and what is wrong."""


def first_difference(
    wrong: Evaluation, wrong_values: Values, right: Evaluation, right_values: Values, lines: Lines
) -> Deviation | None:
    """Where one graph computes something else than another whose values have the same names.

    Args:
        wrong: The graph in question.
        wrong_values: Its values in a case.
        right: The graph that it should equal.
        right_values: Its values in the same case.
        lines: Where in the module each node came from.
    """
    known = {
        name
        for name in wrong_values
        if name in right_values and _error(wrong_values[name], right_values[name]) <= SAME
    }
    for node in wrong.nodes:
        for name in node.output:
            if name in right_values and name not in known:
                error = _error(wrong_values[name], right_values[name])
                return _deviation(node, name, error, wrong, right, known, lines)
    return None


def _deviation(
    node: onnx.NodeProto,
    name: str,
    error: float,
    wrong: Evaluation,
    right: Evaluation,
    known: set[str],
    lines: Lines,
) -> Deviation | None:
    """A node whose output is wrong, or the first before it that the right graph does not have."""
    between = _unmatched(node, wrong, known)
    if len(between) > BETWEEN:
        return None  # another exporter's names: it may be anywhere before
    first = next((n for n in wrong.nodes if not between.isdisjoint(n.output)), node)
    if first is node:
        says = _change(node, wrong, right, right.producer.get(name), known)
    else:
        says = f"the right graph has no such node before {node.op_type} {node.name}"
    line = lines.get(first.name, "")
    return Deviation(first.name, first.op_type, first.output[0], line, error, says)


def first_rounded_away(
    evaluation: Evaluation,
    truth: Values,
    noise: Values,
    actual: Mapping[str, Array],
    lines: Lines,
) -> Deviation | None:
    """Where a runtime leaves the float64 run of the graph that it was given.

    Args:
        evaluation: The graph.
        truth: Its values in float64.
        noise: Its values where each output is rounded to the graph's own type.
        actual: What the runtime gave, by name.
        lines: Where in the module each node came from.
    """
    least = ROUNDINGS * float(np.finfo(np.float32).eps)
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


def with_all_outputs(path: Path, values: Values, target: Path) -> None:
    """Write the graph with every value as an output.

    Args:
        path: The graph.
        values: Of any case: what type a value has follows from them.
        target: The file to write.
    """
    model = onnx.load(path)
    graph = model.graph
    floats = next(
        (i.type.tensor_type.elem_type for i in graph.input if _is_float(values.get(i.name))),
        onnx.TensorProto.FLOAT,
    )
    given = {output.name for output in graph.output}
    for node in graph.node:
        for name in node.output:
            array = values.get(name)
            if name and array is not None and name not in given:
                kind = floats if _is_float(array) else helper.np_dtype_to_tensor_dtype(array.dtype)
                graph.output.append(helper.make_tensor_value_info(name, kind, None))
    onnx.save(model, target)


def _unmatched(node: onnx.NodeProto, graph: Evaluation, known: set[str]) -> set[str]:
    """The values between a node and those that are known to be right."""
    found: set[str] = set()
    waiting = list(node.input)
    while waiting:
        name = waiting.pop()
        producer = graph.producer.get(name)
        if producer is not None and name not in known and name not in found:
            found.add(name)
            waiting.extend(producer.input)
    return found


def _is_float(array: Array | None) -> bool:
    return array is not None and array.dtype.kind == "f"


def _error(x: Array | None, right: Array | None) -> float:
    """Relative L2 distance; infinite where shapes or what is not finite differ."""
    if x is None or right is None:
        return 0.0 if x is right else np.inf
    if x.shape != right.shape:
        return np.inf
    if right.dtype.kind != "f":
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
    """All that is different about a node, compared with the one that should be there."""
    changed = [n for n in node.input if n in wrong.initializers and n not in known]
    found = [f"the initialiser {n} has other values" for n in changed if n in right.initializers]
    if twin is None or twin.op_type != node.op_type:
        return "; ".join(found) or (f"{twin.op_type} should be there" if twin is not None else "")
    pairs = itertools.zip_longest(node.input, twin.input, fillvalue="")
    found += [
        f"its input {mine or 'nothing'} should be {theirs or 'nothing'}"
        for mine, theirs in pairs
        if mine != theirs
    ]
    mine, theirs = (
        {a.name: helper.get_attribute_value(a) for a in n.attribute} for n in (node, twin)
    )
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            if isinstance(mine.get(name), onnx.GraphProto):
                found.append(f"its {name} is another one")
            else:
                shown = _shown(mine.get(name)), _shown(theirs.get(name))
                found.append(f"its {name} is {shown[0]}, and should be {shown[1]}")
    return "; ".join(found)


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return (
        f"{value:.7g}" if isinstance(value, float) else "not set" if value is None else str(value)
    )
