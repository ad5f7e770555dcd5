"""Weights of a graph as integers, with a DequantizeLinear between them and the MatMul."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from attn_export.quantiser import QuantisedWeight


def store_integers(model: ir.Model, weights: Mapping[str, QuantisedWeight]) -> None:
    """Store weights as integers, scales and zero points (QDQ form).

    Args:
        model: The canonical graph; changed in place. It holds what the integers stand for.
        weights: By the names of initialisers, which the integers take over.
    """
    for name, weight in weights.items():
        _store(model, name, weight)


def _store(model: ir.Model, name: str, weight: QuantisedWeight) -> None:
    held = model.graph.initializers.pop(name)
    assert held.const_value is not None, name
    assert np.array_equal(held.const_value.numpy(), weight.dequantised()), f"{name} differs"
    # One scale for each output is a plain vector, which older opsets have too.
    small = weight.scales if weight.is_blocked else weight.scales[0]
    zeros = weight.zero_points
    if zeros is not None and not weight.is_blocked:
        zeros = zeros[0]
    dtype = ir.DataType[weight.dtype.upper()]
    held.name = f"{name}_float32"
    inputs = [
        _initializer(model, name, weight.integers, dtype),
        _initializer(model, f"{name}_scale", small, ir.DataType.FLOAT),
    ]
    if zeros is not None:
        inputs.append(_initializer(model, f"{name}_zero_point", zeros, dtype))
    layout = {"axis": 0, "block_size": weight.block} if weight.is_blocked else {"axis": 1}
    scope = name.rpartition(".")[0].replace(".", "/")
    node = ir.node("DequantizeLinear", inputs, layout, name=f"{scope}/DequantizeLinear")
    output = node.outputs[0]
    output.name, output.shape = f"{node.name}.out", ir.Shape(weight.integers.shape)
    output.dtype = ir.DataType.FLOAT
    held.replace_all_uses_with(output)
    model.graph.insert_before(next(iter(model.graph)), node)
    if weight.order is not None:
        _reorder_inputs(model, name, output, weight.order)


def _reorder_inputs(model: ir.Model, name: str, weight: ir.Value, order: np.ndarray) -> None:
    """Put the inputs of each product in the order of the rows of its weight."""
    places = _initializer(model, f"{name}{ORDER}", order, ir.DataType.INT64)
    for use in list(weight.uses()):
        product = use.node
        x = product.inputs[0]
        assert x is not None
        assert product.op_type == "MatMul", name
        node = ir.node("Gather", [x, places], {"axis": -1}, name=f"{product.name}/Gather")
        ordered = node.outputs[0]
        ordered.name, ordered.shape = f"{node.name}.out", x.shape
        ordered.dtype = ir.DataType.FLOAT
        product.replace_input_with(0, ordered)
        model.graph.insert_before(product, node)


ORDER = "_order"
"""The end of the name of a weight's order of inputs."""


def _initializer(model: ir.Model, name: str, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
    stored = np.ascontiguousarray(array.astype(dtype.numpy()))
    value = ir.val(name, const_value=ir.tensor(stored, dtype=dtype, name=name))
    model.graph.register_initializer(value)
    return value
