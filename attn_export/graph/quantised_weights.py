"""Weights as integers in a graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import (
    add_initializer,
    set_type,
)
from attn_export.graph.lower.node_builder import Builder
from attn_export.quantiser import ORDER, QuantisedWeight

FLOAT = ir.DataType.FLOAT


def store_integers(model: ir.Model, weights: Mapping[str, QuantisedWeight]) -> None:
    """Store weights as integers, scales and zero points, which a DequantizeLinear reads.

    If the rows of a weight are in another order, the inputs of its products are put in it.
    """
    for name, weight in weights.items():
        float_weight = model.graph.initializers.pop(name)
        assert float_weight.const_value is not None, name
        assert np.array_equal(float_weight.const_value.numpy(), weight.dequantised()), (
            f"{name} differs"
        )
        float_weight.name = f"{name}_float32"
        stored = _add_initializers(model, name, weight)
        _dequantise(model, name, weight, float_weight, stored)


def _add_initializers(model: ir.Model, name: str, weight: QuantisedWeight) -> list[ir.Value]:
    """Add initialisers for integers, scales and, if there are any, zero points."""

    def by_output(array: np.ndarray) -> np.ndarray:
        # One scale for each output is stored as a vector, which older opsets support, too.
        return array if weight.is_blocked else array[0]

    dtype = ir.DataType[weight.dtype.upper()]
    stored = [
        add_initializer(model, name, weight.integers, dtype),
        add_initializer(model, f"{name}_scale", by_output(weight.scales), FLOAT),
    ]
    if weight.zero_points is not None:
        zero_points = by_output(weight.zero_points)
        stored.append(add_initializer(model, f"{name}_zero_point", zero_points, dtype))
    return stored


def _dequantise(
    model: ir.Model,
    name: str,
    weight: QuantisedWeight,
    float_weight: ir.Value,
    stored: list[ir.Value],
) -> None:
    """Replace a weight by the output of a DequantizeLinear for all readers."""
    layout = {"axis": 0, "block_size": weight.block} if weight.is_blocked else {"axis": 1}
    scope = name.rpartition(".")[0].replace(".", "/")
    node = ir.node("DequantizeLinear", stored, layout, name=f"{scope}/DequantizeLinear")
    output = set_type(node.outputs[0], FLOAT, ir.Shape(weight.integers.shape))
    output.name = f"{node.name}.out"
    products = [use.node for use in float_weight.uses()]
    float_weight.replace_all_uses_with(output)
    model.graph.insert_before(model.graph[0], node)
    if weight.order is None:
        return
    order = add_initializer(model, f"{name}{ORDER}", weight.order, ir.DataType.INT64)
    for product in products:
        x = product.inputs[0]
        assert x is not None, name
        ordered = Builder(model, product)("Gather", x, order, axis=-1)
        product.replace_input_with(0, set_type(ordered, FLOAT, x.shape))
