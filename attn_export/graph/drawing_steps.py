"""Nodes of a graph combined into steps, of which a drawing has few.

A *step* is the nodes of one module (``q_proj/MatMul``, ``q_proj/Add``), or operators in a row that
only move elements.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from attn_export.graph.axis_names import SYMBOL
from attn_export.graph.ir_helpers import dims
from attn_export.graph.requirements import depends_on_contents

MOVES = (
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Cast", "Identity", "Flatten",
    "Split", "Slice",
)  # fmt: skip
"""Operators that change no number."""

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
    """Return the data input: from graph inputs, of the most axes, computed before."""
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
    return module or ("moves" if node.op_type in MOVES else str(node.name))


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
        if value is not None and value not in made and value is not main and _is_worth(value)
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


def _is_worth(value: ir.Value) -> bool:
    """Return whether a step names a further input: not for weights, constants and sizes."""
    return value.is_graph_input() or (not _is_constant(value) and len(dims(value)) > 1)


def _called(value: ir.Value) -> str:
    """Return the name of an input or of weights; else the operator that makes it, as ``Cos``."""
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
        SYMBOL.sub(lambda found: SHORT.get(found[0], found[0]), axis_name(d)) for d in dims(value)
    )
    return f"[{', '.join(letters)}]".replace(" + ", "+")
