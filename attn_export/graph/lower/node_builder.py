"""Builder of the nodes that replace a node of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import constant, dims, ints

_NAMES = "attn_export.names"
"""The key in `Graph.meta` of the set of node names, which is kept while a graph is lowered."""


class Builder:
    """Builder of consecutive nodes, which are inserted before an existing node."""

    def __init__(self, model: ir.Model, before: ir.Node) -> None:
        self.model: ir.Model = model
        self._before = before
        # Collected once per graph: with thousands of nodes it takes longer than all else.
        self._names: set[str] = model.graph.meta.get(_NAMES) or {n.name or "" for n in model.graph}
        model.graph.meta[_NAMES] = self._names
        self.graph: ir.Graph | None = before.graph
        self._add: Callable[[ir.Node], None] = lambda node: model.graph.insert_before(before, node)

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Add one node with one output, and return the output."""
        return self.add_node(op_type, inputs, 1, **attributes)[0]

    def add_node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        count: int,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """Return the outputs of one new node."""
        node = ir.node(
            op_type, inputs, attributes, domain=domain, num_outputs=count,
            name=self._fresh(f"/{op_type}"),
        )  # fmt: skip
        for index, output in enumerate(node.outputs):
            output.name = f"{node.name}.{index or 'out'}"
        node.metadata_props.update(self._before.metadata_props)
        if domain:
            self.model.graph.opset_imports.setdefault(domain, 1)
        self._add(node)
        return node.outputs

    def copy_node(
        self, node: ir.Node, replacements: Mapping[ir.Value, ir.Value], count: int | None = None
    ) -> Sequence[ir.Value]:
        """Return the outputs of a new copy of a node."""
        inputs = [None if x is None else replacements.get(x, x) for x in node.inputs]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        count = len(node.outputs) if count is None else count
        return self.add_node(node.op_type, inputs, count, node.domain, **attributes)

    def add_if(
        self,
        condition: ir.Value,
        then: Callable[[Builder], Sequence[ir.Value]],
        otherwise: Callable[[Builder], Sequence[ir.Value]],
        dtype: ir.DataType,
    ) -> Sequence[ir.Value]:
        """Return the outputs of a new `If`, those of the branch that runs.

        `condition`: A bool scalar.
        """
        branches: dict[str, Any] = {}
        count = 0
        for name, build in (("then_branch", then), ("else_branch", otherwise)):
            inner, nodes = self._inner()
            outputs = build(inner)
            count = len(outputs)
            for output in outputs:
                output.dtype = dtype
            branches[name] = ir.Graph([], outputs, nodes=nodes, name=f"{self._before.name}/{name}")
        return self.add_node("If", [condition], count, **branches)

    def add_recurrence(
        self,
        state: ir.Value,
        values: Sequence[ir.Value],
        build: Callable[[Builder, ir.Value, Sequence[ir.Value]], Sequence[ir.Value]],
        types: Sequence[ir.TypeAndShape],
    ) -> Sequence[ir.Value]:
        """Return the last state and the results of a new `Scan` over axis 0 of the values.

        `state`: The state before the first.
        `build`: Builds the nodes that make a state and a result of the state before and one slice
            of each value.
        `types`: Those of the state, and of the slices, within.
        """
        inner, nodes = self._inner()
        within = [ir.val(inner._fresh(f"/slice_{number}")) for number in range(len(types))]
        for value, described in zip(within, types, strict=True):
            value.type, value.shape = described.type, described.shape
        after, result = build(inner, within[0], within[1:])
        after.type, after.shape = types[0].type, types[0].shape
        result.type = types[0].type
        body = ir.Graph(within, [after, result], nodes=nodes, name=f"{self._before.name}/tokens")
        return self.add_node("Scan", [state, *values], 2, body=body, num_scan_inputs=len(values))

    def _inner(self) -> tuple[Builder, list[ir.Node]]:
        """Return a builder of a subgraph, and the list to which it adds nodes."""
        inner, nodes = Builder(self.model, self._before), list[ir.Node]()
        inner._names, inner._add = self._names, nodes.append
        return inner, nodes

    def ints(self, *numbers: int) -> ir.Value:
        """Return a constant int64 vector, `[n]`."""
        return ints(self.model, *numbers)

    def scalar(self, number: float, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """Return a constant scalar."""
        return constant(self.model, np.array(number).astype(dtype.numpy()))

    def array(self, array: np.ndarray) -> ir.Value:
        """Return a constant of the shape and dtype of an array."""
        return constant(self.model, array)

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """Return the size of an axis, int64 `[1]`; a constant if it is known."""
        known = dims(value)[axis] if dims(value) else None
        if isinstance(known, int):
            return self.ints(known)
        end = {} if axis == -1 else {"end": axis + 1}
        return self("Shape", value, start=axis, **end)

    def _fresh(self, suffix: str) -> str:
        base = name = f"{self._before.name}{suffix}"
        number = 2
        while name in self._names:
            name, number = f"{base}_{number}", number + 1
        self._names.add(name)
        return name


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new` for all readers; a graph output keeps its name."""
    new.shape, new.type = old.shape, old.type or new.type
    name, is_output = old.name, old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if is_output:
        old.name, new.name = f"{name}_before", name
