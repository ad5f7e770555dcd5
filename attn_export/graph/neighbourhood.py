"""Surroundings of the first `Attention` node of a graph, in few steps, for a drawing.

A *lane* leads from a graph input to one input of the node, or from one of its outputs to a graph
output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from attn_export.graph.drawing_steps import (
    REST,
    SHORT,
    Step,
    axis_name,
    end_step,
    in_steps,
    main_input,
)
from attn_export.graph.ir_helpers import dims
from attn_export.graph.requirements import ATTENTION

INPUTS = (
    "query", "key", "value", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen",
)  # fmt: skip
OUTPUTS = ("output", "present_key", "present_value", "attn_weights")
"""Inputs and outputs of ai.onnx `Attention`, https://onnx.ai/onnx/operators/onnx__Attention.html."""

STEPS, AFTER = 6, 3
"""The most steps of a lane, before and after the node: beyond them is the rest of a model."""

NODES = 60
"""The most nodes of a lane."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """Steps from top to bottom.

    Attributes:
        role: The operator's name for this input or output.
        steps: The first or the last is an end of the graph, if it is near enough.
    """

    role: str
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """An `Attention` node with its sources and its readers.

    Attributes:
        name: Of the node.
        count: The number of such nodes in the graph.
        facts: Its attributes, where they are not the default: ``"causal"``.
        axes: By letter, the axes that shapes name with it.
        before: A lane for each input that is given.
        after: A lane for each output that is used.
    """

    name: str
    count: int
    facts: tuple[str, ...]
    axes: dict[str, str]
    before: tuple[Lane, ...]
    after: tuple[Lane, ...]


def neighbourhood(model: ir.Model) -> Neighbourhood | None:
    """Return the surroundings of the first `Attention` node; None if there is none."""
    nodes = [node for node in model.graph if node.op_type == ATTENTION and not node.domain]
    if not nodes:
        return None
    node = nodes[0]
    before = [
        Lane(role, _upwards(value))
        for role, value in zip(INPUTS, node.inputs, strict=False)
        if value is not None
    ]
    after = [
        Lane(role, _downwards(value))
        for role, value in zip(OUTPUTS, node.outputs, strict=False)
        if value.uses() or value.is_graph_output()
    ]
    axes = {
        SHORT[name]: name
        for value in (*model.graph.inputs, *model.graph.outputs)
        for name in map(axis_name, dims(value))
        if name in SHORT
    }
    return Neighbourhood(
        str(node.name), len(nodes), tuple(_facts(node)), axes, tuple(before), tuple(after)
    )


def read_neighbourhood(path: Path | None) -> Neighbourhood | None:
    """Return the surroundings in an ONNX file; None without a file or an `Attention` node.

    Raises:
        GraphError: If the file cannot be read.
    """
    from attn_export.graph.load import load_graph

    return neighbourhood(load_graph(path)) if path is not None and path.is_file() else None


def _facts(node: ir.Node) -> Iterator[str]:
    for name, attribute in node.attributes.items():
        value = attribute.value
        if name == "is_causal" and value:
            yield "causal"
        elif name in ("scale", "softcap", "q_num_heads", "kv_num_heads") and value:
            yield f"{name} {value:.4g}"


# -- lanes ------------------------------------------------------------------------------------


def _upwards(value: ir.Value) -> tuple[Step, ...]:
    """Return the steps from a graph input down to `value`."""
    path: list[ir.Node] = []
    at: ir.Value | None = value
    while at is not None and (node := at.producer()) is not None:
        if node.op_type == ATTENTION or len(path) == NODES:
            return (REST, *in_steps(path[::-1])[-STEPS:])
        path.append(node)
        at = main_input(node)
    steps = in_steps(path[::-1])
    if len(steps) > STEPS:
        return (REST, *steps[-STEPS:])
    return tuple(steps) if at is None else (end_step("input", at), *steps)


def _downwards(value: ir.Value) -> tuple[Step, ...]:
    """Return the steps from `value` down to a graph output."""
    path: list[ir.Node] = []
    at = value
    while not at.is_graph_output():
        user = next((use.node for use in at.uses() if use.node.op_type != ATTENTION), None)
        if user is None or len(path) == NODES:
            break
        path.append(user)
        at = user.outputs[0]
    steps = in_steps(path)
    if not at.is_graph_output() or len(steps) > AFTER:
        return (*steps[:AFTER], REST)
    return (*steps, end_step("output", at))
