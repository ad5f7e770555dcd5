"""Places in inputs rounded to 8 bits, and in products of integers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from attn_export.explain.in_weights import read_weight, stored_weights, weight_of
from attn_export.explain.mistake import Changes, GraphPlace, InTurn, in_order
from attn_export.float64.attention_steps import Steps
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.float64.integer_steps import packed_weight, round_by_block
from attn_export.quantiser import INTEGER_PRODUCTS, QuantisedWeight
from attn_export.tensorfile import Array

ROUNDING: Final = ("Reshape", "Mul", "Round", "Div", "Reshape")
"""The operators of a rounding by block, last first; each makes the previous one's first input."""

TOKEN = (-2, -1)
"""The axes of `[…, blocks, block]` that make up one token."""


def rounded_inputs(evaluation: Evaluation, values: Values) -> Iterator[GraphPlace]:
    """Find inputs rounded by block with nodes of ai.onnx or in MatMulNBits: all, and each alone."""
    yield from all_rounded_inputs(evaluation, values)
    parts = list(_rounded_inputs(evaluation))
    for node, part in parts if len(parts) > 1 else []:
        compute = in_order(evaluation, [part])
        yield GraphPlace(f"the input of {node.name}", node.name, compute=compute)


def all_rounded_inputs(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find all inputs rounded by block as one place, with the scales of weights as a step."""
    parts = [part for _, part in _rounded_inputs(evaluation)]
    if not parts:
        return

    def compute(values: Values, changes: Changes) -> Mapping[str, Array]:
        found = stored_weights(evaluation) if "weight_scales" in changes else ()
        read = {
            node.output[0]: read_weight(weight, Steps(changes)).dequantised(np.float64)
            for node, weight in found
        }
        return in_order(evaluation, parts, read)(values, changes)

    yield GraphPlace("the input of each product", "", compute=compute)


def _rounded_inputs(evaluation: Evaluation) -> Iterator[tuple[onnx.NodeProto, InTurn]]:
    for node in evaluation.nodes:
        attributes = {a.name: a.i for a in node.attribute}
        if node.op_type == "MatMulNBits" and attributes.get("accuracy_level") == INTEGER_PRODUCTS:
            constants = [evaluation.initializers.get(name) for name in node.input[1:]]
            compute = functools.partial(_multiply_by_block, constants, attributes)
            yield node, (node.input[0], node.output[0], compute)
        names = [node.op_type]
        source: onnx.NodeProto | None = node
        while source is not None and len(names) < len(ROUNDING):
            source = evaluation.producer.get(source.input[0]) if source.input else None
            names.append(source.op_type if source is not None else "")
        if tuple(names) == ROUNDING and source is not None:
            shape = evaluation.initializers.get(source.input[1])
            if shape is not None:
                compute = functools.partial(_round_input, int(shape[-1]))
                yield node, (source.input[0], node.output[0], compute)


def _multiply_by_block(
    constants: Sequence[Array | None], attributes: Mapping[str, Any], x: Array, changes: Changes
) -> Array:
    integers, scales, *zeros = constants
    at = Steps(changes)
    weight = packed_weight([integers, at.set("weight_scales", scales), *zeros], attributes)
    return np.asarray(round_by_block(x, attributes["block_size"], at) @ weight)


def _round_input(block: int, x: Array, changes: Changes) -> Array:
    return round_by_block(x, block, Steps(changes))


# -- products of integers -----------------------------------------------------------------------

Product = tuple[InTurn, str, onnx.NodeProto]
"""The computation of a product, the name of its weight, and its last node."""


def integer_products(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find products of MatMulInteger: all together, those of each input, and each alone."""
    return _places(
        evaluation, lambda group: "the input of " + " and ".join(x[2].name for x in group)
    )


def product_weights(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find the weights of products of MatMulInteger: all, those of each input, and each alone."""
    return _places(evaluation, lambda group: " and ".join(name for _, name, _ in group))


def _places(
    evaluation: Evaluation, name: Callable[[Sequence[Product]], str]
) -> Iterator[GraphPlace]:
    """Yield the products that one mistake may concern: all, those of each input, and each alone.

    The first one's node is named beside those that are not all.
    """
    by_input: dict[str, list[Product]] = {}
    found = list(_integer_products(evaluation))
    for product in found:
        by_input.setdefault(product[0][0], []).append(product)
    groups: list[Sequence[Product]] = [found] if len(by_input) > 1 else []
    for group in by_input.values():
        groups += [group] if len(group) > 1 else []
        groups += [[product] for product in group]
    for each in groups:
        node = each[0][2].name if len(each) < len(found) else ""
        yield GraphPlace(name(each), node, compute=in_order(evaluation, [x[0] for x in each]))


def _integer_products(evaluation: Evaluation) -> Iterator[Product]:
    """Yield the products of integers from DynamicQuantizeLinear, in the order of the graph."""
    producer = evaluation.producer
    for node in evaluation.nodes:
        cast = producer.get(node.input[0]) if node.op_type == "Mul" else None
        product = producer.get(cast.input[0]) if cast and cast.op_type == "Cast" else None
        if product is None or product.op_type != "MatMulInteger":
            continue
        rounded, factors = producer.get(product.input[0]), producer.get(node.input[1])
        q = evaluation.initializers.get(product.input[1])
        if rounded is None or rounded.op_type != "DynamicQuantizeLinear" or factors is None:
            continue
        scales = evaluation.initializers.get(factors.input[1])
        if q is not None and scales is not None:
            compute = functools.partial(_multiply, weight_of(q, scales))
            part = rounded.input[0], node.output[0], compute
            yield part, product.input[1], node


def _multiply(weight: QuantisedWeight, x: Array, changes: Changes) -> Array:
    """Return the product of an input `[…, K]`, as rounded by DynamicQuantizeLinear, and a weight.

    Steps: those of the weight; ``x``; ``range``, the least and the largest value; ``scale`` and
    ``zero``; ``quotients`` as rounded to integers; ``integers`` as clipped; ``read_scale`` and
    ``read_zero``; ``product`` of the integers; ``output``.
    """
    at = Steps(changes)
    stored = read_weight(weight, at)
    at["dequantised"] = stored.dequantised(np.float64)
    at["weights"] = stored.integers - stored.zero_points
    x = at.set("x", x)
    least, largest = at.set("range", (np.minimum(x.min(), 0.0), np.maximum(x.max(), 0.0)))
    scale = at.set("scale", np.where(largest > least, (largest - least) / 255, 1.0))
    zero = at.set("zero", np.rint(-least / scale))
    at["exact"] = x / scale
    at["unclipped"] = at.set("quotients", np.rint(at["exact"])) + zero
    integers = at.set("integers", np.clip(at["unclipped"], 0, 255))
    zeros = np.broadcast_to(at.set("read_zero", zero), x.shape)
    product = at.set("product", integers @ at["weights"]) - zeros @ at["weights"]
    return np.asarray(at.set("output", product * at.set("read_scale", scale) * stored.scales))
