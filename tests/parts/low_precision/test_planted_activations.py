"""Faults in the quantisation and the products of activations: the judge catches each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import small_spec
from named_causes import first_cause_of
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from refused_outputs import refused_outputs, run_in_float64
from shared import once, passed_bundle

from attn_export import build
from attn_export.float64.evaluate import OPERATORS, widen_model
from attn_export.graph.load import load_model
from attn_export.results import Arrays

Array = np.ndarray[Any, Any]
DOMAIN = "planted"
SPECS = {
    "cached": {"rotary": "half"},
    "cache of int8": {"cache": "in-place", "kv_dtype": "int8", "attn_mask": "none"},
    "plain": {"cache": "none", "attn_mask": "none", "bias": "none"},
}
CASES = 5


def bundle_of(kind: str) -> Path:
    # As many heads for keys, so that a weight may be read transposed.
    spec = small_spec(
        weights_dtype="int8", activations="dynamic-int8", num_kv_heads=4, **SPECS[kind]
    )
    if kind == "cached":
        return passed_bundle("quantised-activations/cached", spec)

    def make(folder: Path) -> None:
        # The cache is in no other test by default: there all forms are judged.
        dialects = ["standard" if spec.kv_dtype == "none" else "all"]
        assert build(spec, folder, name="8 bits", dialects=dialects, runtimes=["ort-cpu"]).passed

    return once(f"planted-activations/{kind.replace(' ', '-')}", make)


@dataclasses.dataclass(frozen=True)
class Product:
    """One product of integers, step by step.

    Attributes:
        steps: The steps from the least to the largest integer.
        share: A factor on the scale by which values are divided.
        read_share: A factor on the scale by which integers are multiplied.
        shift: An addition to the zero point.
        subtracted: Returns what is subtracted for a zero point.
        rounding: Makes quotients whole.
        low: The least integer.
        high: The largest integer.
        wraps: Whether integers beyond the ends lose their upper bits, and are not clipped.
        read: Returns what integers are read as.
        axes: The axes of which each has one scale; None for all.
        symmetric: Whether the integers are of both signs, without a zero point.
        before: A change of values before they are rounded.
        scale_of: A change of scales.
        weight: A change of the integers of weights.
        weight_scale: A change of their scales.
        multiply: Multiplies integers.
    """

    steps: float = 255
    share: float = 1.0
    read_share: float = 1.0
    shift: int = 0
    subtracted: Callable[[Array], Array] = lambda zero: zero
    rounding: Callable[[Array], Array] = np.rint
    low: int = 0
    high: int = 255
    wraps: bool = False
    read: Callable[[Array], Array] = lambda y: y
    axes: tuple[int, ...] | None = None
    symmetric: bool = False
    before: Callable[[Array], Array] = lambda x: x
    scale_of: Callable[[Array], Array] = lambda s: s
    weight: Callable[[Array], Array] = lambda w: w
    weight_scale: Callable[[Array], Array] = lambda s: s
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


RIGHT = Product()


def in_float(x: Array, w: Array, scales: Array) -> Array:
    """Return the product of values that are not rounded."""
    return np.asarray(x @ (w * scales))


def in_pairs(y: Array, zero: Array, w: Array) -> Array:
    """Multiply as processors do that add two products in 16 bits, which overflow."""
    pairs = y.reshape(*y.shape[:-1], -1, 2)[..., None] * w.reshape(-1, 2, w.shape[-1])
    sums = np.clip(pairs.sum(-2), -(2**15), 2**15 - 1)
    return np.asarray(sums.sum(-2) - zero * w.sum(0))


def twice(x: Array) -> Array:
    """Return values that were rounded before, by a coarser scale."""
    return Product(steps=251)(x, np.eye(x.shape[-1]), np.ones(x.shape[-1]))


def of_bits(bits: int) -> Callable[[Array], Array]:
    """Return the rounding of scales to so many binary digits."""
    return lambda s: np.ldexp(np.rint(np.frexp(s)[0] * 2**bits) / 2**bits, np.frexp(s)[1])


def one_off(w: Array) -> Array:
    return w + (np.arange(w.size).reshape(w.shape) == 77)


Fault = Callable[[Array, Array, Array], Array]
FAULTS: dict[str, Fault] = {
    "zero point one higher": Product(shift=1),
    "zero point one lower": Product(shift=-1),
    "zero point one higher where it is subtracted": Product(subtracted=lambda z: z + 1),
    "zero point one lower where it is subtracted": Product(subtracted=lambda z: z - 1),
    "zero point not subtracted": Product(subtracted=lambda z: z * 0),
    "zero point of 128 subtracted": Product(subtracted=lambda z: z * 0 + 128),
    "range by 127": Product(steps=127),
    "range by 254": Product(steps=254),
    "range by 256": Product(steps=256),
    "scale doubled": Product(share=2.0),
    "scale doubled where it is read": Product(read_share=2.0),
    "scale halved where it is read": Product(read_share=0.5),
    "scale squared": Product(scale_of=np.square),
    "scale of 11 bits": Product(scale_of=of_bits(11)),
    "scale of 8 bits where it is read": Product(read_share=1 + 2.0**-9),
    "scale of a moving average": Product(share=0.97),
    "scale too small, clipped": Product(share=0.8),
    "scale too small, wrapped": Product(share=0.8, wraps=True),
    "wrapped at the end": Product(shift=1, wraps=True),
    "scale of each token": Product(axes=(-1,)),
    "scale of each row of the batch": Product(axes=(1, 2)),
    "scale of the largest magnitude": Product(symmetric=True),
    "rounded down": Product(rounding=np.floor),
    "rounded up": Product(rounding=np.ceil),
    "rounded to 0": Product(rounding=np.trunc),
    "clipped at 254": Product(high=254),
    "clipped at 1": Product(low=1),
    "clipped at 127": Product(high=127),
    "unsigned read as signed": Product(read=lambda y: (y + 128) % 256 - 128),
    "read 128 lower": Product(read=lambda y: y - 128),
    "4 bits": Product(read=lambda y: np.floor(y / 16) * 16),
    "quantised twice": Product(before=twice),
    "not quantised": in_float,
    "tokens of the next row": Product(before=lambda x: np.roll(x, 1, 0)),
    "pairs of products in 16 bits": Product(multiply=in_pairs),
    "scale of weights squared": Product(weight_scale=np.square),
    "scale of weights halved": Product(weight_scale=lambda s: s / 2),
    "scale of weights forgotten": Product(weight_scale=np.ones_like),
    "scale of weights of the next output": Product(weight_scale=lambda s: np.roll(s, 1)),
    "scale of weights of one output for all": Product(weight_scale=lambda s: s * 0 + s[0]),
    "scale of weights by input": lambda x, w, s: RIGHT(x, w * s[:, None], np.ones_like(s)),
    "weights transposed": Product(weight=np.transpose),
    "weights read as unsigned": Product(weight=lambda w: w % 256),
    "weights one higher": Product(weight=lambda w: w + 1),
    "one weight off by one": Product(weight=one_off),
    "last input left out": Product(
        weight=lambda w: w * (np.arange(len(w)) < len(w) - 1)[:, None]
    ),
}  # fmt: skip
PLACES = {"in": ("q_proj", "k_proj", "v_proj"), "v": ("v_proj",), "out": ("out_proj",)}
PLANTED = [f"{name}, {place}, {kind}" for name in FAULTS for place in PLACES for kind in SPECS]


class Multiplied(OpRun):
    """A product of integers with a fault, or without one."""

    op_domain = DOMAIN
    fault: Fault = RIGHT
    places: tuple[str, ...] = ()

    def _run(self, x: Array, w: Array, scales: Array, name: str = "") -> tuple[Array]:
        product = Multiplied.fault if name in Multiplied.places else RIGHT
        return (product(x, w.astype(np.float64), scales),)


def with_products(model: onnx.ModelProto) -> ReferenceEvaluator:
    """Return a graph in float64 in which each product of integers is one node of ours."""
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
                node = helper.make_node(
                    "Multiplied", [x, weight, scales], node.output, domain=DOMAIN,
                    name=weight.partition(".")[0],
                )  # fmt: skip
                node.attribute.append(helper.make_attribute("name", weight.partition(".")[0]))
        kept.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    copy.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return ReferenceEvaluator(copy, new_ops=[*OPERATORS, Multiplied])


def run_of(kind: str, fault: Fault, places: tuple[str, ...]) -> Callable[[Arrays], Arrays]:
    """Return what computes the outputs of a bundle's graph with a fault."""
    evaluator = with_products(load_model(bundle_of(kind) / "model.onnx"))
    Multiplied.fault, Multiplied.places = fault, places
    return run_in_float64(evaluator)


def wrong_outputs(kind: str, fault: Fault, places: tuple[str, ...]) -> int:
    """Return the number of outputs that the judge refuses, of some cases of a bundle."""
    run = run_of(kind, fault, places)
    return refused_outputs(
        bundle_of(kind), run, lambda cases: [c for c in cases if c.kind == "shape"][:CASES]
    )


@pytest.mark.parametrize("kind", SPECS)
def test_right_products_pass(kind: str):
    assert wrong_outputs(kind, RIGHT, PLACES["in"] + PLACES["out"]) == 0


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.every(17)
def test_wrong_products_fail(planted: str):
    name, place, kind = planted.rsplit(", ", 2)
    assert wrong_outputs(kind, FAULTS[name], PLACES[place]) > 0, name


ZERO, SCALE, INTEGERS = "activation zero point", "activation scale", "activation rounding"
CAUSES = {
    "zero point one higher": ZERO,
    "zero point one lower": ZERO,
    "zero point one higher where it is subtracted": ZERO,
    "zero point one lower where it is subtracted": ZERO,
    "zero point not subtracted": ZERO,
    "zero point of 128 subtracted": ZERO,
    "range by 127": SCALE,
    "range by 254": SCALE,
    "range by 256": SCALE,
    "scale doubled": SCALE,
    "scale doubled where it is read": SCALE,
    "scale halved where it is read": SCALE,
    "scale squared": SCALE,
    "scale of 11 bits": SCALE,
    "scale of 8 bits where it is read": SCALE,
    "scale too small, clipped": SCALE,
    "wrapped at the end": ZERO,
    "scale of each token": SCALE,
    "scale of each row of the batch": SCALE,
    "scale of the largest magnitude": SCALE,
    "rounded down": INTEGERS,
    "rounded up": INTEGERS,
    "rounded to 0": INTEGERS,
    "clipped at 254": ZERO,  # the same as a zero point that is one too high
    "clipped at 1": ZERO,
    "clipped at 127": INTEGERS,
    "unsigned read as signed": INTEGERS,
    "read 128 lower": INTEGERS,
    "4 bits": INTEGERS,
    "not quantised": "inputs not rounded",
    "tokens of the next row": "wrong batch element",
    "pairs of products in 16 bits": "sums of 16 bits",
    "scale of weights squared": "weight scale",
    "scale of weights halved": SCALE,  # the same as half the scale of the input
    "scale of weights forgotten": "weight scale",
    "scale of weights of the next output": "scale axis",
    "scale of weights of one output for all": "scale axis",
    "scale of weights by input": "scale axis",
    "weights transposed": "weight transposed",
    "weights read as unsigned": "signedness",
    "weights one higher": "zero point",
    "last input left out": "rows left out",
}
"""All but those whose parameters are in no list: scales of another run, wrapped or rounded twice,
and a single weight."""

UNNAMED = {
    "scale of the largest magnitude, out, cached",
    "scale of 8 bits where it is read, in, cache of int8",
    "scale of 8 bits where it is read, v, cache of int8",
}
"""Faults so small that a few values near a tie are more of the error than is left over."""

NAMED = [f"{name}, {place}, {kind}" for name in CAUSES for place in PLACES for kind in SPECS]


@pytest.mark.parametrize("planted", NAMED)
@pytest.mark.every(43)
def test_the_cause_is_named_first(planted: str):
    name, place, kind = planted.rsplit(", ", 2)
    right = load_model(bundle_of(kind) / "model.onnx")
    run = run_of(kind, FAULTS[name], PLACES[place])
    expected = "" if planted in UNNAMED else CAUSES[name]
    assert first_cause_of(bundle_of(kind), right, run) == expected
