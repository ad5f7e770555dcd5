"""Replacement of attention that is written out in operators by one `Attention` node.

The search starts at a `Softmax` over the last axis. Before it there may be scales, masks that are
added or filled in, a softcap and casts, up to the product of queries and keys; after it the product
with the values. Products may be `MatMul` or `Einsum`, of rank 3 or 4. If anything else is found,
the nodes stay.

The node is equivalent except for queries whose keys are all hidden by -inf, whose result is NaN if
attention is written out. Callers must compare the graph with its source: `build` does so with all
cases, `lower` with random inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import dims, nodes_of, set_type, trace_back, value_before
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.read import WEIGHTS
from attn_export.graph.lower.written_scores import (
    Mask,
    NoMatchError,
    Scores,
    add_head_axis,
    equation,
    order_axes,
    permute,
    read_scores,
)

PASSING = ("Cast", "Identity")
"""Operators that may lie between the weights and their product with the values."""


def recognise_attention(model: ir.Model) -> int:
    """Replace attention that is written out by `Attention` nodes, and return their number."""
    return sum(_recognise(model, node) for node in nodes_of(model, "Softmax"))


def _recognise(model: ir.Model, softmax: ir.Node) -> bool:
    source = softmax.inputs[0]
    if source is None or softmax.attributes.get_int("axis", -1) not in (-1, len(dims(source)) - 1):
        return False
    try:
        product = _find_product(softmax.outputs[0])
        op = Builder(model, product)
        sources = [None if x is None else trace_back(x, PASSING) for x in product.inputs]
        weights = sources.index(softmax.outputs[0])
        scores = read_scores(op, source)
        value, order = _values(op, product, weights)
        attended, weights_output = _attention(op, scores, value, softmax.outputs[0])
        output = permute(op, attended, order)
    except (NoMatchError, ValueError):
        return False
    take_over(product.outputs[0], output)
    if weights_output is not None:
        take_over(softmax.outputs[0], weights_output)
        model.graph.sort()  # readers of the weights may come before the values
    return True


# -- towards the outputs -------------------------------------------------------------------------


def _find_product(value: ir.Value) -> ir.Node:
    """Return the only product that reads the weights, directly or after Cast and Identity."""
    while True:
        products = [node for node, _ in value.uses() if node.op_type in ("MatMul", "Einsum")]
        if len(products) == 1:
            return products[0]
        if len(value.uses()) != 1 or value.is_graph_output():
            raise NoMatchError
        ((node, _),) = value.uses()
        if node.op_type not in PASSING:
            raise NoMatchError
        value = node.outputs[0]


def _values(op: Builder, product: ir.Node, weights: int) -> tuple[ir.Value, list[int]]:
    """Return the values `[..., S, Dv]`, and the axes of `[..., L, Dv]` in the product's order."""
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
    ordered = order_axes(op, value, of_value, [*batch, key, *width])
    return ordered, [[*batch, row, *width].index(letter) for letter in out]


# -- the node ------------------------------------------------------------------------------------


Outputs = tuple[ir.Value, ir.Value | None]
"""The output of attention; and the weights, if other nodes than the product read them."""


def _attention(op: Builder, scores: Scores, value: ir.Value, softmax: ir.Value) -> Outputs:
    """Add the node, and return its outputs with the rank of the values."""
    parts = [scores.query, scores.key, value]
    ranks = {len(dims(part)) for part in parts}
    if ranks not in ({3}, {4}):
        raise NoMatchError
    masks = list(scores.masks)
    weights_read = len(softmax.uses()) > 1 or softmax.is_graph_output()
    if weights_read and softmax.dtype != scores.query.dtype:
        raise NoMatchError
    if ranks == {4}:
        return _node(op, scores, parts, _mask(op, masks, scores.query), weights_read=weights_read)
    operands = [_source_with_heads(part) for part in parts]
    if any(part is None for part in operands) or not _are_shared(masks):
        operands = [add_head_axis(op, part) for part in parts]
        masks = [(add_head_axis(op, m) if len(dims(m)) == 3 else m, b, low) for m, b, low in masks]
    whole = [part for part in operands if part is not None]
    attended, weights = _node(
        op, scores, whole, _mask(op, masks, scores.query), weights_read=weights_read
    )
    width = dims(value)[-1]
    if not isinstance(width, int):
        raise NoMatchError
    target = op("Concat", op.ints(-1), op.size(scores.query, 1), op.ints(width), axis=0)
    flat = op("Reshape", attended, target)
    flat.shape, flat.type = ir.Shape([*dims(scores.query)[:2], width]), attended.type
    if weights is not None:
        sizes = [op.ints(-1), op.size(scores.query, 1), op("Shape", weights, start=3)]
        weights = op("Reshape", weights, op("Concat", *sizes, axis=0))
    return flat, weights


def _source_with_heads(value: ir.Value) -> ir.Value | None:
    """Return the `[B, H, n, m]` that a Reshape converts to `value` `[B·H, n, m]`, or None."""
    source = value_before(value, "Reshape")
    if source is None or len(dims(source)) != 4:
        return None
    return source if dims(source)[-1] == dims(value)[-1] else None


def _are_shared(masks: Sequence[Mask]) -> bool:
    """Return whether all masks are `[L, S]`, the same for all batch elements and heads."""
    return all(len(dims(mask)) == 2 for mask, *_ in masks)


def _mask(op: Builder, masks: Sequence[Mask], like: ir.Value) -> ir.Value | None:
    """Combine all masks: to a bool one if all of them hide by -inf, else to an added one."""
    if not masks:
        return None
    dtype = like.dtype
    if dtype is None or any(not dims(mask) for mask, *_ in masks):
        raise NoMatchError
    if all(is_bool and low == -math.inf for _, is_bool, low in masks):
        return _combine_all(op, "And", [mask for mask, *_ in masks], ir.DataType.BOOL)
    numbers = []
    for mask, is_bool, low in masks:
        number = mask
        if is_bool:
            floor = max(low, float(np.finfo(dtype.numpy()).min)) if low > -math.inf else low
            number = op("Where", mask, op.scalar(0.0, dtype), op.scalar(floor, dtype))
            set_type(number, dtype, mask.shape)
        elif mask.dtype not in (None, dtype):
            number = set_type(op("Cast", mask, to=dtype), dtype, mask.shape)
        numbers.append(number)
    return _combine_all(op, "Add", numbers, dtype)


def _combine_all(
    op: Builder, op_type: str, masks: Sequence[ir.Value], dtype: ir.DataType
) -> ir.Value:
    """Combine masks by an operator, and set the broadcast shape."""
    combined, *others = masks
    for other in others:
        rank = max(len(dims(combined)), len(dims(other)))
        first, second = ((1,) * (rank - len(dims(x))) + dims(x) for x in (combined, other))
        shape = [b if a == 1 else a for a, b in zip(first, second, strict=True)]
        combined = set_type(op(op_type, combined, other), dtype, ir.Shape(shape))
    return combined


def _node(
    op: Builder,
    scores: Scores,
    parts: Sequence[ir.Value],
    mask: ir.Value | None,
    *,
    weights_read: bool,
) -> Outputs:
    query, key, value = parts
    widths = (dims(query)[-1], dims(key)[-1], dims(value)[-1], dims(query)[1], dims(key)[1])
    if not all(isinstance(size, int) for size in widths) or scores.scale <= 0:
        raise NoMatchError
    if mask is not None and len(dims(mask)) not in (2, 3, 4):
        raise NoMatchError
    attributes: dict[str, Any] = {"softcap": scores.softcap} if scores.softcap else {}
    attributes |= {"qk_matmul_output_mode": WEIGHTS} if weights_read else {}
    inputs = [query, key, value, *([] if mask is None else [mask])]
    outputs = op.add_node(
        "Attention", inputs, 4 if weights_read else 1, scale=scores.scale, **attributes
    )
    outputs[0].shape = ir.Shape([*dims(query)[:3], dims(value)[-1]])
    for output in outputs:
        output.type = query.type
    return outputs[0], outputs[3] if weights_read else None
