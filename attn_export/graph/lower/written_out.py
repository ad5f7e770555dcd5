"""Attention that is written out in operators, as one `Attention` node.

A `Softmax` over the last axis is the middle of it. Towards the inputs there are scales, masks that
are added or filled in, a softcap and casts, up to the product of queries and keys; towards the
outputs the product with the values. Each may be a `MatMul` or an `Einsum`, of rank 3 or 4. What
is something else ends the search, and the nodes stay as they are.

The node means the same but for rows of which all keys are hidden by -inf: those are NaN where they
are written out. Callers must compare the graph with its source: `build` does so with all cases,
`lower` with random inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import dims, nodes_of
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.written_scores import (
    Mask,
    NoMatchError,
    Scores,
    equation,
    permuted,
    read_scores,
    transposed,
    unsqueezed,
)

AFTER_SOFTMAX = 3
"""The `qk_matmul_output_mode` of the weights."""


def recognise_attention(model: ir.Model) -> int:
    """Replace attention that is written out by `Attention` nodes, in place.

    Returns:
        Their number.
    """
    return sum(_recognised(model, softmax) for softmax in nodes_of(model, "Softmax"))


def _recognised(model: ir.Model, softmax: ir.Node) -> bool:
    source = softmax.inputs[0]
    if source is None or softmax.attributes.get_int("axis", -1) not in (-1, len(dims(source)) - 1):
        return False
    try:
        product = _reader(softmax.outputs[0])
        op = Builder(model, product)
        weights = next(i for i, x in enumerate(product.inputs) if _comes_from(x, softmax))
        scores = read_scores(op, source)
        value, order = _values(op, product, weights)
        attended, shown = _attention(op, scores, value, softmax.outputs[0])
        found = permuted(op, attended, order)
    except (NoMatchError, StopIteration):
        return False
    take_over(product.outputs[0], found)
    if shown is not None:
        take_over(softmax.outputs[0], shown)
        model.graph.sort()  # others may read the weights before the values are there
    return True


# -- towards the outputs -------------------------------------------------------------------------


def _reader(value: ir.Value) -> ir.Node:
    """Return the only product that reads the weights, behind casts and the like."""
    while True:
        products = [node for node, _ in value.uses() if node.op_type in ("MatMul", "Einsum")]
        if len(products) == 1:
            return products[0]
        if len(value.uses()) != 1 or value.is_graph_output():
            raise NoMatchError
        ((node, _),) = value.uses()
        if node.op_type not in ("Cast", "Identity"):
            raise NoMatchError
        value = node.outputs[0]


def _comes_from(value: ir.Value | None, node: ir.Node) -> bool:
    while value is not None and value.producer() is not None:
        made = value.producer()
        assert made is not None
        if made is node:
            return True
        if made.op_type not in ("Cast", "Identity"):
            return False
        value = made.inputs[0]
    return False


def _values(op: Builder, product: ir.Node, weights: int) -> tuple[ir.Value, list[int]]:
    """Return the values `[..., S, Dv]`, and the order of the product's axes in `[..., L, Dv]`."""
    value = product.inputs[1 - weights]
    if value is None:
        raise NoMatchError
    if product.op_type == "MatMul":
        if weights != 0:
            raise NoMatchError
        return value, list(range(len(dims(value))))
    of_weights, of_value, out = equation(product, weights)
    batch, row, key = of_weights[:-2], of_weights[-2], of_weights[-1]
    width = [letter for letter in of_value if letter not in of_weights]
    if len(width) != 1 or key not in of_value or set(out) != {*batch, row, width[0]}:
        raise NoMatchError
    ordered = transposed(op, value, of_value, [*batch, key, *width])
    return ordered, [[*batch, row, *width].index(letter) for letter in out]


# -- the node ------------------------------------------------------------------------------------


Outputs = tuple[ir.Value, ir.Value | None]
"""The attention, and the weights where others than the product with the values read them."""


def _attention(op: Builder, scores: Scores, value: ir.Value, softmax: ir.Value) -> Outputs:
    """Add the node, and return its outputs in the rank of the values."""
    parts = [scores.query, scores.key, value]
    ranks = {len(dims(part)) for part in parts}
    if ranks not in ({3}, {4}):
        raise NoMatchError
    masks = list(scores.masks)
    shown = len(softmax.uses()) > 1 or softmax.is_graph_output()
    if shown and softmax.dtype != scores.query.dtype:
        raise NoMatchError
    if ranks == {4}:
        return _node(op, scores, parts, _mask(op, masks, scores.query), shown=shown)
    heads = [_with_heads(part) for part in parts]
    if any(part is None for part in heads) or not _fit_heads(masks):
        heads = [unsqueezed(op, part) for part in parts]
        masks = [(unsqueezed(op, m) if len(dims(m)) == 3 else m, b, low) for m, b, low in masks]
    whole = [part for part in heads if part is not None]
    found, weights = _node(op, scores, whole, _mask(op, masks, scores.query), shown=shown)
    width = dims(value)[-1]
    if not isinstance(width, int):
        raise NoMatchError
    target = op("Concat", op.ints(-1), op.size(scores.query, 1), op.ints(width), axis=0)
    flat = op("Reshape", found, target)
    flat.shape, flat.type = ir.Shape([*dims(scores.query)[:2], width]), found.type
    if weights is not None:
        sizes = [op.ints(-1), op.size(scores.query, 1), op("Shape", weights, start=3)]
        weights = op("Reshape", weights, op("Concat", *sizes, axis=0))
    return flat, weights


def _with_heads(value: ir.Value) -> ir.Value | None:
    """Return `[B, H, n, m]` of which a value `[B·H, n, m]` is a view, or None."""
    made = value.producer()
    if made is None or made.op_type != "Reshape" or made.inputs[0] is None:
        return None
    source = made.inputs[0]
    return source if len(dims(source)) == 4 and dims(source)[-1] == dims(value)[-1] else None


def _fit_heads(masks: Sequence[Mask]) -> bool:
    """Return whether masks of scores `[B·H, L, S]` are the same for all of them."""
    return all(len(dims(mask)) == 2 for mask, *_ in masks)


def _mask(op: Builder, masks: Sequence[Mask], like: ir.Value) -> ir.Value | None:
    """Return all masks as one: bool if all of them hide by -inf, else added numbers."""
    if not masks:
        return None
    dtype = like.dtype
    if dtype is None or any(not dims(mask) for mask, *_ in masks):
        raise NoMatchError
    if all(is_bool and low == -math.inf for _, is_bool, low in masks):
        found = masks[0][0]
        for other, *_ in masks[1:]:
            found = _combined(op, "And", found, other, ir.DataType.BOOL)
        return found
    numbers = []
    for mask, is_bool, low in masks:
        number = mask
        if is_bool:
            floor = max(low, float(np.finfo(dtype.numpy()).min)) if low > -math.inf else low
            number = op("Where", mask, op.number(0.0, dtype), op.number(floor, dtype))
            number.shape, number.dtype = mask.shape, dtype
        elif mask.dtype not in (None, dtype):
            number = op("Cast", mask, to=dtype)
            number.shape, number.dtype = mask.shape, dtype
        numbers.append(number)
    found = numbers[0]
    for other in numbers[1:]:
        found = _combined(op, "Add", found, other, dtype)
    return found


def _combined(
    op: Builder, op_type: str, one: ir.Value, other: ir.Value, dtype: ir.DataType
) -> ir.Value:
    """Return two masks as one; each axis is that of the one that is not 1."""
    found = op(op_type, one, other)
    rank = max(len(dims(one)), len(dims(other)))
    first, second = ((*(1,) * (rank - len(dims(x))), *dims(x)) for x in (one, other))
    found.shape = ir.Shape([b if a == 1 else a for a, b in zip(first, second, strict=True)])
    found.dtype = dtype
    return found


def _node(
    op: Builder,
    scores: Scores,
    parts: Sequence[ir.Value],
    mask: ir.Value | None,
    *,
    shown: bool,
) -> Outputs:
    query, key, value = parts
    widths = (dims(query)[-1], dims(key)[-1], dims(value)[-1], dims(query)[1], dims(key)[1])
    if not all(isinstance(size, int) for size in widths) or scores.scale <= 0:
        raise NoMatchError
    if mask is not None and len(dims(mask)) not in (2, 3, 4):
        raise NoMatchError
    attributes: dict[str, Any] = {"softcap": scores.softcap} if scores.softcap else {}
    attributes |= {"qk_matmul_output_mode": AFTER_SOFTMAX} if shown else {}
    inputs = [query, key, value, *([] if mask is None else [mask])]
    outputs = op.several("Attention", inputs, 4 if shown else 1, scale=scores.scale, **attributes)
    outputs[0].shape = ir.Shape([*dims(query)[:3], dims(value)[-1]])
    for output in outputs:
        output.type = query.type
    return outputs[0], outputs[3] if shown else None
