"""Surroundings of the first `Attention` node of a graph, in few steps, for a drawing.

A *lane* leads from a graph input to one input of the node, or from one of its outputs to a graph
output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from attn_export.graph.axis_names import SYMBOL
from attn_export.graph.ir_helpers import dims
from attn_export.graph.requirements import ATTENTION, depends_on_contents

# -- steps of the drawing -----------------------------------------------------------------------

# A *step* is the nodes of one module (``q_proj/MatMul``, ``q_proj/Add``), or operators in a row
# that only move elements.

LAYOUT_OPERATORS = (
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Cast", "Identity", "Flatten",
    "Split", "Slice",
)  # fmt: skip
"""Operators that move, select or convert elements, and compute nothing."""

SHORT = {
    "batch": "B", "query_len": "L", "key_len": "S", "total_len": "S", "past_len": "P",
    "capacity": "C",
}  # fmt: skip
"""The letters of the literature for the axes of our own graphs."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Nodes that are drawn as one, or a graph input or output.

    Attributes:
        kind: ``"input"``, ``"output"``, ``"nodes"``; ``"rest"`` where there is more of the graph.
        name: Of the module, the operators or the value.
        operators: In order; empty for inputs and outputs.
        shape: Of what comes out, as ``[B, 8, L, 64]``; empty where it is not known.
        beside: Other values that it takes, but for constants and sizes.
        gives: Graph outputs that it makes.
        nodes: The nodes' names.
    """

    kind: str
    name: str
    operators: tuple[str, ...] = ()
    shape: str = ""
    beside: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


REST = Step("rest", "and more")
"""The step that stands for those that are not drawn."""


def in_steps(path: list[ir.Node]) -> list[Step]:
    """Combine consecutive nodes into steps."""
    groups: list[list[ir.Node]] = []
    for node in path:
        if groups and _group(groups[-1][-1]) == _group(node):
            groups[-1].append(node)
        else:
            groups.append([node])
    return [_step(group) for group in groups]


def main_input(node: ir.Node) -> ir.Value | None:
    """Return the input with the data.

    It is one that depends on graph inputs, then one of the most axes, then a computed one.
    """
    values = [value for value in node.inputs if value is not None and not _is_constant(value)]
    return max(
        values,
        key=lambda value: (depends_on_contents(value), _rank(value), value.producer() is not None),
        default=None,
    )


def end_step(kind: str, value: ir.Value) -> Step:
    """Return the step of a graph input or output.

    Args:
        kind: Input or output.
        value: The value.
    """
    return Step(kind, str(value.name), shape=_shape(value))


def axis_name(dim: int | ir.SymbolicDim) -> str:
    """Return a size, or the name of a dynamic axis."""
    return str(dim.value if isinstance(dim, ir.SymbolicDim) else dim)


def _group(node: ir.Node) -> str:
    module = str(node.name).rpartition("/")[0]
    return module or ("moves" if node.op_type in LAYOUT_OPERATORS else str(node.name))


def _step(nodes: list[ir.Node]) -> Step:
    main = main_input(nodes[0])
    module = str(nodes[0].name).rpartition("/")[0]
    members = _members(nodes, main, module) if module else nodes
    made = {value for node in members for value in node.outputs}
    operators = tuple(dict.fromkeys(node.op_type for node in members))
    beside = dict.fromkeys(
        _called(value)
        for node in members
        for value in node.inputs
        if value is not None and value not in made and value is not main and _is_worth_naming(value)
    )
    return Step(
        "nodes",
        module.rpartition("/")[2] or ", ".join(operators),
        operators if module else (),
        _shape(nodes[-1].outputs[0]),
        tuple(beside),
        tuple(str(v.name) for n in members for v in n.outputs if v.is_graph_output()),
        tuple(str(node.name) for node in members),
    )


def _members(nodes: list[ir.Node], main: ir.Value | None, module: str) -> list[ir.Node]:
    """Return a module's nodes between `main` and `nodes`, in the graph's order."""
    order = {node: number for number, node in enumerate(nodes[0].graph or nodes)}
    source = main.producer() if main is not None else None
    first = -1 if source is None else order.get(source, -1)
    found, new = set(nodes), list(nodes)
    while new:
        for value in new.pop().inputs:
            node = value.producer() if value is not None else None
            if node is None or node in found or _group(node) != module:
                continue
            if order.get(node, -1) > first:
                found.add(node)
                new.append(node)
    return sorted(found, key=order.__getitem__)


def _is_worth_naming(value: ir.Value) -> bool:
    """Return whether a step names a further input: not for weights, constants and sizes."""
    return value.is_graph_input() or (not _is_constant(value) and len(dims(value)) > 1)


def _called(value: ir.Value) -> str:
    """Return the name of an input or of weights; else the operator that makes it, as ``Cos``."""
    while (node := value.producer()) is not None:
        first = node.inputs[0] if node.inputs else None
        sources = [v for v in node.inputs if v is not None and not _is_constant(v)]
        if node.op_type in LAYOUT_OPERATORS and first is not None:
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
        SYMBOL.sub(lambda found: SHORT.get(found[0], found[0]), axis_name(d)) for d in dims(value)
    )
    return f"[{', '.join(letters)}]".replace(" + ", "+")


# -- the neighbourhood of attention -------------------------------------------------------------

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
