"""Builds the nodes that take the place of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attn_export.graph.constants import constant_name


class Builder:
    """Makes nodes one after another, in front of a node of a graph.

    Args:
        model: Whose graph it is.
        before: The node in front of which they go, and after which they are named.
    """

    def __init__(self, model: ir.Model, before: ir.Node) -> None:
        self._model, self._before = model, before

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
        return self._constant(np.array(numbers, np.int64))

    def scalar_int(self, number: int) -> ir.Value:
        """A constant int64 scalar."""
        return self._constant(np.array(number, np.int64))

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """A constant scalar of a floating point type."""
        return self._constant(np.array(value).astype(dtype.numpy()))

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of an axis, int64 `[1]`: constant where it is known."""
        known = None if value.shape is None else value.shape[axis]
        if isinstance(known, int):
            return self.ints(known)
        return self("Shape", value, start=axis, end=axis + 1)

    def _constant(self, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array)
        name, known = constant_name(tensor), self._model.graph.initializers
        # Names have six digits: other values of one name get names of their own.
        while name in known:
            held = known[name].const_value
            if held is not None and held.numpy().tobytes() == array.tobytes():
                return known[name]
            name += "_"
        tensor.name = name
        value = ir.val(name, const_value=tensor)
        self._model.graph.register_initializer(value)
        return value

    def _fresh(self, suffix: str) -> str:
        names = {node.name for node in self._model.graph}
        base = f"{self._before.name}{suffix}"
        if base not in names:
            return base
        return next(f"{base}_{i}" for i in range(2, len(names) + 3) if f"{base}_{i}" not in names)
