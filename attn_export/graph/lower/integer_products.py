"""Lowering of products with quantised weights to the fastest form in ONNX Runtime.

Products with weights of 4 bits become MatMulNBits, which unpacks while it multiplies
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md). Its weights are
`[out, blocks, bytes]`, unsigned, two integers of 4 bits in a byte, the first in the lower half.

For 8 bits MatMulNBits takes 15 times as long as a product in float32, and ONNX Runtime converts
DequantizeLinear to it. Such weights are dequantised by Cast, Sub and Mul instead, which ONNX
Runtime folds when a session is made.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT
from attn_export.graph.ir_helpers import add_initializer, nodes_of, optional_input
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.quantised_weights import FLOAT
from attn_export.quantiser import (
    FLOAT32_PRODUCTS,
    MIDDLE,
    RANGES,
    QuantisedWeight,
    join_nibbles,
)

BLOCKS = (256, 128, 64, 32, 16)
"""Block sizes of MatMulNBits. Scales of other blocks are repeated for the largest that fits."""

UINT8 = ir.DataType.UINT8


def multiply_integers(model: ir.Model) -> None:
    """Replace DequantizeLinear nodes of weights that only products read, in place."""
    for node in nodes_of(model, "DequantizeLinear"):
        weight = _read(node)
        readers = [use.node for use in node.outputs[0].uses()]
        if weight is None or not all(_is_product_with(reader, node) for reader in readers):
            continue
        if weight.dtype.endswith("8"):
            _dequantise_in_float32(model, node, weight)
            continue
        packed = _pack_weight(model, str(node.inputs[0].name if node.inputs[0] else ""), weight)
        for reader in readers:
            _replace_product(model, reader, weight, packed)


def _dequantise_in_float32(model: ir.Model, node: ir.Node, weight: QuantisedWeight) -> None:
    """Replace a DequantizeLinear by operators of float32: (integer - zero point) * scale."""
    op = Builder(model, node)
    inputs, outputs = weight.integers.shape
    block = node.attributes.get_int("block_size", 0)
    integers, scales, zeros = (optional_input(node, index) for index in range(3))

    def beside(x: ir.Value | None) -> ir.Value | None:
        """Add an axis for the elements of a block, if there are blocks."""
        return op("Unsqueeze", x, op.ints(1)) if block else x

    value = op("Cast", integers, to=FLOAT)
    if block:
        value = op("Reshape", value, op.ints(-1, block, outputs))
    if zeros is not None:
        value = op("Sub", value, beside(op("Cast", zeros, to=FLOAT)))
    value = op("Mul", value, beside(scales))
    if block:
        value = op("Reshape", value, op.ints(inputs, outputs))
    take_over(node.outputs[0], value)
    model.graph.remove(node, safe=True)


def _is_product_with(reader: ir.Node, node: ir.Node) -> bool:
    plain = reader.op_type == "MatMul" and reader.domain == ""
    return plain and reader.inputs[1] is node.outputs[0] and reader.inputs[0] is not None


def _read(node: ir.Node) -> QuantisedWeight | None:
    """Return the weight of a DequantizeLinear; None if MatMulNBits does not support it."""
    inputs = [optional_input(node, index) for index in range(3)]
    integers, scales, zeros = (None if x is None else x.const_value for x in inputs)
    if integers is None or scales is None or len(integers.shape) != 2:
        return None
    if inputs[2] is not None and zeros is None:
        return None
    dtype, is_float = integers.dtype.name.lower(), scales.dtype == ir.DataType.FLOAT
    blocked, axis = node.attributes.get_int("block_size", 0), node.attributes.get_int("axis", 1)
    if (
        dtype not in RANGES
        or not is_float
        or axis != (0 if blocked else 1)
        or len(scales.shape) == 0
    ):
        return None
    rows = integers.shape.numpy()[0]
    block = next((b for b in BLOCKS if (blocked or rows) % b == 0), None)
    if block is None:
        return None

    def spread(array: np.ndarray) -> np.ndarray:
        return np.repeat(np.atleast_2d(array), (blocked or rows) // block, axis=0)

    return QuantisedWeight(
        dtype, integers.numpy().astype(np.int64), spread(scales.numpy()),
        None if zeros is None else spread(zeros.numpy().astype(np.int64)), bool(blocked),
    )  # fmt: skip


def _pack_weight(model: ir.Model, name: str, weight: QuantisedWeight) -> list[ir.Value]:
    """Add the inputs of MatMulNBits: weights, scales and, if not the default, zero points."""
    offset = MIDDLE if weight.dtype.startswith("int") else 0
    blocks, outputs = weight.scales.shape
    rows = _pack_bytes((weight.integers + offset).T.reshape(outputs, blocks, -1))
    points = weight.zero_points
    zeros = ((np.zeros(weight.scales.shape, np.int64) if points is None else points) + offset).T
    constants = [
        add_initializer(model, f"{name}.packed", rows, UINT8),
        add_initializer(model, f"{name}.packed_scale", weight.scales.T, FLOAT),
    ]
    if (zeros != MIDDLE).any():
        packed = _pack_bytes(zeros)
        constants.append(add_initializer(model, f"{name}.packed_zero_point", packed, UINT8))
    return constants


def _pack_bytes(numbers: np.ndarray) -> np.ndarray:
    """Pack unsigned integers of 4 bits along the last axis, the first in the lower half."""
    odd = [(0, 0)] * (numbers.ndim - 1) + [(0, numbers.shape[-1] % 2)]
    packed: np.ndarray = join_nibbles(np.pad(numbers.astype(np.uint8), odd))
    return packed


def _replace_product(
    model: ir.Model, node: ir.Node, weight: QuantisedWeight, packed: list[ir.Value]
) -> None:
    inputs, outputs = weight.integers.shape
    (product,) = Builder(model, node).add_node(
        "MatMulNBits", [node.inputs[0], *packed], 1, MICROSOFT,
        K=inputs, N=outputs, bits=4, block_size=weight.block, accuracy_level=FLOAT32_PRODUCTS,
    )  # fmt: skip
    take_over(node.outputs[0], product)
    model.graph.remove(node, safe=True)
