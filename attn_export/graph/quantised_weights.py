"""Weights as integers in a graph, and the rounding of the inputs of their products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import (
    add_initializer,
    constant_numbers,
    optional_input,
    producer_of,
    set_type,
)
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.quantiser import BLOCK_LARGEST, LEAST_BLOCK_SCALE, QuantisedWeight
from attn_export.spec.low_precision import PER_BLOCK, PER_RUN

FLOAT = ir.DataType.FLOAT


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


ORDER = "_order"
"""Suffix of the initialiser that holds the input order of a weight."""


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
    """Return the value before a rounding by block, and the block size; None for other values."""
    nodes = _match_pattern(value)
    if nodes is None or not _has_8_bit_constants(nodes):
        return None
    blocks, scales = nodes["blocks"].outputs[0], nodes["scales"].outputs[0]
    same_scales = nodes["Div"].inputs[1] is nodes["Mul"].inputs[1] is scales
    same_blocks = nodes["Abs"].inputs[0] is nodes["Div"].inputs[0] is blocks
    x, target = nodes["blocks"].inputs[0], constant_numbers(optional_input(nodes["blocks"], 1))
    if not same_scales or not same_blocks or x is None or len(target) != 4:
        return None
    count, block = int(target[2]), int(target[3])
    merged = constant_numbers(optional_input(nodes["merged"], 1)) == [0, 0, count * block]
    return (x, block) if merged and target[:2] == [0, 0] else None


PATTERN = {
    # name: (operator, name of the node that reads its output, index of the input that reads it)
    "merged": ("Reshape", "", 0),
    "Mul": ("Mul", "merged", 0),
    "Round": ("Round", "Mul", 0),
    "Div": ("Div", "Round", 0),
    "blocks": ("Reshape", "Div", 0),
    "scales": ("Max", "Div", 1),
    "of 127": ("Div", "scales", 0),
    "ReduceMax": ("ReduceMax", "of 127", 0),
    "Abs": ("Abs", "ReduceMax", 0),
}
"""The nodes of a rounding by block, from the last to the first."""


def _match_pattern(value: ir.Value) -> dict[str, ir.Node] | None:
    """Return the nodes of the pattern by name; None if one of them is another operator."""
    nodes: dict[str, ir.Node] = {}
    for name, (op_type, reader, index) in PATTERN.items():
        output = value if not reader else optional_input(nodes[reader], index)
        node = producer_of(output, op_type)
        if node is None:
            return None
        nodes[name] = node
    return nodes


def _has_8_bit_constants(nodes: dict[str, ir.Node]) -> bool:
    """Return whether the constants of the matched nodes are those of 8 bits."""
    reduce = nodes["ReduceMax"]
    return (
        constant_numbers(optional_input(nodes["of 127"], 1)) == [BLOCK_LARGEST]
        and constant_numbers(optional_input(nodes["scales"], 1)) == [LEAST_BLOCK_SCALE]
        and len(nodes["scales"].inputs) == 2
        and constant_numbers(optional_input(reduce, 1)) in ([-1], [3])
        and reduce.attributes.get_int("keepdims", 1) == 1
    )
