"""Weights of a graph as integers, dequantised for products of floats or multiplied as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.block_rounding import round_in_blocks
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.quantiser import QuantisedWeight
from attn_export.spec.low_precision import PER_BLOCK, PER_RUN


def store_integers(
    model: ir.Model, weights: Mapping[str, QuantisedWeight], *, activations: str = "none"
) -> None:
    """Store weights as integers, scales and zero points.

    Args:
        model: The canonical graph; changed in place. It holds what the integers stand for.
        weights: By the names of initialisers, which the integers take over.
        activations: The rounding of the inputs of their products, as in a spec. With one scale for
            all, integers are multiplied; else DequantizeLinear stands between a weight and its
            products (QDQ form), whose inputs are rounded in floating point.
    """
    rounded: dict[ir.Value, ir.Value] = {}
    for name, weight in weights.items():
        held = model.graph.initializers.pop(name)
        assert held.const_value is not None, name
        assert np.array_equal(held.const_value.numpy(), weight.dequantised()), f"{name} differs"
        held.name = f"{name}_float32"
        if weight.order is not None:
            _reorder_inputs(model, name, held, weight.order)
        stored = _stored(model, name, weight)
        if activations == PER_RUN:
            for use in list(held.uses()):
                _multiply_integers(model, use.node, stored)
            continue
        if activations == PER_BLOCK:
            for use in list(held.uses()):
                _round_input(model, use.node, weight.block, rounded)
        _dequantise(model, name, weight, held, stored)


def _stored(model: ir.Model, name: str, weight: QuantisedWeight) -> list[ir.Value]:
    """Add integers, scales and, if there are any, zero points."""
    # One scale for each output is a plain vector, which older opsets have too.
    parts = [part if weight.is_blocked else part[0] for part in _scales_of(weight)]
    dtype = ir.DataType[weight.dtype.upper()]
    rest = zip(("_scale", "_zero_point"), parts, (ir.DataType.FLOAT, dtype), strict=False)
    return [
        _initializer(model, name, weight.integers, dtype),
        *(_initializer(model, f"{name}{end}", part, kind) for end, part, kind in rest),
    ]


def _scales_of(weight: QuantisedWeight) -> list[np.ndarray]:
    zeros = weight.zero_points
    return [weight.scales] if zeros is None else [weight.scales, zeros]


def _dequantise(
    model: ir.Model, name: str, weight: QuantisedWeight, held: ir.Value, stored: list[ir.Value]
) -> None:
    """Let the readers of a weight read the output of a DequantizeLinear."""
    layout = {"axis": 0, "block_size": weight.block} if weight.is_blocked else {"axis": 1}
    scope = name.rpartition(".")[0].replace(".", "/")
    node = ir.node("DequantizeLinear", stored, layout, name=f"{scope}/DequantizeLinear")
    output = node.outputs[0]
    output.name, output.shape = f"{node.name}.out", ir.Shape(weight.integers.shape)
    output.dtype = ir.DataType.FLOAT
    held.replace_all_uses_with(output)
    model.graph.insert_before(next(iter(model.graph)), node)


def _multiply_integers(model: ir.Model, product: ir.Node, stored: list[ir.Value]) -> None:
    """Replace a product: round its input, multiply integers, multiply by both scales.

    ONNX Runtime makes one node of it, with the bias that is added.
    """
    x, out = product.inputs[0], product.outputs[0]
    assert x is not None
    assert product.op_type == "MatMul", product.name
    op, (integers, scales) = Builder(model, product), stored
    rounded, scale, zero = _rounded(op, x)
    found = op("MatMulInteger", rounded, integers, zero)
    found.dtype, found.shape = ir.DataType.INT32, out.shape
    found = op("Cast", found, to=ir.DataType.FLOAT)
    found.dtype, found.shape = ir.DataType.FLOAT, out.shape
    factors = op("Mul", scale, scales)
    factors.dtype, factors.shape = ir.DataType.FLOAT, scales.shape
    take_over(out, op("Mul", found, factors))
    model.graph.remove(product, safe=True)


def _rounded(op: Builder, x: ir.Value) -> Sequence[ir.Value]:
    """Return the integers of an input, their scale and zero point: one node for all its readers."""
    for use in x.uses():
        if use.node.op_type == "DynamicQuantizeLinear":
            return use.node.outputs
    found = op.several("DynamicQuantizeLinear", [x], 3)
    kinds = (ir.DataType.UINT8, ir.DataType.FLOAT, ir.DataType.UINT8)
    for value, kind, shape in zip(found, kinds, (x.shape, ir.Shape([]), ir.Shape([])), strict=True):
        value.dtype, value.shape = kind, shape
    return found


def _round_input(
    model: ir.Model, product: ir.Node, block: int, rounded: dict[ir.Value, ir.Value]
) -> None:
    """Round the input of a product in blocks; products of one input share the rounding.

    Args:
        model: The graph; changed in place.
        product: The product.
        block: The size of the blocks.
        rounded: Inputs that are rounded already, and what of them is; it grows.
    """
    x = product.inputs[0]
    assert x is not None
    if x not in rounded:
        rounded[x] = round_in_blocks(Builder(model, product), x, block)
    product.replace_input_with(0, rounded[x])


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
