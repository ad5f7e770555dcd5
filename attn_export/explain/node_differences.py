"""Differences of a node from the node of the same name in a right graph, in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import onnx
from onnx import helper

from attn_export.explain.explanation import Deviation, Lines
from attn_export.explain.graph_run import GraphRun, GraphRunner
from attn_export.graph.load import load_model

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
