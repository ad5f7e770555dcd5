"""The scores of attention that is written out in operators, from the softmax to the inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import dims
from attn_export.graph.lower.node_builder import Builder

ABSORBING = -1e9
"""The largest finite number that hides a key whatever its score: added to a float32 score, it
leaves nothing of it."""


Mask = tuple[ir.Value, bool, float]
"""A mask that is added; or one that is filled in, True for visible keys, and the number for the
others."""


class NoMatchError(Exception):
    """Something that no attention has."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Parts of the scores that a softmax is of.

    Attributes:
        query: `[..., L, D]`.
        key: `[..., S, D]`.
        scale: Factor on their product.
        softcap: 0 for none.
        masks: From the inside out.
    """

    query: ir.Value
    key: ir.Value
    scale: float = 1.0
    softcap: float = 0.0
    masks: tuple[Mask, ...] = ()


def read_scores(op: Builder, value: ir.Value) -> Scores:
    """Return the parts of scores.

    Args:
        op: Builder of the nodes that are needed in front of the product with the values.
        value: The input of the softmax.

    Raises:
        NoMatchError: If they are no scores of attention.
    """
    node = value.producer()
    if node is None:
        raise NoMatchError
    inputs = list(node.inputs)
    match node.op_type:
        case "MatMul":
            left, right = inputs
            assert left is not None
            return Scores(left, _swapped(op, right))
        case "Einsum":
            return _einsum_scores(op, node)
        case "Cast" | "Identity":
            assert inputs[0] is not None
            return read_scores(op, inputs[0])
        case "Mul" | "Div":
            return _scaled(op, node)
        case "Add":
            return _added(op, inputs)
        case "Where":
            return _filled(inputs, op)
    raise NoMatchError


def _swapped(op: Builder, value: ir.Value | None) -> ir.Value:
    """Return keys `[..., S, D]` of the second input of a product, `[..., D, S]`."""
    if value is None or len(dims(value)) < 3:
        raise NoMatchError
    made = value.producer()
    rank = len(dims(value))
    perm = [*range(rank - 2), rank - 1, rank - 2]
    if made is not None and made.op_type == "Transpose" and made.inputs[0] is not None:
        inner = list(made.attributes.get_ints("perm", range(rank)[::-1]))
        value, perm = made.inputs[0], [inner[axis] for axis in perm]
    if perm == sorted(perm):
        return value
    found = op("Transpose", value, perm=perm)
    found.shape, found.type = ir.Shape([dims(value)[axis] for axis in perm]), value.type
    return found


def _einsum_scores(op: Builder, node: ir.Node) -> Scores:
    one, other, out = equation(node)
    query, key = node.inputs
    assert query is not None
    assert key is not None
    batch, row, column = out[:-2], out[-2], out[-1]
    if row not in one:
        query, key, one, other = key, query, other, one
    width = set(one) - {*batch, row}
    if column not in other or len(width) != 1 or not set(other) - {column} <= set(one) - {row}:
        raise NoMatchError
    last = width.pop()
    return Scores(
        transposed(op, query, one, [*batch, row, last]),
        transposed(op, key, other, [*batch, column, last]),
    )


def _scaled(op: Builder, node: ir.Node) -> Scores:
    one, other = node.inputs
    number = _number(other)
    if number is None and node.op_type == "Mul":
        one, number = other, _number(one)
    if number is None or one is None or not math.isfinite(number) or number == 0:
        raise NoMatchError
    factor = number if node.op_type == "Mul" else 1 / number
    made = one.producer()
    if made is not None and made.op_type == "Tanh" and node.op_type == "Mul":
        assert made.inputs[0] is not None
        inner = read_scores(op, made.inputs[0])
        # softcap * tanh(scores / softcap): the inner factor holds the division.
        if inner.masks or inner.softcap or number < 0:
            raise NoMatchError
        return dataclasses.replace(inner, scale=inner.scale * number, softcap=number)
    found = read_scores(op, one)
    if found.masks or found.softcap:
        raise NoMatchError  # the masks would be scaled too
    return dataclasses.replace(found, scale=found.scale * factor)


def _added(op: Builder, inputs: list[ir.Value | None]) -> Scores:
    for own, mask in (inputs, inputs[::-1]):
        if own is None or mask is None:
            continue
        try:
            found = read_scores(op, own)
        except NoMatchError:
            continue
        if _is_zero(mask):
            return found
        return dataclasses.replace(found, masks=(*found.masks, (mask, False, 0.0)))
    raise NoMatchError


def _is_zero(value: ir.Value) -> bool:
    """Return whether a value is a product with 0, as of `torch.baddbmm` with beta 0."""
    made = value.producer()
    return made is not None and made.op_type == "Mul" and 0.0 in map(_number, made.inputs)


def _filled(inputs: list[ir.Value | None], op: Builder) -> Scores:
    condition, yes, no = inputs
    low, visible = _number(no), True
    own = yes
    if low is None:
        low, visible, own = _number(yes), False, no
    if low is None or low > ABSORBING or own is None or condition is None:
        raise NoMatchError
    found = read_scores(op, own)
    if not visible:
        made = condition.producer()
        if made is not None and made.op_type == "Not" and made.inputs[0] is not None:
            condition = made.inputs[0]
        else:
            negated = op("Not", condition)
            negated.shape, negated.dtype = condition.shape, ir.DataType.BOOL
            condition = negated
    return dataclasses.replace(found, masks=(*found.masks, (condition, True, low)))


def _number(value: ir.Value | None) -> float | None:
    """Return the value of a constant scalar."""
    while value is not None and value.const_value is None:
        made = value.producer()
        if made is None or made.op_type not in ("Cast", "Identity", "Expand"):
            return None
        value = made.inputs[0]
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return float(value.const_value.numpy().astype(np.float64).reshape(()))


def equation(node: ir.Node, first: int = 0) -> tuple[str, str, str]:
    """Return the letters of both inputs of an `Einsum`, and of its output.

    Args:
        node: The node.
        first: The index of the input whose letters come first.

    Raises:
        NoMatchError: If it has another number of inputs, or letters that repeat.
    """
    text = node.attributes.get_string("equation", "").replace(" ", "")
    sides, arrow, out = text.partition("->")
    parts = sides.split(",")
    if not arrow or len(parts) != 2 or "." in text or any(len(set(p)) < len(p) for p in parts):
        raise NoMatchError
    return parts[first], parts[1 - first], out


def transposed(op: Builder, value: ir.Value, have: str, want: Sequence[str]) -> ir.Value:
    """Return a value with its axes in another order, and an axis of 1 for heads that it lacks.

    Args:
        op: The builder.
        value: The value.
        have: A letter for each of its axes.
        want: The letters of the result: batch, heads and two more.

    Raises:
        NoMatchError: If they are others.
    """
    shared = [letter for letter in want if letter in have]
    if sorted(have) != sorted(shared) or (len(shared) < len(want) != 4):
        raise NoMatchError
    if len(shared) < len(want):
        if want[1] in have or len(shared) != 3:
            raise NoMatchError
        value = transposed(op, value, have, shared)
        found = op("Unsqueeze", value, op.ints(1))
        first, *rest = dims(value)
        found.shape, found.type = ir.Shape([first, 1, *rest]), value.type
        return found
    perm = [have.index(letter) for letter in want]
    if perm == sorted(perm):
        return value
    found = op("Transpose", value, perm=perm)
    found.shape, found.type = ir.Shape([dims(value)[axis] for axis in perm]), value.type
    return found
