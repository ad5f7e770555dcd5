"""Builder of the nodes that replace one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import constant, dims, ints

NAMES = "attn_export.names"
"""The key of a graph's metadata under which the names of its nodes are kept while it is lowered."""


class Builder:
    """Builder of consecutive nodes, in front of a node of a graph.

    Args:
        model: The model that has the graph.
        before: The node in front of which they go, and after which they are named.
    """

    def __init__(self, model: ir.Model, before: ir.Node) -> None:
        self._model, self._before = model, before
        # To collect them for each of thousands of nodes takes longer than all else.
        self._names: set[str] = model.graph.meta.get(NAMES) or {n.name or "" for n in model.graph}
        model.graph.meta[NAMES] = self._names
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
        """Add one node with several outputs, and return them.

        Args:
            op_type: The operator, such as ``"Add"``.
            inputs: Inputs of the node.
            count: The number of outputs.
            domain: The domain of the operator.
            **attributes: Attributes of the node.
        """
        node = ir.node(
            op_type, inputs, attributes, domain=domain, num_outputs=count,
            name=self._fresh(f"/{op_type}"),
        )  # fmt: skip
        for index, output in enumerate(node.outputs):
            output.name = f"{node.name}.{index or 'out'}"
        node.metadata_props.update(self._before.metadata_props)
        if domain:
            self._model.graph.opset_imports.setdefault(domain, 1)
        self._add(node)
        return node.outputs

    def add_if(
        self,
        condition: ir.Value,
        then: Callable[[Builder], Sequence[ir.Value]],
        otherwise: Callable[[Builder], Sequence[ir.Value]],
        dtype: ir.DataType,
    ) -> Sequence[ir.Value]:
        """Add an `If`: the results of `then` if a bool scalar is True, else those of `otherwise`.

        Args:
            condition: The scalar.
            then: Makes the nodes and gives the outputs.
            otherwise: As many outputs.
            dtype: Of all outputs.
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

    def add_loop(
        self,
        count: ir.Value,
        build: Callable[[Builder, ir.Value], ir.Value],
        dtype: ir.DataType,
        axis: int,
    ) -> ir.Value:
        """Add a `Loop`, and return its parts one behind the other.

        Args:
            count: The number of parts, an int64 scalar.
            build: Makes the nodes of a part from its number, an int64 scalar.
            dtype: Of the parts.
            axis: The axis along which they are joined.
        """
        inner, nodes = self._inner()
        sequence_type = ir.SequenceType(ir.TensorType(dtype))
        number, go_on, before = (
            ir.val(inner._fresh(f"/{name}")) for name in ("number", "go_on", "before")
        )
        number.type, number.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
        go_on.type, go_on.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([])
        before.type = sequence_type
        item = build(inner, number)
        item.dtype = dtype
        after, go_on_output = inner("SequenceInsert", before, item), inner("Identity", go_on)
        after.type = sequence_type
        go_on_output.type, go_on_output.shape = go_on.type, go_on.shape
        body = ir.Graph(
            [number, go_on, before],
            [go_on_output, after],
            nodes=nodes,
            name=f"{self._before.name}/body",
        )
        sequence = self("Loop", count, None, self("SequenceEmpty", dtype=int(dtype)), body=body)
        sequence.type = sequence_type
        return self("ConcatFromSequence", sequence, axis=axis)

    def add_scan(
        self,
        values: Sequence[ir.Value],
        build: Callable[[Builder, Sequence[ir.Value]], ir.Value],
        shape: Sequence[int | str],
        dtype: ir.DataType,
    ) -> ir.Value:
        """Add a `Scan` over the first axis, which takes its values apart without a copy.

        Args:
            values: The values, `[B, …]`.
            build: Makes the nodes of a row from the values of that row, `[1, …]`.
            shape: The shape of the result of a row, without the first axis.
            dtype: Its type.

        Returns:
            The results of all rows, `[B, …]`.
        """
        inner, nodes = self._inner()
        rows = [ir.val(inner._fresh(f"/row_{number}")) for number in range(len(values))]
        for row, value in zip(rows, values, strict=True):
            row.type = value.type
        first = self.ints(0)
        result_row = build(inner, [inner("Unsqueeze", row, first) for row in rows])
        result = inner("Squeeze", result_row, first)
        result.type, result.shape = ir.TensorType(dtype), ir.Shape(shape)
        body = ir.Graph(rows, [result], nodes=nodes, name=f"{self._before.name}/rows")
        return self("Scan", *values, body=body, num_scan_inputs=len(values))

    def _inner(self) -> tuple[Builder, list[ir.Node]]:
        """Return a builder of a graph within this one, and the list that its nodes go to."""
        inner, nodes = Builder(self._model, self._before), list[ir.Node]()
        inner._names, inner._add = self._names, nodes.append
        return inner, nodes

    def ints(self, *numbers: int) -> ir.Value:
        """Return a constant int64 `[n]`."""
        return ints(self._model, *numbers)

    def scalar_int(self, number: int, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """Return a constant scalar of an integer type.

        Args:
            number: The number.
            dtype: The data type.
        """
        return constant(self._model, np.array(number, dtype.numpy()))

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """Return a constant scalar of a floating point type.

        Args:
            value: The number.
            dtype: The data type.
        """
        return constant(self._model, np.array(value).astype(dtype.numpy()))

    def array(self, array: np.ndarray) -> ir.Value:
        """Return a constant."""
        return constant(self._model, array)

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """Return the size of an axis, int64 `[1]`: constant if it is known.

        Args:
            value: The value.
            axis: The axis; negative from the end.
        """
        known = dims(value)[axis] if dims(value) else None
        if isinstance(known, int):
            return self.ints(known)
        return self("Shape", value, start=axis, end=axis + 1)

    def _fresh(self, suffix: str) -> str:
        base = name = f"{self._before.name}{suffix}"
        number = 2
        while name in self._names:
            name, number = f"{base}_{number}", number + 1
        self._names.add(name)
        return name


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new` for its readers; a graph output keeps its name.

    Args:
        old: The value to replace.
        new: The value in its place.
    """
    new.shape, new.type = old.shape, old.type or new.type
    name, is_output = old.name, old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if is_output:
        old.name, new.name = f"{name}_before", name
