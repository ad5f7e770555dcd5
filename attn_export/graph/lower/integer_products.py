"""Lowering of products with quantised weights to the fastest form in ONNX Runtime.

Products with weights of 4 bits become MatMulNBits, which unpacks while it multiplies
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md). Its weights are
`[out, blocks, bytes]`, unsigned, two integers of 4 bits in a byte, the first in the lower half.

For 8 bits MatMulNBits takes 15 times as long as a product in float32, unless it rounds its inputs,
and ONNX Runtime converts DequantizeLinear to it. If they are not rounded, such weights, as those of
float8, are dequantised by Cast, Sub and Mul instead, which ONNX Runtime folds when a session is
made.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT
from attn_export.graph.ir_helpers import add_initializer, add_lazy, nodes_of, optional_input
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.quantiser import FLOAT8, FLOAT32_PRODUCTS, RANGES, join_nibbles, product_block

FLOAT, UINT8 = ir.DataType.FLOAT, ir.DataType.UINT8


def multiply_integers(model: ir.Model, *, packs_bytes: bool = False) -> None:
    """Replace DequantizeLinear nodes of weights that only products read, in place.

    `packs_bytes`: Whether products with weights of 8 bits become MatMulNBits, too.
    """
    for node in nodes_of(model, "DequantizeLinear"):
        weight = _read(node)
        readers = [use.node for use in node.outputs[0].uses()]
        if weight is None or not all(_is_product_with(reader, node) for reader in readers):
            continue
        if weight.dtype == FLOAT8 or (weight.bits == 8 and not packs_bytes):
            _dequantise_in_float32(model, node, weight)
            continue
        packed = _pack_weight(model, str(node.inputs[0].name if node.inputs[0] else ""), weight)
        for reader in readers:
            _replace_product(model, reader, weight, packed)


@dataclasses.dataclass(frozen=True)
class _Weight:
    """The constants of a DequantizeLinear, which are read when they are needed.

    Attributes:
        integers: `[in, out]`.
        scales: `[in / block, out]`, or `[out]`.
        zeros: The zero points, of the shape of the scales; None if all are 0.
        shared: The number of inputs that share a scale; 0 for all.
        block: That in MatMulNBits.
    """

    integers: ir.TensorProtocol
    scales: ir.TensorProtocol
    zeros: ir.TensorProtocol | None
    shared: int
    block: int

    @property
    def dtype(self) -> str:
        """The type of the integers."""
        return self.integers.dtype.name.lower()

    @property
    def bits(self) -> int:
        """The size of an integer."""
        return 4 if self.dtype.endswith("4") else 8

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of inputs and outputs."""
        return tuple(self.integers.shape.numpy())

    def spread(self, tensor: ir.TensorProtocol) -> np.ndarray:
        """Return scales or zero points of all blocks, `[in / block, out]`."""
        array = np.atleast_2d(tensor.numpy())
        return np.repeat(array, (self.shared or self.shape[0]) // self.block, axis=0)


def _dequantise_in_float32(model: ir.Model, node: ir.Node, weight: _Weight) -> None:
    """Replace a DequantizeLinear by operators of float32: (integer - zero point) * scale."""
    op = Builder(model, node)
    inputs, outputs = weight.shape
    integers, scales, zeros = (optional_input(node, index) for index in range(3))

    def beside(x: ir.Value | None) -> ir.Value | None:
        """Add an axis for the elements of a block, if there are blocks."""
        return op("Unsqueeze", x, op.ints(1)) if weight.shared else x

    value = op("Cast", integers, to=FLOAT)
    if weight.shared:
        value = op("Reshape", value, op.ints(-1, weight.shared, outputs))
    if zeros is not None:
        value = op("Sub", value, beside(op("Cast", zeros, to=FLOAT)))
    value = op("Mul", value, beside(scales))
    if weight.shared:
        value = op("Reshape", value, op.ints(inputs, outputs))
    take_over(node.outputs[0], value)
    model.graph.remove(node, safe=True)


def _is_product_with(reader: ir.Node, node: ir.Node) -> bool:
    plain = reader.op_type == "MatMul" and reader.domain == ""
    return plain and reader.inputs[1] is node.outputs[0] and reader.inputs[0] is not None


def _read(node: ir.Node) -> _Weight | None:
    """Return the weight of a DequantizeLinear; None if MatMulNBits does not support it."""
    inputs = [optional_input(node, index) for index in range(3)]
    integers, scales, zeros = (None if x is None else x.const_value for x in inputs)
    if integers is None or scales is None or len(integers.shape) != 2:
        return None
    if inputs[2] is not None and zeros is None:
        return None
    dtype, is_float = integers.dtype.name.lower(), scales.dtype == FLOAT
    blocked, axis = node.attributes.get_int("block_size", 0), node.attributes.get_int("axis", 1)
    if (
        dtype not in (*RANGES, FLOAT8)
        or not is_float
        or axis != (0 if blocked else 1)
        or len(scales.shape) == 0
    ):
        return None
    rows = integers.shape.numpy()[0]
    block = product_block(rows, blocked, 8 if dtype.endswith("8") else 4)
    return None if block is None else _Weight(integers, scales, zeros, blocked, block)


def _pack_weight(model: ir.Model, name: str, weight: _Weight) -> list[ir.Value]:
    """Add the inputs of MatMulNBits: weights, scales and, if not the default, zero points."""
    middle = 2 ** (weight.bits - 1)
    offset = middle if weight.dtype.startswith("int") else 0
    inputs, outputs = weight.shape
    blocks = inputs // weight.block

    def rows() -> np.ndarray:
        return _packed(weight, weight.integers.numpy().T.reshape(outputs, blocks, -1), offset)

    constants = [
        add_lazy(
            model, f"{name}.packed", UINT8, (outputs, blocks, weight.block * weight.bits // 8), rows
        ),
        add_lazy(
            model, f"{name}.packed_scale", FLOAT, (outputs, blocks),
            lambda: weight.spread(weight.scales).T,
        ),
    ]  # fmt: skip
    zeros = np.zeros(1, np.int8) if weight.zeros is None else weight.spread(weight.zeros).T
    if (zeros.astype(np.int16) + offset != middle).any():
        packed = _packed(weight, np.broadcast_to(zeros, (outputs, blocks)), offset)
        constants.append(add_initializer(model, f"{name}.packed_zero_point", packed, UINT8))
    return constants


def _packed(weight: _Weight, numbers: np.ndarray, offset: int) -> np.ndarray:
    """Return integers as bytes; those of 4 bits in pairs along the last axis, the first below."""
    # A sum beyond the type of signed bytes comes round to the unsigned byte.
    numbers = numbers.astype(np.uint8) + np.uint8(offset)
    if weight.bits == 8:
        return numbers
    if numbers.shape[-1] % 2:
        numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, 1)])
    packed: np.ndarray = join_nibbles(numbers)
    return packed


def _replace_product(
    model: ir.Model, node: ir.Node, weight: _Weight, packed: list[ir.Value]
) -> None:
    inputs, outputs = weight.shape
    (product,) = Builder(model, node).add_node(
        "MatMulNBits", [node.inputs[0], *packed], 1, MICROSOFT,
        K=inputs, N=outputs, bits=weight.bits, block_size=weight.block,
        accuracy_level=FLOAT32_PRODUCTS,
    )  # fmt: skip
    take_over(node.outputs[0], product)
    model.graph.remove(node, safe=True)
