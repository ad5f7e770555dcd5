"""Weights as integers in a graph, and the rounding of the inputs of their products."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import (
    add_initializer,
    chain,
    computed,
    dims,
    set_type,
)
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.quantiser import BLOCK_LARGEST, LEAST_BLOCK_SCALE, ORDER, QuantisedWeight
from attn_export.spec.low_precision import PER_BLOCK, PER_RUN

FLOAT = ir.DataType.FLOAT

MOST_NODES = 8
"""The largest number of nodes that round a value by block."""

_MOST_WIDTH = 2**20
"""The largest width of a value for which a rounding by block is tried."""


def store_integers(
    model: ir.Model, weights: Mapping[str, QuantisedWeight], *, activations: str = "none"
) -> None:
    """Store weights as integers, scales and zero points.

    `activations`: The rounding of the inputs of products, as in a spec. With one scale per run,
    integers are multiplied. Otherwise a DequantizeLinear follows the weight, and with one scale per
    block the inputs are rounded in floating point.
    """
    rounded: dict[ir.Value, ir.Value] = {}
    for name, weight in weights.items():
        float_weight = model.graph.initializers.pop(name)
        assert float_weight.const_value is not None, name
        assert np.array_equal(float_weight.const_value.numpy(), weight.dequantised()), (
            f"{name} differs"
        )
        float_weight.name = f"{name}_float32"
        if weight.order is not None:
            _reorder_inputs(model, name, float_weight, weight.order)
        stored = _add_initializers(model, name, weight)
        if activations == PER_RUN:
            for use in list(float_weight.uses()):
                _multiply_integers(model, use.node, stored)
            continue
        if activations == PER_BLOCK:
            for use in list(float_weight.uses()):
                _round_input(model, use.node, weight.block, rounded)
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
    float_weight.replace_all_uses_with(output)
    model.graph.insert_before(model.graph[0], node)


def _multiply_integers(model: ir.Model, product: ir.Node, stored: list[ir.Value]) -> None:
    """Replace a product: round its input, multiply integers, multiply by both scales.

    ONNX Runtime fuses these nodes, and the addition of a bias after them, into one.
    """
    x, out = product.inputs[0], product.outputs[0]
    assert x is not None
    assert product.op_type == "MatMul", product.name
    op, (integers, scales) = Builder(model, product), stored
    rounded, scale, zero = _quantise_dynamically(op, x)
    sums = op("MatMulInteger", rounded, integers, zero)
    sums = op("Cast", set_type(sums, ir.DataType.INT32, out.shape), to=FLOAT)
    factors = set_type(op("Mul", scale, scales), FLOAT, scales.shape)
    take_over(out, op("Mul", set_type(sums, FLOAT, out.shape), factors))
    model.graph.remove(product, safe=True)


def _quantise_dynamically(op: Builder, x: ir.Value) -> Sequence[ir.Value]:
    """Return integers, scale and zero point of an input, from one node for all its products."""
    for use in x.uses():
        if use.node.op_type == "DynamicQuantizeLinear":
            return use.node.outputs
    outputs = op.add_node("DynamicQuantizeLinear", [x], 3)
    integers, scale, zero_point = outputs
    set_type(integers, ir.DataType.UINT8, x.shape)
    set_type(scale, FLOAT, ir.Shape([]))
    set_type(zero_point, ir.DataType.UINT8, ir.Shape([]))
    return outputs


def _round_input(
    model: ir.Model, product: ir.Node, block: int, rounded: dict[ir.Value, ir.Value]
) -> None:
    """Round the input of a product by block; products of the same input share the nodes."""
    x = product.inputs[0]
    assert x is not None
    if x not in rounded:
        rounded[x] = _round_in_blocks(Builder(model, product), x, block)
    product.replace_input_with(0, rounded[x])


def _reorder_inputs(model: ir.Model, name: str, weight: ir.Value, order: np.ndarray) -> None:
    """Insert a Gather that puts the input of each product in the order of its weight's rows."""
    indices = add_initializer(model, f"{name}{ORDER}", order, ir.DataType.INT64)
    for use in list(weight.uses()):
        product = use.node
        x = product.inputs[0]
        assert x is not None
        assert product.op_type == "MatMul", name
        node = ir.node("Gather", [x, indices], {"axis": -1}, name=f"{product.name}/Gather")
        gathered = set_type(node.outputs[0], FLOAT, x.shape)
        gathered.name = f"{node.name}.out"
        product.replace_input_with(0, gathered)
        model.graph.insert_before(product, node)


# -- rounding of inputs by block ----------------------------------------------------------------


def _round_in_blocks(op: Builder, x: ir.Value, block: int) -> ir.Value:
    """Return `x [B, L, N]` rounded to 8 bits, with a scale for each block of N.

    It takes nine nodes of ai.onnx, from a Reshape into blocks to a Reshape back. MatMulNBits of
    ONNX Runtime does the same at `accuracy_level` 4
    (https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).
    """
    assert x.shape is not None
    *rows, width = x.shape
    assert isinstance(width, int)
    count = width // block
    block_shape, scale_shape = ir.Shape([*rows, count, block]), ir.Shape([*rows, count, 1])

    def add(shape: ir.Shape | None, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        return set_type(op(op_type, *inputs, **attributes), FLOAT, shape)

    blocks = add(block_shape, "Reshape", x, op.ints(0, 0, count, block))
    magnitudes = add(block_shape, "Abs", blocks)
    largest = add(scale_shape, "ReduceMax", magnitudes, op.ints(-1), keepdims=1)
    scales = add(scale_shape, "Div", largest, op.scalar(BLOCK_LARGEST, FLOAT))
    scales = add(scale_shape, "Max", scales, op.scalar(LEAST_BLOCK_SCALE, FLOAT))
    quotients = add(block_shape, "Div", blocks, scales)
    rounded = add(block_shape, "Mul", add(block_shape, "Round", quotients), scales)
    return add(x.shape, "Reshape", rounded, op.ints(0, 0, count * block))


def read_block_rounding(value: ir.Value) -> tuple[ir.Value, int] | None:
    """Return the value before a rounding by block, and the block size; None for other values.

    It is proven by the values of random, empty and tiny blocks, and of ties.
    """
    _, *way = itertools.islice(chain(value), MOST_NODES)
    ranks = [len(dims(x)) for x in way]
    split = ranks.index(3) if 3 in ranks else 0
    if set(ranks[:split]) != {4}:
        return None
    block, width = (dims(x)[-1] for x in way[split - 1 : split + 1])
    if not isinstance(block, int) or not isinstance(width, int):
        return None
    if not 0 < block <= width <= _MOST_WIDTH or width % block:
        return None
    rng, shape = np.random.default_rng(0), (2, 4, width // block, block)
    blocks = rng.standard_normal(shape) * np.reshape([1, 0, 1e-37, 1], (4, 1, 1))
    blocks[:, 3] = rng.integers(-100, 100, shape)[:, 3] + 0.5
    blocks[:, 3, :, 0] = BLOCK_LARGEST  # so the scale is 1
    blocks = blocks.astype(np.float32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    scales = np.maximum(largest / np.float32(BLOCK_LARGEST), np.float32(LEAST_BLOCK_SCALE))
    rounded = np.round(blocks / scales) * scales
    found = computed(value, {way[split]: blocks.reshape(2, 4, width)})
    same = found is not None and np.array_equal(found, rounded.reshape(2, 4, width))
    return (way[split], block) if same else None
