"""Neighbourhood of the first `Attention` node of a graph, in few steps, for a drawing.

A *lane* leads from a graph input to one input of the node, or from one of its outputs to a graph
output.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from attn_export.graph.axis_names import SYMBOL, size_text
from attn_export.graph.ir_helpers import dims, nodes_of
from attn_export.graph.requirements import ATTENTION, depends_on_contents

# -- steps of the drawing -----------------------------------------------------------------------

# A *step* is the nodes of one module (``q_proj/MatMul``, ``q_proj/Add``), or operators in a row
# that only move elements.

MOVES = (
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Cast", "Identity", "Flatten",
    "Split", "Slice",
)  # fmt: skip
"""Operators that move, select or convert elements, and compute nothing."""

SHORT = {
    "batch": "B", "query_len": "L", "key_len": "S", "total_len": "S", "past_len": "P",
    "capacity": "C",
}  # fmt: skip
"""Letters for the axes of attn-export's own graphs, as in the literature."""


@dataclasses.dataclass(frozen=True)
class DrawnStep:
    """Box of the drawing: a group of nodes, or a graph input or output.

    Attributes:
        kind: ``"input"``, ``"output"`` or ``"nodes"``; ``"rest"`` for a part that is not drawn.
        name: The name of the module or value, or the operators.
        operators: The operators in order; empty for inputs and outputs.
        shape: The shape of the output, such as ``[B, 8, L, 64]``; "" if it is not known.
        beside: Further values that it reads, without constants and sizes.
    """

    kind: str
    name: str
    operators: tuple[str, ...] = ()
    shape: str = ""
    beside: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


REST = DrawnStep("rest", "and more")
"""The step that stands for all steps that are not drawn."""


def _group_steps(path: list[ir.Node]) -> list[DrawnStep]:
    """Combine consecutive nodes into steps."""
    return [_step(list(nodes)) for _, nodes in itertools.groupby(path, _group)]


def _main_input(node: ir.Node) -> ir.Value | None:
    """Return the input that carries the data.

    Values that depend on graph inputs take precedence, then those with more axes, then computed
    ones.
    """
    values = [value for value in node.inputs if value is not None and not _is_constant(value)]
    return max(
        values,
        key=lambda value: (depends_on_contents(value), _rank(value), value.producer() is not None),
        default=None,
    )


def _group(node: ir.Node) -> str:
    module = str(node.name).rpartition("/")[0]
    return module or ("moves" if node.op_type in MOVES else str(node.name))


def _step(nodes: list[ir.Node]) -> DrawnStep:
    main = _main_input(nodes[0])
    module = str(nodes[0].name).rpartition("/")[0]
    members = _members(nodes, main, module) if module else nodes
    made = {value for node in members for value in node.outputs}
    operators = tuple(dict.fromkeys(node.op_type for node in members))
    beside = dict.fromkeys(
        _display_name(value)
        for node in members
        for value in node.inputs
        if value is not None and value not in made and value is not main and _is_worth_naming(value)
    )
    return DrawnStep(
        "nodes",
        module.rpartition("/")[2] or ", ".join(operators),
        operators if module else (),
        _shape(nodes[-1].outputs[0]),
        tuple(beside),
        tuple(str(v.name) for n in members for v in n.outputs if v.is_graph_output()),
        tuple(str(node.name) for node in members),
    )


def _members(nodes: list[ir.Node], main: ir.Value | None, module: str) -> list[ir.Node]:
    """Return the nodes of a module after the producer of `main`, up to `nodes`, in graph order."""
    order = {node: number for number, node in enumerate(nodes[0].graph or nodes)}
    source = main.producer() if main is not None else None
    first = -1 if source is None else order.get(source, -1)
    members, new = set(nodes), list(nodes)
    while new:
        for value in new.pop().inputs:
            node = value.producer() if value is not None else None
            if node is None or node in members or _group(node) != module:
                continue
            if order.get(node, -1) > first:
                members.add(node)
                new.append(node)
    return sorted(members, key=order.__getitem__)


def _is_worth_naming(value: ir.Value) -> bool:
    """Return whether a step lists a further input; not weights, constants and sizes."""
    return value.is_graph_input() or (not _is_constant(value) and len(dims(value)) > 1)


def _display_name(value: ir.Value) -> str:
    """Return the name of an input or weight, or the operator that computes a value (``Cos``)."""
    while (node := value.producer()) is not None:
        first = node.inputs[0] if node.inputs else None
        sources = [v for v in node.inputs if v is not None and not _is_constant(v)]
        if node.op_type in MOVES and first is not None:
            value = first
        elif node.op_type == "Mul" and len(sources) == 1:
            value = sources[0]
        else:
            return node.op_type
    return str(value.name)


def _is_constant(value: ir.Value) -> bool:
    node = value.producer()
    return value.is_initializer() or (node is not None and node.op_type == "Constant")


def _rank(value: ir.Value) -> int:
    return 2 if value.shape is None else len(value.shape)


def _shape(value: ir.Value) -> str:
    if value.shape is None:
        return ""
    letters = (
        SYMBOL.sub(lambda match: SHORT.get(match[0], match[0]), size_text(d)) for d in dims(value)
    )
    return f"[{', '.join(letters)}]".replace(" + ", "+")


# -- the neighbourhood of attention -------------------------------------------------------------

INPUTS = (
    "query", "key", "value", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen",
)  # fmt: skip
OUTPUTS = ("output", "present_key", "present_value", "attn_weights")
"""Inputs and outputs of ai.onnx `Attention`, https://onnx.ai/onnx/operators/onnx__Attention.html."""

STEPS, AFTER = 6, 3
"""The largest number of steps of a lane before and after the node."""

NODES = 60
"""The largest number of nodes of a lane."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """Path of steps to an input of the node, or from an output.

    Attributes:
        role: The operator's name for this input or output.
        steps: The steps in the direction of the data. An outer one is a graph input or output, or
            `REST` if that is too far away.
    """

    role: str
    steps: tuple[DrawnStep, ...]


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """An `Attention` node with the steps before and after it.

    Attributes:
        count: The number of `Attention` nodes in the graph.
        facts: The attributes that are set, in words: ``"causal"``.
        axes: The axis names that the letters in shapes stand for, by letter.
        before: A lane for each input that is set.
        after: A lane for each output that is read.
    """

    name: str
    count: int
    facts: tuple[str, ...]
    axes: dict[str, str]
    before: tuple[Lane, ...]
    after: tuple[Lane, ...]


def neighbourhood(model: ir.Model) -> Neighbourhood | None:
    """Describe the first `Attention` node and its surroundings; None if there is no such node."""
    nodes = nodes_of(model, ATTENTION)
    if not nodes:
        return None
    node = nodes[0]
    before = [
        Lane(role, _steps_before(value))
        for role, value in zip(INPUTS, node.inputs, strict=False)
        if value is not None
    ]
    after = [
        Lane(role, _steps_after(value))
        for role, value in zip(OUTPUTS, node.outputs, strict=False)
        if value.uses() or value.is_graph_output()
    ]
    axes = {
        SHORT[name]: name
        for value in (*model.graph.inputs, *model.graph.outputs)
        for name in map(size_text, dims(value))
        if name in SHORT
    }
    return Neighbourhood(
        str(node.name), len(nodes), tuple(_facts(node)), axes, tuple(before), tuple(after)
    )


def read_neighbourhood(path: Path | None) -> Neighbourhood | None:
    """Read an ONNX file, and describe its first `Attention` node; None without a file or node."""
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


def _steps_before(value: ir.Value) -> tuple[DrawnStep, ...]:
    """Return the steps from a graph input to `value`."""
    path: list[ir.Node] = []
    current: ir.Value | None = value
    while current is not None and (node := current.producer()) is not None:
        if node.op_type == ATTENTION or len(path) == NODES:
            return (REST, *_group_steps(path[::-1])[-STEPS:])
        path.append(node)
        current = _main_input(node)
    steps = _group_steps(path[::-1])
    if len(steps) > STEPS:
        return (REST, *steps[-STEPS:])
    return (
        tuple(steps)
        if current is None
        else (DrawnStep("input", str(current.name), shape=_shape(current)), *steps)
    )


def _steps_after(value: ir.Value) -> tuple[DrawnStep, ...]:
    """Return the steps from `value` to a graph output."""
    path: list[ir.Node] = []
    current = value
    while not current.is_graph_output():
        user = next((use.node for use in current.uses() if use.node.op_type != ATTENTION), None)
        if user is None or len(path) == NODES:
            break
        path.append(user)
        current = user.outputs[0]
    steps = _group_steps(path)
    if not current.is_graph_output() or len(steps) > AFTER:
        return (*steps[:AFTER], REST)
    return (*steps, DrawnStep("output", str(current.name), shape=_shape(current)))
