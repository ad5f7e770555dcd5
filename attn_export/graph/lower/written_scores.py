"""Reader of the scores of attention that is written out in operators."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import (
    constant_array,
    dims,
    producer_of,
    set_type,
    trace_back,
    value_before,
)
from attn_export.graph.lower.node_builder import Builder

ABSORBING = -1e9
"""The largest finite number that hides a key: added to a float32 score, it absorbs the score."""


Mask = tuple[ir.Value, bool, float]
"""A mask, whether it is bool (True for visible keys), and the number filled in for hidden keys. A
mask that is not bool is added."""


INPUTS = {
    "Add": 2, "Cast": 1, "Div": 2, "Einsum": 2, "Identity": 1, "MatMul": 2, "Mul": 2, "Where": 3,
}  # fmt: skip
"""Operators that may lie between a product and its softmax, with their numbers of inputs."""

MOST_DEPTH = 12
"""The largest number of nodes between a product and its softmax. The search follows both operands
of each sum."""


class NoMatchError(Exception):
    """Error for nodes that are not those of attention."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Parts of the scores that a softmax reads.

    Attributes:
        query: `[..., L, D]`.
        key: `[..., S, D]`.
        scale: The factor on their product.
        softcap: The softcap; 0 for none.
        masks: The masks in the order in which they are applied.
    """

    query: ir.Value
    key: ir.Value
    scale: float = 1.0
    softcap: float = 0.0
    masks: tuple[Mask, ...] = ()


def read_scores(op: Builder, value: ir.Value, depth: int = MOST_DEPTH) -> Scores:
    """Return the parts of the scores, from the input of the softmax to the product.

    Args:
        op: Builder of the nodes that convert operands and masks.
        value: The input of the softmax.
        depth: The largest number of nodes between the product and the softmax.

    Raises:
        NoMatchError: If the nodes are not those of scores.
    """
    node = value.producer()
    if node is None or depth == 0:
        raise NoMatchError
    inputs = [value_read for value_read in node.inputs if value_read is not None]
    if len(inputs) < len(node.inputs) or len(inputs) != INPUTS.get(node.op_type):
        raise NoMatchError
    match node.op_type:
        case "MatMul":
            return Scores(inputs[0], _transpose_keys(op, inputs[1]))
        case "Einsum":
            return _read_einsum(op, node, *inputs)
        case "Mul" | "Div":
            return _read_scaled(op, depth - 1, node.op_type, *inputs)
        case "Add":
            return _read_added_mask(op, depth - 1, *inputs)
        case "Where":
            return _read_filled_mask(op, depth - 1, *inputs)
    return read_scores(op, inputs[0], depth - 1)


def _transpose_keys(op: Builder, value: ir.Value) -> ir.Value:
    """Convert the second operand of the product, `[..., D, S]`, to keys `[..., S, D]`."""
    if len(dims(value)) < 3:
        raise NoMatchError
    rank = len(dims(value))
    perm = [*range(rank - 2), rank - 1, rank - 2]
    transpose = producer_of(value, "Transpose")
    if transpose is not None and transpose.inputs[0] is not None:
        inner = list(transpose.attributes.get_ints("perm", range(rank)[::-1]))
        value, perm = transpose.inputs[0], [inner[axis] for axis in perm]
    return permute(op, value, perm)


def _read_einsum(op: Builder, node: ir.Node, query: ir.Value, key: ir.Value) -> Scores:
    one, other, out = equation(node)
    batch, row, column = out[:-2], out[-2], out[-1]
    if row not in one:
        query, key, one, other = key, query, other, one
    width = set(one) - {*batch, row}
    if column not in other or len(width) != 1 or not set(other) - {column} <= set(one) - {row}:
        raise NoMatchError
    last = width.pop()
    return Scores(
        order_axes(op, query, one, [*batch, row, last]),
        order_axes(op, key, other, [*batch, column, last]),
    )


def _read_scaled(op: Builder, depth: int, op_type: str, one: ir.Value, other: ir.Value) -> Scores:
    number = _number(other)
    if number is None and op_type == "Mul":
        one, number = other, _number(one)
    if number is None or not math.isfinite(number) or number == 0:
        raise NoMatchError
    capped = value_before(one, "Tanh") if op_type == "Mul" else None
    if capped is not None:
        inner = read_scores(op, capped, depth)
        # softcap * tanh(scores / softcap): the inner factor holds the division.
        if inner.masks or inner.softcap or number < 0:
            raise NoMatchError
        return dataclasses.replace(inner, scale=inner.scale * number, softcap=number)
    scores = read_scores(op, one, depth)
    if scores.masks or scores.softcap:
        raise NoMatchError  # the masks would be scaled too
    factor = number if op_type == "Mul" else 1 / number
    return dataclasses.replace(scores, scale=scores.scale * factor)


def _read_added_mask(op: Builder, depth: int, one: ir.Value, other: ir.Value) -> Scores:
    for scores_input, mask in ((one, other), (other, one)):
        try:
            scores = read_scores(op, scores_input, depth)
        except NoMatchError:
            continue
        if _is_zero(mask):
            return scores
        return dataclasses.replace(scores, masks=(*scores.masks, (mask, False, 0.0)))
    raise NoMatchError


def _is_zero(value: ir.Value) -> bool:
    """Return whether a value is a product with 0, as `torch.baddbmm` with beta 0 exports it."""
    product = producer_of(value, "Mul")
    return product is not None and 0.0 in map(_number, product.inputs)


def _read_filled_mask(
    op: Builder, depth: int, condition: ir.Value, yes: ir.Value, no: ir.Value
) -> Scores:
    scores_input, low, visible = yes, _number(no), True
    if low is None:
        scores_input, low, visible = no, _number(yes), False
    if low is None or low > ABSORBING:
        raise NoMatchError
    scores = read_scores(op, scores_input, depth)
    if not visible:
        negated = value_before(condition, "Not")
        if negated is None:
            negated = set_type(op("Not", condition), ir.DataType.BOOL, condition.shape)
        condition = negated
    return dataclasses.replace(scores, masks=(*scores.masks, (condition, True, low)))


def _number(value: ir.Value | None) -> float | None:
    """Return the value of a constant scalar; None for other values."""
    if value is None:
        return None
    array = constant_array(trace_back(value, ("Cast", "Identity", "Expand")))
    if array is None or array.size != 1:
        return None
    return float(array.astype(np.float64).reshape(()))


def equation(node: ir.Node, first: int = 0) -> tuple[str, str, str]:
    """Return the letters of both inputs of an `Einsum`, and of its output.

    Args:
        node: The node.
        first: The index of the input whose letters come first.

    Raises:
        NoMatchError: If it does not have two inputs, or if letters repeat within one.
    """
    text = node.attributes.get_string("equation", "").replace(" ", "")
    sides, arrow, out = text.partition("->")
    parts = sides.split(",")
    if not arrow or len(parts) != 2 or "." in text or any(len(set(p)) < len(p) for p in parts):
        raise NoMatchError
    return parts[first], parts[1 - first], out


def order_axes(op: Builder, value: ir.Value, have: str, want: Sequence[str]) -> ir.Value:
    """Return a value in an order of axes, with an axis of 1 for heads if it has none.

    Args:
        op: Builder of the nodes.
        value: The value.
        have: A letter for each of its axes.
        want: The letters of the result: batch, heads and two more.

    Raises:
        NoMatchError: If the letters differ in more than the heads.
    """
    shared = [letter for letter in want if letter in have]
    if sorted(have) != sorted(shared) or (len(shared) < len(want) != 4):
        raise NoMatchError
    if len(shared) < len(want) and (want[1] in have or len(shared) != 3):
        raise NoMatchError
    ordered = permute(op, value, [have.index(letter) for letter in shared])
    return ordered if len(shared) == len(want) else add_head_axis(op, ordered)


def permute(op: Builder, value: ir.Value, perm: Sequence[int]) -> ir.Value:
    """Return a value transposed; the value itself if no axis moves.

    Args:
        op: Builder of the nodes.
        value: The value; its shape is known.
        perm: The axes of the value, in the order of the result.
    """
    if list(perm) == sorted(perm):
        return value
    shape = ir.Shape([dims(value)[axis] for axis in perm])
    return set_type(op("Transpose", value, perm=list(perm)), value.dtype, shape)


def add_head_axis(op: Builder, value: ir.Value) -> ir.Value:
    """Return a value with an axis of size 1 for heads after the batch axis.

    Args:
        op: Builder of the nodes.
        value: The value; its shape is known.
    """
    first, *rest = dims(value)
    return set_type(op("Unsqueeze", value, op.ints(1)), value.dtype, ir.Shape([first, 1, *rest]))
