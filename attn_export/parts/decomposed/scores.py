"""Reader of the scores of attention that is written out in operators."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import dims, producer_of, set_type, value_before
from attn_export.graph.lower.node_builder import Builder
from attn_export.interface import MASK_FLOOR
from attn_export.parts.decomposed.views import MOVES, NoMatchError, number_of, scaling

_ABSORBING = -1e9
"""The largest finite number that hides a key: added to a float32 score, it absorbs the score."""

_MOST_DEPTH = 16
"""The largest number of nodes between a product and its softmax. The search follows both operands
of each sum."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask on scores.

    Attributes:
        leads: The axes of the scores, where it is applied, before those of queries and keys.
        visible: Whether it is a bool mask, True for visible keys. If not, it is added.
        low: The number that a bool mask fills in for hidden keys.
    """

    value: ir.Value
    leads: tuple[Size, ...]
    visible: bool = False
    low: float = 0.0
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Operand:
    """A factor of a product, and the order of its axes; None stands for an axis of 1."""

    value: ir.Value
    perm: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Scores:
    """Parts of the scores that a softmax reads.

    Attributes:
        query: `[..., L, D]`.
        key: `[..., S, D]`.
        leads: The axes of their product before L and S.
        masks: The masks in the order in which they are applied.
        sink: A score after those of the keys, which takes part in the softmax and has no value,
            `[..., L, 1]`; None if there is none.
    """

    query: Operand
    key: Operand
    leads: tuple[Size, ...]
    scale: float = 1.0
    softcap: float = 0.0
    masks: tuple[Mask, ...] = ()
    sink: ir.Value | None = None


def read_scores(op: Builder, value: ir.Value, depth: int = _MOST_DEPTH) -> Scores:
    """Return the parts of the scores, from the input of the softmax to the product."""
    node = value.producer()
    if node is None or node.domain or depth == 0 or not node.inputs or None in node.inputs:
        raise NoMatchError
    if node.op_type in ("MatMul", "Einsum"):
        query, key, perm, leads = factors(node)
        if list(perm) != sorted(perm):
            raise NoMatchError
        return Scores(query, _swapped(key), leads)
    inputs = [value_read for value_read in node.inputs if value_read is not None]
    match node.op_type, inputs:
        case "Mul" | "Div", [_, _]:
            return _read_scaled(op, depth - 1, node)
        case "Add" | "Sub", [one, other]:
            return _read_added_mask(op, depth - 1, node, one, other)
        case "Where", [condition, yes, no]:
            return _read_filled_mask(op, depth - 1, value, condition, yes, no)
        case "Concat", [one, sink]:
            return _read_sink(op, depth - 1, node, one, sink)
        case "Max" | "Clip", [one, floor]:
            return _read_floor(op, depth - 1, one, floor)
    if node.op_type != "Cast" and not (node.op_type in MOVES and keeps_rows(inputs[0], value)):
        raise NoMatchError
    return read_scores(op, inputs[0], depth - 1)


def keeps_rows(before: ir.Value, after: ir.Value) -> bool:
    """Return whether a value has the same queries and keys after its leading axes were merged."""
    rows = dims(before)[-2:], dims(after)[-2:]
    kept = len(rows[0]) == len(rows[1]) == 2 and all(map(known_equal, *rows))
    node = after.producer()
    return kept and node is not None and node.op_type not in ("Transpose", "Expand")


Factors = tuple[Operand, Operand, tuple[int, ...], tuple[Size, ...]]
"""Factors `[..., n, k]` and `[..., k, m]` of a product, the order in which the axes of its output
are `[..., n, m]`, and the sizes of its leading axes."""


def factors(node: ir.Node, first: int = 0) -> Factors:
    """Return the factors of a product of matrices, with one of its inputs as the first."""
    operands = [x for x in node.inputs if x is not None and dims(x)]
    out = dims(node.outputs[0])
    if len(operands) != 2 or len(node.inputs) != 2 or len(out) < 2:
        raise NoMatchError
    one, other = operands[first], operands[1 - first]
    if node.op_type == "Einsum":
        return _einsum_factors(node, one, other, first)
    ranks = [len(dims(x)) for x in operands]
    if node.op_type != "MatMul" or min(ranks) < 2 or ranks[1] == 2 != ranks[0]:
        raise NoMatchError
    parts = [Operand(x, tuple(range(len(dims(x))))) for x in (one, other)]
    order = tuple(range(len(out)))
    if first:  # the transposed product is that of the transposed factors
        parts, order = [_swapped(part) for part in parts], (*order[:-2], order[-1], order[-2])
    return parts[0], parts[1], order, out[:-2]


def _einsum_factors(node: ir.Node, one: ir.Value, other: ir.Value, index: int) -> Factors:
    text = node.attributes.get_string("equation", "").replace(" ", "")
    sides, arrow, out = text.partition("->")
    parts = sides.split(",")
    repeats = any(len(set(part)) < len(part) for part in (*parts, out))
    if not arrow or len(parts) != 2 or "." in text or repeats:
        raise NoMatchError
    first, second = parts[index], parts[1 - index]
    summed = [letter for letter in first if letter not in out]
    rows = [letter for letter in out if letter not in second]
    columns = [letter for letter in out if letter not in first]
    if len(summed) != 1 or not rows or len(columns) != 1 or not set(second) <= {*out, *summed}:
        raise NoMatchError
    # Letters of heads that only the first factor has come before that of its rows.
    batch = [letter for letter in out if letter not in (rows[-1], *columns)]
    orders = [[*batch, rows[-1], *summed], [*batch, *summed, *columns]]
    found = [
        Operand(value, tuple(have.index(c) if c in have else None for c in order))
        for value, have, order in zip((one, other), (first, second), orders, strict=True)
    ]
    order = tuple(out.index(letter) for letter in (*batch, rows[-1], *columns))
    leads = tuple(dims(node.outputs[0])[axis] for axis in order[:-2])
    return found[0], found[1], order, leads


def _swapped(operand: Operand) -> Operand:
    *leads, rows, columns = operand.perm
    return Operand(operand.value, (*leads, columns, rows))


def _read_scaled(op: Builder, depth: int, node: ir.Node) -> Scores:
    found = scaling(node)
    if found is None:
        raise NoMatchError
    value, factor = found
    capped = value_before(value, "Tanh") if node.op_type == "Mul" else None
    if capped is not None:
        inner = read_scores(op, capped, depth)
        # softcap * tanh(scores / softcap): the inner factor holds the division.
        if inner.masks or inner.softcap or inner.sink is not None or factor < 0:
            raise NoMatchError
        return dataclasses.replace(inner, scale=inner.scale * factor, softcap=factor)
    scores = read_scores(op, value, depth)
    if scores.softcap or scores.sink is not None or (factor < 0 and scores.masks):
        raise NoMatchError
    masks = [
        dataclasses.replace(m, low=m.low * factor, factor=m.factor * factor) for m in scores.masks
    ]
    if any(mask.visible and mask.low > _ABSORBING for mask in masks):
        raise NoMatchError
    return dataclasses.replace(scores, scale=scores.scale * factor, masks=tuple(masks))


def _read_added_mask(
    op: Builder, depth: int, node: ir.Node, one: ir.Value, other: ir.Value
) -> Scores:
    if node.op_type == "Sub" and producer_of(other, "ReduceMax"):  # softmax does not change by it
        return read_scores(op, one, depth)
    pairs = ((one, other), (other, one)) if node.op_type == "Add" else ((one, other),)
    for scores_input, mask in pairs:
        if not _same_size(scores_input, node.outputs[0]):
            continue
        try:
            scores = read_scores(op, scores_input, depth)
        except NoMatchError:
            continue
        if scores.sink is not None:
            raise NoMatchError
        if _is_zero(mask):
            return scores
        factor = 1.0 if node.op_type == "Add" else -1.0
        added = Mask(mask, dims(node.outputs[0])[:-2], factor=factor)
        return dataclasses.replace(scores, masks=(*scores.masks, added))
    raise NoMatchError


def _same_size(one: ir.Value, other: ir.Value) -> bool:
    """Return whether a mask does not enlarge the scores."""
    return len(dims(one)) == len(dims(other)) and all(map(known_equal, dims(one), dims(other)))


def _is_zero(value: ir.Value) -> bool:
    """Return whether a value is 0, or a product with 0, as `baddbmm` with beta 0 exports it."""
    node = value.producer()
    product = node if node is not None and node.op_type == "Mul" else None
    return number_of(value) == 0 or (product is not None and 0.0 in map(number_of, product.inputs))


def _read_filled_mask(
    op: Builder, depth: int, out: ir.Value, condition: ir.Value, yes: ir.Value, no: ir.Value
) -> Scores:
    scores_input, low, visible = yes, number_of(no), True
    if low is None:
        scores_input, low, visible = no, number_of(yes), False
    if low is None or low > _ABSORBING:
        raise NoMatchError
    if not _same_size(scores_input, out):
        raise NoMatchError
    scores = read_scores(op, scores_input, depth)
    if scores.sink is not None:
        raise NoMatchError
    if not visible:
        negated = value_before(condition, "Not")
        if negated is None:
            negated = set_type(op("Not", condition), ir.DataType.BOOL, condition.shape)
        condition = negated
    # A lower number gives the same weights, and absorbs scores of any size.
    filled = Mask(
        condition, dims(scores_input)[:-2], visible=True,
        low=low if low == -math.inf else min(low, MASK_FLOOR),
    )  # fmt: skip
    return dataclasses.replace(scores, masks=(*scores.masks, filled))


def _read_sink(op: Builder, depth: int, node: ir.Node, one: ir.Value, sink: ir.Value) -> Scores:
    axis = node.attributes.get_int("axis", 0)
    if axis not in (-1, 3) or len(dims(one)) != 4 or dims(sink)[-1:] != (1,):
        raise NoMatchError
    scores = read_scores(op, one, depth)
    number = number_of(sink)
    if number is not None and sink.dtype is not None:  # its shape may be read from the scores
        dtype, shape = sink.dtype, ir.Shape([1, 1, 1, 1])
        source = op("Reshape", op.scalar(number, dtype), op.ints(1, 1, 1, 1))
        return dataclasses.replace(scores, sink=set_type(source, dtype, shape))
    return dataclasses.replace(scores, sink=value_before(sink, "Expand") or sink)


def _read_floor(op: Builder, depth: int, one: ir.Value, floor: ir.Value) -> Scores:
    """Read scores that are kept above a number, which matters only where all keys are hidden."""
    number = number_of(floor)
    if number is None or number > MASK_FLOOR:
        raise NoMatchError
    scores = read_scores(op, one, depth)
    if scores.sink is not None:
        raise NoMatchError
    masks = []
    for mask in scores.masks:
        value = mask.value
        if not mask.visible:
            if value.dtype is None:
                raise NoMatchError
            lowest = max(MASK_FLOOR, float(np.finfo(value.dtype.numpy()).min))
            floor = op.scalar(lowest, value.dtype)
            value = set_type(op("Max", value, floor), value.dtype, value.shape)
        masks.append(dataclasses.replace(mask, value=value, low=max(mask.low, MASK_FLOOR)))
    return dataclasses.replace(scores, masks=tuple(masks))
