"""Faults in how activations are rounded to 8 bits, and in the products of their integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from planted_faults import Array, Run, digits

from attn_export.float64 import contrib_operators
from attn_export.float64.evaluate import OPERATORS, widen_model
from attn_export.graph.lower.integer_products import multiply_integers
from attn_export.results import Arrays

Same = Callable[[Array], Array]
PLACES = {"in": ("q_proj", "k_proj", "v_proj"), "v": ("v_proj",), "out": ("out_proj",)}
PLACES["all"] = PLACES["in"] + PLACES["out"]
DOMAIN = "planted"


def same(x: Array) -> Array:
    return x


def run_in_float64(evaluator: ReferenceEvaluator) -> Run:
    """Return what runs a graph whose floating types were widened."""
    names = evaluator.output_names

    def run(inputs: Arrays) -> Mapping[str, Array]:
        wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in inputs.items()}
        with np.errstate(invalid="ignore"):  # a fault may overflow
            return dict(zip(names, evaluator.run(names, wide), strict=True))

    return run


# -- one scale and zero point for all of an input -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of integers, step by step.

    Attributes:
        steps: The steps from the least to the largest integer.
        share: A factor on the scale by which values are divided; `read_share` where it is read.
        shift: An addition to the zero point; `subtracted` is what is subtracted for it.
        wraps: Whether integers beyond the ends lose their upper bits, and are not clipped.
        axes: The axes of which each has one scale; None for all.
        symmetric: Whether the integers are of both signs, without a zero point.
    """

    steps: float = 255
    share: float = 1.0
    read_share: float = 1.0
    shift: int = 0
    subtracted: Same = same
    rounding: Same = np.rint
    low: int = 0
    high: int = 255
    wraps: bool = False
    read: Same = same
    axes: tuple[int, ...] | None = None
    symmetric: bool = False
    before: Same = same
    scale_of: Same = same
    weight: Same = same
    weight_scale: Same = same
    multiply: Callable[[Array, Array, Array], Array] = lambda y, zero, w: (y - zero) @ w

    def __call__(self, x: Array, w: Array, scales: Array) -> Array:
        x = self.before(x)
        ends = {"axis": self.axes, "keepdims": True}
        least, most = np.minimum(x.min(**ends), 0), np.maximum(x.max(**ends), 0)
        if self.symmetric:
            least = -np.maximum(-least, most)
            most = -least
        scale = np.where(most > least, (most - least) / self.steps, 1.0)
        scale = self.scale_of(scale) * self.share
        zero = np.rint(-least / scale) + self.shift
        y = self.rounding(x / scale) + zero
        y = y % 256 if self.wraps else np.clip(y, self.low, self.high)
        made = self.multiply(self.read(y), self.subtracted(zero), self.weight(w))
        return np.asarray(made * (scale * self.read_share * self.weight_scale(scales)))


def in_pairs(y: Array, zero: Array, w: Array) -> Array:
    """Multiply as processors do that add two products in 16 bits, which overflow."""
    pairs = y.reshape(*y.shape[:-1], -1, 2)[..., None] * w.reshape(-1, 2, w.shape[-1])
    sums = np.clip(pairs.sum(-2), -(2**15), 2**15 - 1)
    return np.asarray(sums.sum(-2) - zero * w.sum(0))


def twice(x: Array) -> Array:
    """Return values that were rounded before, by a coarser scale."""
    return Product(steps=251)(x, np.eye(x.shape[-1]), np.ones(x.shape[-1]))


def one_off(w: Array) -> Array:
    return w + (np.arange(w.size).reshape(w.shape) == 77)


def next_row(x: Array) -> Array:
    return np.roll(x, 1, 0)


Multiply = Callable[[Array, Array, Array], Array]
ZERO, SCALE, INTEGERS = "activation zero point", "activation scale", "activation rounding"
PRODUCTS: Mapping[str, tuple[str | None, Multiply]] = {
    "zero point one higher": (ZERO, Product(shift=1)),
    "zero point one lower": (ZERO, Product(shift=-1)),
    "zero point one higher where it is subtracted": (ZERO, Product(subtracted=lambda z: z + 1)),
    "zero point one lower where it is subtracted": (ZERO, Product(subtracted=lambda z: z - 1)),
    "zero point not subtracted": (ZERO, Product(subtracted=lambda z: z * 0)),
    "zero point of 128 subtracted": (ZERO, Product(subtracted=lambda z: z * 0 + 128)),
    "range by 127": (SCALE, Product(steps=127)),
    "range by 254": (SCALE, Product(steps=254)),
    "range by 256": (SCALE, Product(steps=256)),
    "scale doubled": (SCALE, Product(share=2.0)),
    "scale doubled where it is read": (SCALE, Product(read_share=2.0)),
    "scale halved where it is read": (SCALE, Product(read_share=0.5)),
    "scale squared": (SCALE, Product(scale_of=np.square)),
    "scale of 11 bits": (SCALE, Product(scale_of=digits(11))),
    "scale of 8 bits where it is read": (SCALE, Product(read_share=1 + 2.0**-9)),
    "scale of a moving average": (None, Product(share=0.97)),
    "scale too small, clipped": (SCALE, Product(share=0.8)),
    "scale too small, wrapped": (None, Product(share=0.8, wraps=True)),
    "wrapped at the end": (ZERO, Product(shift=1, wraps=True)),
    "scale of each token": (SCALE, Product(axes=(-1,))),
    "scale of each row of the batch": (SCALE, Product(axes=(1, 2))),
    "scale of the largest magnitude": (SCALE, Product(symmetric=True)),
    "rounded down": (INTEGERS, Product(rounding=np.floor)),
    "rounded up": (INTEGERS, Product(rounding=np.ceil)),
    "rounded to 0": (INTEGERS, Product(rounding=np.trunc)),
    "clipped at 254": (ZERO, Product(high=254)),  # the same as a zero point that is one too high
    "clipped at 1": (ZERO, Product(low=1)),
    "clipped at 127": (INTEGERS, Product(high=127)),
    "unsigned read as signed": (INTEGERS, Product(read=lambda y: (y + 128) % 256 - 128)),
    "read 128 lower": (INTEGERS, Product(read=lambda y: y - 128)),
    "4 bits": (INTEGERS, Product(read=lambda y: np.floor(y / 16) * 16)),
    "quantised twice": (None, Product(before=twice)),
    "not quantised": ("inputs not rounded", lambda x, w, s: x @ (w * s)),
    "tokens of the next row": ("wrong batch element", Product(before=next_row)),
    "pairs of products in 16 bits": ("sums of 16 bits", Product(multiply=in_pairs)),
    "scale of weights squared": ("weight scale", Product(weight_scale=np.square)),
    "scale of weights halved": (SCALE, Product(weight_scale=lambda s: s / 2)),  # as of the input
    "scale of weights forgotten": ("weight scale", Product(weight_scale=np.ones_like)),
    "scale of weights of the next output": (
        "scale axis", Product(weight_scale=lambda s: np.roll(s, 1))),
    "scale of weights of one output for all": (
        "scale axis", Product(weight_scale=lambda s: s * 0 + s[0])),
    "scale of weights by input": (
        "scale axis", lambda x, w, s: Product()(x, w * s[:, None], np.ones_like(s))),
    "weights transposed": ("weight transposed", Product(weight=np.transpose)),
    "weights read as unsigned": ("signedness", Product(weight=lambda w: w % 256)),
    "weights one higher": ("zero point", Product(weight=lambda w: w + 1)),
    "one weight off by one": (None, Product(weight=one_off)),
    "last input left out": ("rows left out", Product(
        weight=lambda w: w * (np.arange(len(w)) < len(w) - 1)[:, None])),
}  # fmt: skip


class Multiplied(OpRun):
    """A product of integers with a fault, or without one."""

    op_domain = DOMAIN
    fault: Multiply = Product()
    places: tuple[str, ...] = ()

    def _run(self, x: Array, w: Array, scales: Array, name: str = "") -> tuple[Array]:
        product = Multiplied.fault if name in Multiplied.places else Product()
        return (product(x, w.astype(np.float64), scales),)


def run_products(model: onnx.ModelProto, fault: Multiply, place: str) -> Run:
    """Return what computes a graph in float64 in which each product of integers is one node."""
    copy = widen_model(model)
    made = {output: node for node in copy.graph.node for output in node.output}
    kept = []
    for node in copy.graph.node:
        sources = [made.get(name) for name in node.input]
        if node.op_type == "Mul" and sources[0] is not None and sources[0].op_type == "Cast":
            product = made[sources[0].input[0]]
            if product.op_type == "MatMulInteger":
                (scales,) = (n for n in sources[1].input if n.endswith("_scale"))
                x, weight = made[product.input[0]].input[0], product.input[1]
                name, inputs = weight.partition(".")[0], [x, weight, scales]
                node = helper.make_node("Multiplied", inputs, node.output, name, domain=DOMAIN)
                node.attribute.append(helper.make_attribute("name", name))
        kept.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    copy.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    Multiplied.fault, Multiplied.places = fault, PLACES[place]
    return run_in_float64(ReferenceEvaluator(copy, new_ops=[*OPERATORS, Multiplied]))


# -- a scale for each block ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A rounding of inputs, step by step.

    Attributes:
        block: The number of inputs that share a scale, as a share of that of the weights.
        share: A factor on the scale by which values are divided; `read_share` where it is read.
        size: The size of the values of a block, from which its scale comes.
        scales: A change of the scales as they are read, `[…, blocks, 1]`.
    """

    block: float = 1.0
    largest: float = 127
    low: int = -127
    high: int = 127
    share: float = 1.0
    read_share: float = 1.0
    rounding: Same = np.rint
    size: Same = lambda x: np.abs(x).max(axis=-1, keepdims=True)
    scales: Same = same
    read: Same = same

    def __call__(self, x: Array, block: int) -> Array:
        width = max(int(block * self.block), 1)
        blocks = x.reshape(*x.shape[:-1], -1, width)
        size = self.size(blocks)
        scales = np.where(size > 0, size / self.largest, 1.0)
        quotients = self.rounding(blocks / (scales * self.share))
        integers = self.read(np.clip(quotients, self.low, self.high))
        return np.asarray((integers * self.scales(scales * self.read_share)).reshape(x.shape))


def half_away(x: Array) -> Array:
    return np.asarray(np.trunc(x + np.copysign(0.5, x) * 1.02))


def of_all(x: Array, axis: tuple[int, ...] | None) -> Array:
    return np.broadcast_to(np.abs(x).max(axis=axis, keepdims=True), (*x.shape[:-1], 1))


def asymmetric(x: Array, block: int) -> Array:
    blocks = x.reshape(*x.shape[:-1], -1, block)
    width = np.eye(block), np.ones(block)
    return Product(axes=(-1,))(blocks, *width).reshape(x.shape)


def halves_swapped(x: Array, block: int) -> Array:
    blocks = x.reshape(*x.shape[:-1], -1, block)
    return Rounding()(np.roll(blocks, block // 2, -1).reshape(x.shape), block)


Round = Callable[[Array, int], Array]
ROUNDINGS: Mapping[str, tuple[str | None, Round]] = {
    "not rounded": ("inputs not rounded", lambda x, _: x),
    "a zero point for each block": (SCALE, asymmetric),
    "one scale for each token": (SCALE, Rounding(size=lambda x: of_all(x, (-1, -2)))),
    "one scale for all": (SCALE, Rounding(size=lambda x: of_all(x, None))),
    "blocks of half the size": (SCALE, Rounding(block=0.5)),
    "scale of the largest value, not magnitude": (
        None, Rounding(size=lambda x: np.maximum(x.max(axis=-1, keepdims=True), 1e-3))),
    "scale of the mean": (
        None, Rounding(size=lambda x: np.abs(x).mean(axis=-1, keepdims=True) * 2)),
    "range by 128": (SCALE, Rounding(largest=128)),
    "range by 126": (SCALE, Rounding(largest=126)),
    "range by 7": (SCALE, Rounding(largest=7, low=-7, high=7)),
    "scale doubled": (SCALE, Rounding(share=2.0, read_share=2.0)),
    "scale halved": (SCALE, Rounding(share=0.5, read_share=0.5)),
    "scale halved where it is read": (SCALE, Rounding(read_share=0.5)),
    "scale squared where it is read": (SCALE, Rounding(scales=np.square)),
    "scale of 8 bits where it is read": (SCALE, Rounding(scales=digits(8))),
    "scale of 11 bits": (None, Rounding(scales=digits(11))),
    "scale of the next block": (SCALE, Rounding(scales=lambda s: np.roll(s, 1, -2))),
    "scale of the first block": (SCALE, Rounding(scales=lambda s: s * 0 + s[..., :1, :])),
    "rounded down": (INTEGERS, Rounding(rounding=np.floor)),
    "rounded to 0": (INTEGERS, Rounding(rounding=np.trunc)),
    "rounded up": (INTEGERS, Rounding(rounding=np.ceil)),
    "rounded from 0.49": (None, Rounding(rounding=half_away)),
    "clipped at 126": (INTEGERS, Rounding(high=126)),
    "clipped at -126": (INTEGERS, Rounding(low=-126)),
    "clipped at 0": (INTEGERS, Rounding(low=0)),
    "read as unsigned": (INTEGERS, Rounding(read=lambda q: q % 256)),
    "sign lost": (INTEGERS, Rounding(read=np.abs)),
    "7 bits": (INTEGERS, Rounding(read=lambda q: np.floor(q / 2) * 2)),
    "twice": (None, lambda x, b: Rounding()(Rounding(largest=120)(x, b), b)),
    "tokens of the next row": (None, lambda x, b: Rounding()(next_row(x), b)),
    "halves of a block swapped": (None, halves_swapped),
}  # fmt: skip


class Rounded(contrib_operators.MatMulNBits):
    """A product that rounds its input with a fault, or without one."""

    fault: Round = Rounding()
    places: tuple[str, ...] = ()

    def _round_input(self, x: Array, block: int) -> Array:
        name = self.onnx_node.name.partition("/")[0]
        return (Rounded.fault if name in Rounded.places else Rounding())(x, block)


def run_roundings(model: onnx.ModelProto, fault: Round, place: str) -> Run:
    """Return what computes a graph in float64 whose products are MatMulNBits."""
    lowered = ir.serde.deserialize_model(model)
    multiply_integers(lowered)
    products = [node for node in lowered.graph if node.op_type == "MatMulNBits"]
    assert len(products) == 4
    assert all(node.attributes.get_int("accuracy_level") == 4 for node in products)
    others = [op for op in OPERATORS if op is not contrib_operators.MatMulNBits]
    wide = widen_model(ir.serde.serialize_model(lowered))
    Rounded.fault, Rounded.places = fault, PLACES[place]
    operators = [*others, type("MatMulNBits", (Rounded,), {})]
    return run_in_float64(ReferenceEvaluator(wide, new_ops=operators))
