"""Rounding of the inputs of products to 8 bits, with a scale for each block of a token.

In operators of ai.onnx it takes nine nodes, from a Reshape into blocks to a Reshape back.
MatMulNBits of ONNX Runtime does the same at `accuracy_level` 4
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from attn_export.graph.ir_helpers import optional_input
from attn_export.graph.lower.node_builder import Builder
from attn_export.quantiser import BLOCK_LARGEST, LEAST_BLOCK_SCALE

FLOAT = ir.DataType.FLOAT


def round_in_blocks(op: Builder, x: ir.Value, block: int) -> ir.Value:
    """Add nodes that round a value to 8 bits, and return the rounded value, float32 `[B, L, N]`.

    Args:
        op: Builder of the nodes.
        x: The value, float32 `[B, L, N]`.
        block: The number of consecutive elements that share a scale; it divides N.
    """
    assert x.shape is not None
    *rows, width = x.shape
    assert isinstance(width, int)
    count = width // block
    block_shape, scale_shape = ir.Shape([*rows, count, block]), ir.Shape([*rows, count, 1])

    def set_type(value: ir.Value, shape: ir.Shape | None) -> ir.Value:
        value.dtype, value.shape = FLOAT, shape
        return value

    blocks = set_type(op("Reshape", x, op.ints(0, 0, count, block)), block_shape)
    largest = set_type(
        op("ReduceMax", set_type(op("Abs", blocks), block_shape), op.ints(-1), keepdims=1),
        scale_shape,
    )
    scales = set_type(op("Div", largest, op.number(BLOCK_LARGEST, FLOAT)), scale_shape)
    scales = set_type(op("Max", scales, op.number(LEAST_BLOCK_SCALE, FLOAT)), scale_shape)
    integers = set_type(op("Round", set_type(op("Div", blocks, scales), block_shape)), block_shape)
    rounded = set_type(op("Mul", integers, scales), block_shape)
    return set_type(op("Reshape", rounded, op.ints(0, 0, count * block)), x.shape)


def read_block_rounding(value: ir.Value) -> tuple[ir.Value, int] | None:
    """Return the value before a rounding by block, and the block size; None for other values."""
    nodes = dict(_match_pattern(value))
    if len(nodes) != len(PATTERN):
        return None
    blocks, scales = nodes["blocks"], nodes["scales"]
    same_scales = nodes["Div"].inputs[1] is nodes["Mul"].inputs[1] is scales.outputs[0]
    same_blocks = nodes["Abs"].inputs[0] is nodes["Div"].inputs[0] is blocks.outputs[0]
    x, block_shape = blocks.inputs[0], _numbers(optional_input(blocks, 1))
    merged_shape = _numbers(optional_input(nodes["joined"], 1))
    if (
        not same_scales
        or not same_blocks
        or x is None
        or len(block_shape) != 4
        or not _has_8_bit_constants(nodes)
    ):
        return None
    expected_shape = [0, 0, block_shape[2] * block_shape[3]]
    return (
        (x, int(block_shape[3]))
        if merged_shape == expected_shape and block_shape[:2] == [0, 0]
        else None
    )


PATTERN = {
    # name: (operator, name of the node that reads its output, index of the input that reads it)
    "joined": ("Reshape", "", 0),
    "Mul": ("Mul", "joined", 0),
    "Round": ("Round", "Mul", 0),
    "Div": ("Div", "Round", 0),
    "blocks": ("Reshape", "Div", 0),
    "scales": ("Max", "Div", 1),
    "of 127": ("Div", "scales", 0),
    "ReduceMax": ("ReduceMax", "of 127", 0),
    "Abs": ("Abs", "ReduceMax", 0),
}
"""The nodes of a rounding by block, from the last to the first."""


def _match_pattern(value: ir.Value) -> Iterator[tuple[str, ir.Node]]:
    """Yield the nodes of the pattern by name, up to the first that does not match."""
    nodes: dict[str, ir.Node] = {}
    for name, (op_type, reader, number) in PATTERN.items():
        output = value if not reader else optional_input(nodes[reader], number)
        node = None if output is None else output.producer()
        if node is None or node.op_type != op_type or node.domain:
            return
        nodes[name] = node
        yield name, node


def _has_8_bit_constants(nodes: dict[str, ir.Node]) -> bool:
    """Return whether the constants of the matched nodes are those of 8 bits."""
    reduce = nodes["ReduceMax"]
    return (
        _numbers(optional_input(nodes["of 127"], 1)) == [BLOCK_LARGEST]
        and _numbers(optional_input(nodes["scales"], 1)) == [LEAST_BLOCK_SCALE]
        and len(nodes["scales"].inputs) == 2
        and _numbers(optional_input(reduce, 1)) in ([-1], [3])
        and reduce.attributes.get_int("keepdims", 1) == 1
    )


def _numbers(value: ir.Value | None) -> list[float]:
    """Return the elements of a constant; an empty list for other values."""
    tensor = None if value is None else value.const_value
    return [] if tensor is None else tensor.numpy().ravel().tolist()
