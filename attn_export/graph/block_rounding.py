"""Rounding of the inputs of products to 8 bits, with a scale for each block of a token.

In operators of ai.onnx it takes nine nodes, from a Reshape into blocks to a Reshape back.
MatMulNBits of ONNX Runtime does the same at `accuracy_level` 4
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).
"""

from __future__ import annotations

import onnx_ir as ir

from attn_export.graph.ir_helpers import constant_array, optional_input, producer_of, set_type
from attn_export.graph.lower.node_builder import Builder
from attn_export.quantiser import BLOCK_LARGEST, LEAST_BLOCK_SCALE

FLOAT = ir.DataType.FLOAT


def round_in_blocks(op: Builder, x: ir.Value, block: int) -> ir.Value:
    """Add nodes that round a value to 8 bits.

    Args:
        op: Builder of the nodes.
        x: The value, float32 `[B, L, N]`.
        block: The number of consecutive elements that share a scale; it divides N.

    Returns:
        The rounded value, float32 `[B, L, N]`.
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
    scales = add(scale_shape, "Div", largest, op.number(BLOCK_LARGEST, FLOAT))
    scales = add(scale_shape, "Max", scales, op.number(LEAST_BLOCK_SCALE, FLOAT))
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
    x, target = nodes["blocks"].inputs[0], _numbers(optional_input(nodes["blocks"], 1))
    if not same_scales or not same_blocks or x is None or len(target) != 4:
        return None
    count, block = int(target[2]), int(target[3])
    merged = _numbers(optional_input(nodes["merged"], 1)) == [0, 0, count * block]
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
        _numbers(optional_input(nodes["of 127"], 1)) == [BLOCK_LARGEST]
        and _numbers(optional_input(nodes["scales"], 1)) == [LEAST_BLOCK_SCALE]
        and len(nodes["scales"].inputs) == 2
        and _numbers(optional_input(reduce, 1)) in ([-1], [3])
        and reduce.attributes.get_int("keepdims", 1) == 1
    )


def _numbers(value: ir.Value | None) -> list[float]:
    """Return the elements of a constant; an empty list for other values."""
    array = constant_array(value)
    return [] if array is None else array.ravel().tolist()
