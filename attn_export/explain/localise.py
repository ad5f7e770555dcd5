"""Search for the first node whose output is wrong. Its line is added in `fault_attribution`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from attn_export.explain.eager_values import distance
from attn_export.explain.explanation import Deviation, Lines
from attn_export.explain.graph_run import GraphRun, GraphRunner
from attn_export.float64.evaluate import Evaluation, NotComputedError, Values, is_float
from attn_export.graph.load import load_model
from attn_export.measures import measure
from attn_export.tensorfile import Array

GRAPHS_AGREE = 1e-9
"""The largest relative distance at which values of two graphs, both in float64, are equal."""

_MIN_TOLERANCE_EPS = 64
"""The relative error up to which a node is never wrong, in eps of float32."""

_MAX_UNMATCHED = 4
"""If at most this many values before a wrong node do not agree, the first node that the right graph
does not have is named in its place."""

_MIN_SHARED = 0.6
"""The least share of values that must occur in right graphs, too. Below it the graph may compute
the same outputs in another way."""

_MAX_FOREIGN_NAMES = 0.5
"""The largest share of value names that the right graph may lack. Above it another exporter chose
the names, so that a node without a counterpart proves nothing."""


def first_difference(
    wrong: Evaluation, wrong_values: Values, right: Evaluation, right_values: Values
) -> tuple[str, Deviation] | None:
    """Return the first difference between two graphs whose values share names, and its value.

    With the right value in its place, the outputs are right, or nearer to it: graphs of two
    dialects may give one name to different things.
    """
    agreeing = {
        name
        for name in wrong_values
        if name in right_values
        and value_error(wrong_values[name], right_values[name]) <= GRAPHS_AGREE
    }
    for node in wrong.nodes:
        for name in node.output:
            if name not in right_values or name in agreeing:
                continue
            if _corrects(name, wrong, wrong_values, right_values):
                error = value_error(wrong_values[name], right_values[name])
                deviation = _deviation(node, name, error, wrong, right, agreeing)
                return None if deviation is None else (name, deviation)
    return None


def _corrects(name: str, wrong: Evaluation, wrong_values: Values, right_values: Values) -> bool:
    """Return whether outputs come nearer to the right ones if a value is the right one."""
    value = right_values[name]
    if value is None:
        return False
    try:
        corrected = wrong.recompute(wrong_values, {name: value})
    except NotComputedError:
        return False
    pairs = [
        tuple(value_error(v[n], right_values.get(n)) for v in (wrong_values, corrected))
        for n in wrong.outputs
    ]
    is_worse = any(after > max(before, GRAPHS_AGREE) for before, after in pairs)
    return not is_worse and any(after < before for before, after in pairs)


def first_value_in_no_right_graph(
    wrong: Evaluation, cases: Sequence[tuple[Values, Sequence[Values]]]
) -> Deviation | None:
    """Return the first node whose value occurs in no right graph; names are ignored.

    Return None if there is none, or if the right graphs have too few of the values to tell.
    """
    compared = {
        name
        for name in wrong.producer
        if all(_is_comparable(wrong_values.get(name)) for wrong_values, _ in cases)
    }
    right = {
        name
        for name in compared
        if all(_is_in_any(wrong_values[name], right_values) for wrong_values, right_values in cases)
    }
    for node in reversed(wrong.nodes):  # the inputs of a right node are right
        compared_outputs = [name for name in node.output if name in compared]
        if compared_outputs and right.issuperset(compared_outputs):
            right.update(node.input)
    if len(right.intersection(compared)) < _MIN_SHARED * len(compared):
        return None
    for node in wrong.nodes:
        for name in node.output:
            if name in compared and name not in right:
                says = "this value occurs in no right graph"
                return Deviation(node.name, node.op_type, name, "", np.inf, says)
    return None


def _is_comparable(value: object) -> bool:
    """Return whether a value is a floating or bool tensor; integers are the same in every graph."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "fb"


def _is_in_any(value: Array | None, others: Sequence[Values]) -> bool:
    arrays = (array for values in others for array in values.values())
    return any(isinstance(a, np.ndarray) and value_error(value, a) <= GRAPHS_AGREE for a in arrays)


def _deviation(
    node: onnx.NodeProto,
    name: str,
    error: float,
    wrong: Evaluation,
    right: Evaluation,
    agreeing: set[str],
) -> Deviation | None:
    """Describe a wrong node, or one before it that the right graph lacks; None if it is unclear."""
    unmatched, counterpart = _unmatched(node, wrong, agreeing), right.producer.get(name)
    unknown_names = sum(name not in right.producer for name in wrong.producer)
    if len(unmatched) > _MAX_UNMATCHED and unknown_names > _MAX_FOREIGN_NAMES * len(wrong.producer):
        return None
    between = [n for n in wrong.nodes if n is node or not unmatched.isdisjoint(n.output)]
    if len(between) > 1 and counterpart is not None:
        there = {name, *_unmatched(counterpart, right, agreeing)}
        if any(_lacks(wrong, right.producer[value]) for value in there):
            # Of another dialect: that the right graph has no such node proves nothing.
            among = [n.name or n.output[0] for n in between]
            shown = ", ".join(among[:_MAX_UNMATCHED]) + (", …" if among[_MAX_UNMATCHED:] else "")
            says = f"{shown} compute it from right values, and the right graph by other nodes"
            return Deviation(node.name, node.op_type, name, "", error, says, among=tuple(among))
    unknown_nodes = (n for n in between if _lacks(right, n))
    first = next(unknown_nodes, node)
    if first is not node and len(unmatched) <= _MAX_UNMATCHED:
        differences = [f"{NO_SUCH_NODE} before {node.op_type} {node.name}"]
        differences += [f"there {change}" for change in attribute_differences(node, counterpart)]
    else:
        differences = _differences(node, wrong, right, counterpart, agreeing)
        if first is not node:
            differences.append(f"{len(unmatched)} values before it are not in the right graph")
            first = node
    says = "; ".join(differences)
    return Deviation(first.name, first.op_type, first.output[0], "", error, says)


def _lacks(graph: Evaluation, node: onnx.NodeProto) -> bool:
    """Return whether a graph has no node of this operator and name."""
    return all((n.op_type, n.name) != (node.op_type, node.name) for n in graph.nodes)


def first_runtime_deviation(
    evaluation: Evaluation, reference: Values, rounded: Values, actual: Mapping[str, Array]
) -> Deviation | None:
    """Return the first node whose output in a runtime differs from float64 by more than rounding.

    `reference`: Its values in float64.
    `rounded`: Its values in float64, each rounded to the graph's own type.
    """
    least = _MIN_TOLERANCE_EPS * float(np.finfo(np.float32).eps)
    for node in evaluation.nodes:
        for name in node.output:
            right = reference.get(name)
            if name not in actual or right is None:
                continue
            error = value_error(actual[name], right)
            if error > max(8 * value_error(rounded.get(name), right), least):
                return Deviation(node.name, node.op_type, name, "", error, "")
    return None


def write_with_all_outputs(path: Path, values: Values, target: Path) -> None:
    """Write a copy of a graph that has every value as an output."""
    model = load_model(path)
    graph = model.graph
    float_dtype = next(
        (i.type.tensor_type.elem_type for i in graph.input if is_float(values.get(i.name))),
        onnx.TensorProto.FLOAT,
    )
    declared = {output.name for output in graph.output}
    for node in graph.node:
        for name in node.output:
            array = values.get(name)
            if name and isinstance(array, np.ndarray) and name not in declared:
                dtype = (
                    float_dtype if is_float(array) else helper.np_dtype_to_tensor_dtype(array.dtype)
                )
                graph.output.append(helper.make_tensor_value_info(name, dtype, None))
    onnx.save(model, target)


def _unmatched(node: onnx.NodeProto, graph: Evaluation, agreeing: set[str]) -> set[str]:
    """Return the names of values between agreeing values and a node."""
    unmatched: set[str] = set()
    waiting = list(node.input)
    while waiting:
        name = waiting.pop()
        producer = graph.producer.get(name)
        if producer is not None and name not in agreeing and name not in unmatched:
            unmatched.add(name)
            waiting.extend(producer.input)
    return unmatched


def value_error(x: object, right: object) -> float:
    """Return the relative L2 distance; infinite if shapes or non-finite values differ."""
    if x is None or right is None:
        return 0.0 if x is right else np.inf
    if not (isinstance(x, np.ndarray) and isinstance(right, np.ndarray)):
        return 0.0  # a sequence: the tensors computed from it are compared
    if x.shape != right.shape:
        return np.inf
    whole = distance(x, right)
    return max(whole, measure(x, right).row) if math.isfinite(whole) else whole


def _differences(
    node: onnx.NodeProto,
    wrong: Evaluation,
    right: Evaluation,
    counterpart: onnx.NodeProto | None,
    agreeing: set[str],
) -> list[str]:
    """Describe all differences between a node and its counterpart in the right graph."""
    initializers = [
        f"the initialiser {name} has other values"
        for name in node.input
        if name in wrong.initializers and name in right.initializers and name not in agreeing
    ]
    if counterpart is not None and counterpart.op_type == node.op_type:
        return [
            *initializers,
            *input_differences(node, counterpart),
            *attribute_differences(node, counterpart),
        ]
    if initializers or counterpart is None:
        return initializers
    if counterpart.name == node.name:
        return [f"it is {node.op_type}, and should be {counterpart.op_type}"]
    is_elsewhere = counterpart.name in {n.name for n in wrong.nodes}
    return [NO_SUCH_NODE if is_elsewhere else f"it should be {counterpart.op_type}"]


# -- differences of a node from the node of the same name in a right graph ----------------------

NO_SUCH_NODE = "the right graph has no such node"

MOST_CASES = 3
"""The largest number of failing cases in which the right graph is run."""


def changed_node(
    suspect: GraphRunner, bundled: Sequence[GraphRunner], trial: GraphRun, lines: Lines
) -> Deviation | None:
    """Return the first node that the bundle's graph has not, for a graph without a float64 run.

    Return None unless the bundle's graph with most of its nodes passes the cases in this runtime.
    """
    graph = load_model(suspect.path).graph
    names = {node.name for node in graph.node}
    others = [
        (len(names.intersection(node.name for node in right.node)), other, right)
        for other in bundled
        if other.path != suspect.path
        for right in [load_model(other.path).graph]
    ]
    most, other, right = max(others, key=lambda entry: entry[0], default=(0, None, None))
    if other is None or right is None or 2 * most < len(names):
        return None
    changed = _first_changed_node(graph, right)
    if changed is None or not other.trial(trial.failed[:MOST_CASES]).all_passed:
        return None
    node, says = changed
    line = lines.get(node.name, "")
    return Deviation(node.name, node.op_type, node.output[0], line, math.inf, says)


def _first_changed_node(
    graph: onnx.GraphProto, right: onnx.GraphProto
) -> tuple[onnx.NodeProto, str] | None:
    """Return the first node that the right graph has not, or not so, and its differences."""
    counterparts = {node.name: node for node in right.node}
    for node in graph.node:
        counterpart = counterparts.get(node.name)
        if counterpart is None:
            return node, NO_SUCH_NODE
        if node.op_type != counterpart.op_type:
            return node, f"it is {node.op_type}, and should be {counterpart.op_type}"
        changed = [
            *input_differences(node, counterpart),
            *attribute_differences(node, counterpart),
        ]
        if changed:
            return node, "; ".join(changed)
    return None


def input_differences(node: onnx.NodeProto, counterpart: onnx.NodeProto) -> list[str]:
    """Return sentences on the inputs of a node that differ by name."""
    pairs = itertools.zip_longest(node.input, counterpart.input, fillvalue="")
    return [
        f"its input {name or 'nothing'} should be {right_name or 'nothing'}"
        for name, right_name in pairs
        if name != right_name
    ]


def attribute_differences(node: onnx.NodeProto, counterpart: onnx.NodeProto | None) -> list[str]:
    """Return sentences on the attributes of a node that differ, subgraphs included."""
    if counterpart is None or counterpart.op_type != node.op_type:
        return []
    differences = []
    attributes, right_attributes = (
        {a.name: helper.get_attribute_value(a) for a in n.attribute} for n in (node, counterpart)
    )
    for name in sorted(attributes.keys() | right_attributes.keys()):
        value, right_value = attributes.get(name), right_attributes.get(name)
        if value == right_value:
            continue
        if isinstance(value, onnx.GraphProto) and isinstance(right_value, onnx.GraphProto):
            changed = _first_changed_node(value, right_value)
            where = f": {changed[0].op_type} {changed[0].name}: {changed[1]}" if changed else ""
            differences.append(f"its {name} differs{where}")
        else:
            differences.append(
                f"its {name} is {_format(value)}, and should be {_format(right_value)}"
            )
    return differences


def _format(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float):
        return f"{value:.7g}"
    return "not set" if value is None else str(value)
