"""Builds the nodes that take the place of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attn_export.graph.constants import constant, ints


class Builder:
    """Makes nodes one after another, in front of a node of a graph.

    Args:
        model: Whose graph it is.
        before: The node in front of which they go, and after which they are named.
    """

    def __init__(self, model: ir.Model, before: ir.Node) -> None:
        self._model, self._before = model, before
        self._names = {node.name for node in model.graph}

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """One node with one output, which is returned."""
        return self.several(op_type, inputs, 1, **attributes)[0]

    def several(
        self, op_type: str, inputs: Sequence[ir.Value | None], count: int, **attributes: Any
    ) -> Sequence[ir.Value]:
        """One node with several outputs."""
        node = ir.node(
            op_type, inputs, attributes, num_outputs=count, name=self._fresh(f"/{op_type}")
        )
        for index, output in enumerate(node.outputs):
            output.name = f"{node.name}.{index or 'out'}"
        node.metadata_props.update(self._before.metadata_props)
        self._model.graph.insert_before(self._before, node)
        return node.outputs

    def ints(self, *numbers: int) -> ir.Value:
        """A constant int64 `[n]`."""
        return ints(self._model, *numbers)

    def scalar_int(self, number: int) -> ir.Value:
        """A constant int64 scalar."""
        return constant(self._model, np.array(number, np.int64))

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """A constant scalar of a floating point type."""
        return constant(self._model, np.array(value).astype(dtype.numpy()))

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of an axis, int64 `[1]`: constant where it is known."""
        known = None if value.shape is None else value.shape[axis]
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
    """Let `new` be what `old` was, for its readers; a graph output keeps its name."""
    new.shape, new.dtype = old.shape, old.dtype or new.dtype
    name, is_output = old.name, old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if is_output:
        old.name, new.name = f"{name}_before", name
