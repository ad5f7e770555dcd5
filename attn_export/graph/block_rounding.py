"""Inputs of products rounded to 8 bits, with a scale for each block of a token.

In ONNX these are nine nodes, from a Reshape into blocks to a Reshape back. MatMulNBits of ONNX
Runtime does the same at `accuracy_level` 4
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
    """Add nodes that round a value to 8 bits, and return the rounded value, in float32.

    Args:
        op: Adds the nodes.
        x: The value, `[B, L, N]`.
        block: The number of consecutive elements that share a scale; it divides N.
    """
    assert x.shape is not None
    *rows, width = x.shape
    assert isinstance(width, int)
    count = width // block
    split, ends = ir.Shape([*rows, count, block]), ir.Shape([*rows, count, 1])

    def typed(value: ir.Value, shape: ir.Shape | None) -> ir.Value:
        value.dtype, value.shape = FLOAT, shape
        return value

    blocks = typed(op("Reshape", x, op.ints(0, 0, count, block)), split)
    largest = typed(op("ReduceMax", typed(op("Abs", blocks), split), op.ints(-1), keepdims=1), ends)
    scales = typed(op("Div", largest, op.number(BLOCK_LARGEST, FLOAT)), ends)
    scales = typed(op("Max", scales, op.number(LEAST_BLOCK_SCALE, FLOAT)), ends)
    integers = typed(op("Round", typed(op("Div", blocks, scales), split)), split)
    rounded = typed(op("Mul", integers, scales), split)
    return typed(op("Reshape", rounded, op.ints(0, 0, count * block)), x.shape)


def read_block_rounding(value: ir.Value) -> tuple[ir.Value, int] | None:
    """Return what a value is rounded from, and the size of the blocks; None if it is not."""
    found = dict(_followed(value))
    if len(found) != len(PATTERN):
        return None
    blocks, scales = found["blocks"], found["scales"]
    shared = found["Div"].inputs[1] is found["Mul"].inputs[1] is scales.outputs[0]
    of_blocks = found["Abs"].inputs[0] is found["Div"].inputs[0] is blocks.outputs[0]
    x, split = blocks.inputs[0], _numbers(optional_input(blocks, 1))
    joined = _numbers(optional_input(found["joined"], 1))
    if not shared or not of_blocks or x is None or len(split) != 4 or not _known(found):
        return None
    whole = [0, 0, split[2] * split[3]]
    return (x, int(split[3])) if joined == whole and split[:2] == [0, 0] else None


PATTERN = {
    # name: the operator, and the node of which it computes an input, with the number of the input
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
"""The nodes from the last to the first."""


def _followed(value: ir.Value) -> Iterator[tuple[str, ir.Node]]:
    """Yield the nodes of the pattern by name, as far as there are any."""
    found: dict[str, ir.Node] = {}
    for name, (op_type, reader, number) in PATTERN.items():
        made = value if not reader else optional_input(found[reader], number)
        node = None if made is None else made.producer()
        if node is None or node.op_type != op_type or node.domain:
            return
        found[name] = node
        yield name, node


def _known(found: dict[str, ir.Node]) -> bool:
    """Return whether the constants of a pattern are those of 8 bits."""
    reduce = found["ReduceMax"]
    return (
        _numbers(optional_input(found["of 127"], 1)) == [BLOCK_LARGEST]
        and _numbers(optional_input(found["scales"], 1)) == [LEAST_BLOCK_SCALE]
        and len(found["scales"].inputs) == 2
        and _numbers(optional_input(reduce, 1)) in ([-1], [3])
        and reduce.attributes.get_int("keepdims", 1) == 1
    )


def _numbers(value: ir.Value | None) -> list[float]:
    """Return the numbers of a constant; none if it is not one."""
    held = None if value is None else value.const_value
    return [] if held is None else held.numpy().ravel().tolist()
