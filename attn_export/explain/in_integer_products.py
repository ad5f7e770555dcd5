"""Known mistakes in products of integers (DynamicQuantizeLinear, MatMulInteger)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from attn_export.explain import in_integers
from attn_export.explain.in_activations import INTEGERS, NOT_ROUNDED, SCALE
from attn_export.explain.in_integers import StoredWeight
from attn_export.explain.mistake import (
    ArrayChange,
    Mistake,
    Replacement,
    change_in_order,
    round_to_bfloat16,
    unchanged,
)
from attn_export.float64.evaluate import Evaluation
from attn_export.tensorfile import Array

Multiply = Callable[[StoredWeight, Array], Array]
"""Function that takes a weight `[K, N]` and an input `[…, K]`, and returns their product."""


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product of integers in a right graph.

    Attributes:
        output: The name of the product, after both scales are applied.
        weight_name: The name of the initialiser with the weight's integers.
    """

    x: str
    output: str
    node: str
    weight_name: str
    weight: StoredWeight


@dataclasses.dataclass(frozen=True)
class _Rounding:
    """The steps of DynamicQuantizeLinear and of the product. The defaults are right.

    Attributes:
        axes: Axes of the input whose elements share a scale and a zero point; None for all axes.
        symmetric: Whether the range is as large below 0 as above.
        levels: The number of integers in the range, less one.
        low: The integer at which values are clipped from below.
        high: The integer at which values are clipped from above.
        wraps: Whether integers out of range lose their upper bits, instead of being clipped.
        integer_product: Multiplies integers `[…, K]` and `[K, N]`.
    """

    axes: tuple[int, ...] | None = None
    symmetric: bool = False
    levels: float = 255.0
    scale: ArrayChange = unchanged
    scale_read: ArrayChange = unchanged
    zero_shift: float = 0.0
    zero_read: ArrayChange = unchanged
    rounding: ArrayChange = np.rint
    low: float = 0.0
    high: float = 255.0
    wraps: bool = False
    change_integers: ArrayChange = unchanged
    integer_product: Callable[[Array, Array], Array] = np.matmul

    def __call__(self, weight: StoredWeight, x: Array) -> Array:
        least = np.minimum(x.min(axis=self.axes, keepdims=True), 0.0)
        largest = np.maximum(x.max(axis=self.axes, keepdims=True), 0.0)
        if self.symmetric:
            largest = np.maximum(-least, largest)
            least = -largest
        scale = self.scale(np.where(largest > least, (largest - least) / self.levels, 1.0))
        zero = np.rint(-least / scale) + self.zero_shift
        q = self.rounding(x / scale) + zero
        q = self.change_integers(q % 256 if self.wraps else np.clip(q, self.low, self.high))
        zeros = np.broadcast_to(self.zero_read(zero), x.shape)
        integers = weight.q - weight.z
        product = self.integer_product(q, integers) - zeros @ integers
        return np.asarray(product * self.scale_read(scale) * weight.s)


def _saturate_pairs(q: Array, w: Array) -> Array:
    """Add two products at a time in 16 bits with saturation, as x86 does without VNNI."""
    pairs = q.reshape(*q.shape[:-1], -1, 2)[..., None] * w.reshape(-1, 2, w.shape[-1])
    return np.asarray(np.clip(pairs.sum(-2), -(2**15), 2**15 - 1).sum(-2))


ZERO, SUMS = "activation zero point", "sums of 16 bits"
READINGS: Final[tuple[tuple[str, str, Multiply], ...]] = (
    (NOT_ROUNDED, "{} is not rounded to 8 bits", lambda weight, x: x @ weight.dequantised),
    (SCALE, "{} has a scale for each token, not one for all", _Rounding(axes=(-1,))),
    (SCALE, "{} has a scale for each batch element, not one for all", _Rounding(axes=(-2, -1))),
    (SCALE, "the range of {} is symmetric around 0", _Rounding(symmetric=True)),
    (SCALE, "the range of {} is divided by 127, not 255", _Rounding(levels=127)),
    (SCALE, "the range of {} is divided by 254, not 255", _Rounding(levels=254)),
    (SCALE, "the range of {} is divided by 256, not 255", _Rounding(levels=256)),
    (SCALE, "the scale of {} is doubled", _Rounding(scale=lambda s: s * 2)),
    (SCALE, "the scale of {} is halved", _Rounding(scale=lambda s: s / 2)),
    (SCALE, "the scale of {} is squared", _Rounding(scale=np.square)),
    (SCALE, "the scale of {} is rounded to bfloat16", _Rounding(scale=round_to_bfloat16)),
    (SCALE, "the scale of {} is rounded to float16",
     _Rounding(scale=lambda s: s.astype(np.float16).astype(np.float64))),
    (SCALE, "the scale of {} is doubled in dequantisation", _Rounding(scale_read=lambda s: s * 2)),
    (SCALE, "the scale of {} is halved in dequantisation", _Rounding(scale_read=lambda s: s / 2)),
    (SCALE, "the scale of {} is rounded to bfloat16 in dequantisation",
     _Rounding(scale_read=round_to_bfloat16)),
    (ZERO, "the zero point of {} is one too high", _Rounding(zero_shift=1)),
    (ZERO, "the zero point of {} is one too low", _Rounding(zero_shift=-1)),
    (ZERO, "the zero point of {} is one too high, and integers wrap",
     _Rounding(zero_shift=1, wraps=True)),
    (ZERO, "the zero point that is subtracted from {} is one too high",
     _Rounding(zero_read=lambda z: z + 1)),
    (ZERO, "the zero point that is subtracted from {} is one too low",
     _Rounding(zero_read=lambda z: z - 1)),
    (ZERO, "no zero point is subtracted from {}", _Rounding(zero_read=np.zeros_like)),
    (ZERO, "128 is subtracted from {}, not its zero point",
     _Rounding(zero_read=lambda z: np.full_like(z, 128.0))),
    (INTEGERS, "quotients of {} are rounded down", _Rounding(rounding=np.floor)),
    (INTEGERS, "quotients of {} are rounded up", _Rounding(rounding=np.ceil)),
    (INTEGERS, "quotients of {} are rounded to 0", _Rounding(rounding=np.trunc)),
    (INTEGERS, "integers of {} are clipped at 254", _Rounding(high=254)),
    (INTEGERS, "integers of {} are clipped at 1", _Rounding(low=1)),
    (INTEGERS, "integers of {} are clipped at 127", _Rounding(high=127)),
    (INTEGERS, "integers of {} are read as signed",
     _Rounding(change_integers=lambda q: (q + 128) % 256 - 128)),
    (INTEGERS, "integers of {} are read 128 too low", _Rounding(change_integers=lambda q: q - 128)),
    (INTEGERS, "{} has 7 bits", _Rounding(change_integers=lambda q: np.floor(q / 2) * 2)),
    (INTEGERS, "{} has 4 bits", _Rounding(change_integers=lambda q: np.floor(q / 16) * 16)),
    (SUMS, "pairs of products of {} are added in 16 bits, which saturate",
     _Rounding(integer_product=_saturate_pairs)),
    ("wrong batch element", "{} has the tokens of the previous batch element",
     lambda weight, x: _Rounding()(weight, np.roll(x, 1, 0))),
)  # fmt: skip
"""Kind, effect and product of each mistake; ``{}`` stands for the input."""


def product_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes in rounding inputs and in reading weights of products of integers.

    They are made in all products together, in the products of each input, and in each product
    alone. The graph has DynamicQuantizeLinear and MatMulInteger.
    """
    products = list(_integer_products(evaluation))
    weight_readings = [
        (kind, effect, functools.partial(_misread_weight, reading))
        for kind, effect, reading in in_integers.READINGS
    ]
    for readings, name in ((READINGS, _input_name), (weight_readings, _weight_name)):
        for kind, effect, multiply in readings:
            for group in _groups(products):
                replaced = _multiply(evaluation, group, multiply)
                node = group[0].node if len(group) < len(products) else ""
                yield Mistake(kind, effect.format(name(group)), node, replaced)


def fitted_input_scales(evaluation: Evaluation) -> list[Callable[[float], Mistake]]:
    """Return functions from a factor to the mistake of a scale that is wrong by this factor."""
    products = list(_integer_products(evaluation))

    def make(group: Sequence[_Product], on_dequantisation: bool, factor: float) -> Mistake:
        change = functools.partial(np.multiply, factor)
        multiply = _Rounding(scale_read=change) if on_dequantisation else _Rounding(scale=change)
        effect = f"the scale of {_input_name(group)} is {factor:.4g} times the right one"
        if on_dequantisation:
            effect += " in dequantisation"
        return Mistake(SCALE, effect, group[0].node, _multiply(evaluation, group, multiply))

    return [
        functools.partial(make, group, on_dequantisation)
        for group in _groups(products)
        for on_dequantisation in (False, True)
    ]


def _groups(products: Sequence[_Product]) -> Iterator[Sequence[_Product]]:
    """Yield the products that one mistake may concern: all, those of each input, and each alone."""
    by_input: dict[str, list[_Product]] = {}
    for product in products:
        by_input.setdefault(product.x, []).append(product)
    if len(by_input) > 1:
        yield products
    for group in by_input.values():
        if len(group) > 1:
            yield group
        for product in group:
            yield [product]


def _input_name(group: Sequence[_Product]) -> str:
    return f"the input of {' and '.join(product.node for product in group)}"


def _weight_name(group: Sequence[_Product]) -> str:
    return " and ".join(product.weight_name for product in group)


def _integer_products(evaluation: Evaluation) -> Iterator[_Product]:
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
            q, s = np.asarray(q, np.float64), np.atleast_2d(np.asarray(scales, np.float64))
            weight = StoredWeight(q, s, np.zeros_like(s), 8)
            yield _Product(rounded.input[0], node.output[0], node.name, product.input[1], weight)


def _misread_weight(reading: in_integers.WeightReading, weight: StoredWeight, x: Array) -> Array:
    return _Rounding()(reading(weight), x)


def _multiply(
    evaluation: Evaluation, products: Sequence[_Product], multiply: Multiply
) -> Replacement:
    """Return the change of products, in the order of the graph, to those by `multiply`."""
    changes = [
        (product.x, product.output, functools.partial(multiply, product.weight))
        for product in products
    ]
    return change_in_order(evaluation, changes)
