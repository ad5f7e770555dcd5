"""Known mistakes in rounding inputs of products to 8 bits, by blocks of a token."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from attn_export.diagnose.contrib_operators import packed_weight
from attn_export.diagnose.in_integers import is_weight, round_to_bfloat16, stored_weight
from attn_export.diagnose.mistake import Mistake
from attn_export.quantiser import BLOCK_LARGEST, INTEGER_PRODUCTS
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.diagnose.evaluate import Evaluation, Values

Reading = Callable[[Array, int], Array]
"""Gets an input `[…, N]` and the size of blocks; gives what a product reads."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """The rounding of one input in a right graph.

    Attributes:
        x: The name of the input.
        block: The number of elements of a block.
        changed: The name of what follows from it: the rounded input, or a product with it.
        node: The name of the node that gives it.
        weight: The weight of that product, `[K, N]`, or None.
        cut: The same with scales cut to bfloat16, as KleidiAI has it.
    """

    x: str
    block: int
    changed: str
    node: str
    weight: Array | None = None
    cut: Array | None = None


@dataclasses.dataclass(frozen=True)
class _Symmetric:
    """A rounding with scales that come from the largest magnitudes.

    Attributes:
        axes: Of `[…, blocks, block]`, those that share a scale; None for all of a run.
        block: The size of blocks, as a share of the right one.
        largest: The integer of the largest magnitude.
        low: The least integer that is kept.
        high: The largest integer that is kept.
        rounding: Makes quotients whole.
        share: A factor on the scales.
        scales: A change of the scales where they are read, `[…, blocks, 1]`.
        integers: What integers are read as.
    """

    axes: Sequence[int] | None = (-1,)
    block: float = 1.0
    largest: float = BLOCK_LARGEST
    low: float = -BLOCK_LARGEST
    high: float = BLOCK_LARGEST
    rounding: Callable[[Array], Array] = np.rint
    share: float = 1.0
    scales: Callable[[Array], Array] = lambda s: s
    integers: Callable[[Array], Array] = lambda q: q

    def __call__(self, x: Array, size: int) -> Array:
        width = min(max(int(size * self.block), 1), x.shape[-1])
        blocks = x.reshape(*x.shape[:-1], -1, width)
        axes = None if self.axes is None else tuple(self.axes)
        ends = np.abs(blocks).max(axis=axes, keepdims=True)
        scales = np.where(ends > 0, ends / self.largest, 1.0) * self.share
        integers = np.clip(self.rounding(blocks / scales), self.low, self.high)
        return np.asarray((self.integers(integers) * self.scales(scales)).reshape(x.shape))


def _with_zero_points(axes: Sequence[int]) -> Reading:
    """Return a rounding to 256 integers from the least to the largest value."""

    def rounded(x: Array, size: int) -> Array:
        blocks = x.reshape(*x.shape[:-1], -1, size)
        least = np.minimum(blocks.min(axis=tuple(axes), keepdims=True), 0.0)
        most = np.maximum(blocks.max(axis=tuple(axes), keepdims=True), 0.0)
        scales = np.where(most > least, (most - least) / 255, 1.0)
        zero = np.rint(-least / scales)
        integers = np.clip(np.rint(blocks / scales) + zero, 0, 255) - zero
        return np.asarray((integers * scales).reshape(x.shape))

    return rounded


def _not_rounded(x: Array, _: int) -> Array:
    return x


TOKEN = (-2, -1)
NOT, SCALE, INTEGERS = "inputs not rounded", "activation scale", "activation rounding"
READINGS: Final[tuple[tuple[str, str, Reading], ...]] = (
    (NOT, "{} is not rounded to 8 bits", _not_rounded),
    (SCALE, "{} has one scale for each token, not for each block", _Symmetric(axes=TOKEN)),
    (SCALE, "{} has one scale for all tokens, not for each block", _Symmetric(axes=None)),
    (SCALE, "{} has a scale and a zero point for each token", _with_zero_points(TOKEN)),
    (SCALE, "{} has a scale and a zero point for each block", _with_zero_points((-1,))),
    (SCALE, "blocks of {} are half as large", _Symmetric(block=0.5)),
    (SCALE, "blocks of {} are twice as large", _Symmetric(block=2)),
    (SCALE, "scales of {} are halved where they are read", _Symmetric(scales=lambda s: s / 2)),
    (SCALE, "scales of {} are doubled where they are read", _Symmetric(scales=lambda s: s * 2)),
    (SCALE, "scales of {} are squared where they are read", _Symmetric(scales=np.square)),
    (SCALE, "scales of {} are rounded to bfloat16 where they are read",
     _Symmetric(scales=round_to_bfloat16)),
    (SCALE, "each block of {} has the scale of the one before",
     _Symmetric(scales=lambda s: np.roll(s, 1, -2))),
    (SCALE, "each block of {} has the scale of the next",
     _Symmetric(scales=lambda s: np.roll(s, -1, -2))),
    (SCALE, "all blocks of {} have the scale of the first",
     _Symmetric(scales=lambda s: np.broadcast_to(s[..., :1, :], s.shape))),
    (SCALE, "scales of {} are doubled", _Symmetric(share=2.0)),
    (SCALE, "scales of {} are halved", _Symmetric(share=0.5)),
    (SCALE, "scales of {} are a 128th of the largest, not a 127th", _Symmetric(largest=128)),
    (SCALE, "scales of {} are a 126th of the largest, not a 127th", _Symmetric(largest=126)),
    (SCALE, "{} has 4 bits", _Symmetric(largest=7, low=-7, high=7)),
    (INTEGERS, "{} has 7 bits", _Symmetric(integers=lambda q: np.floor(q / 2) * 2)),
    (INTEGERS, "quotients of {} are rounded down", _Symmetric(rounding=np.floor)),
    (INTEGERS, "quotients of {} are rounded up", _Symmetric(rounding=np.ceil)),
    (INTEGERS, "quotients of {} are rounded to 0", _Symmetric(rounding=np.trunc)),
    (INTEGERS, "integers of {} are clipped at 126", _Symmetric(high=126)),
    (INTEGERS, "integers of {} are clipped at -126", _Symmetric(low=-126)),
    (INTEGERS, "integers of {} are clipped at 0", _Symmetric(low=0)),
    (INTEGERS, "integers of {} are read as unsigned", _Symmetric(integers=lambda q: q % 256)),
    (INTEGERS, "integers of {} lose their sign", _Symmetric(integers=np.abs)),
)  # fmt: skip
"""Kinds of mistakes, their effects, and the input as they read it."""


def activation_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of rounding every input of products, and each alone.

    Args:
        evaluation: The right graph, which rounds by block with operators of ai.onnx, or by
            MatMulNBits.
    """
    places = list(_places(evaluation))
    if places:
        yield _as_kleidiai(evaluation, places)
    for kind, says, reading in READINGS if places else ():
        every = functools.partial(_read, evaluation, places, reading)
        yield Mistake(kind, says.format("every input of products"), "", every)
        for place in places if len(places) > 1 else ():
            one = functools.partial(_read, evaluation, [place], reading)
            yield Mistake(kind, says.format(f"the input of {place.node}"), place.node, one)


def _as_kleidiai(evaluation: Evaluation, places: Sequence[_Place]) -> Mistake:
    """Return what KleidiAI's product for ARM does to inputs and weights, as it was measured."""
    cut = [dataclasses.replace(place, weight=place.cut) for place in places]
    weights = {
        node.output[0]: dataclasses.replace(weight, s=_upper_half(weight.s)).meant
        for node in evaluation.nodes
        if is_weight(evaluation, node)
        for weight in [stored_weight(evaluation, node)]
    }
    return Mistake(
        SCALE,
        "every input of products has a scale and a zero point for each token, and scales of "
        "weights are cut to bfloat16, as in KleidiAI",
        "", functools.partial(_read, evaluation, cut, _with_zero_points(TOKEN), weights=weights),
    )  # fmt: skip


def _upper_half(scales: Array) -> Array:
    """Return scales cut to bfloat16: the upper half of a float32."""
    bits = scales.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.asarray(bits.view(np.float32), np.float64)


def _places(evaluation: Evaluation) -> Iterator[_Place]:
    for node in evaluation.nodes:
        if node.op_type == "MatMulNBits":
            yield from _in_a_product(evaluation, node)
        names = [node.op_type]
        source: onnx.NodeProto | None = node
        while source is not None and len(names) < len(ROUNDING):
            source = evaluation.producer.get(source.input[0])
            names.append(source.op_type if source is not None else "")
        if tuple(names) == ROUNDING and source is not None:
            shape = evaluation.initializers.get(source.input[1])
            if shape is not None:
                yield _Place(source.input[0], int(shape[-1]), node.output[0], node.name)


ROUNDING: Final = ("Reshape", "Mul", "Round", "Div", "Reshape")
"""The operators of a rounding by block, from the last to the first, along first inputs."""


def _in_a_product(evaluation: Evaluation, node: onnx.NodeProto) -> Iterator[_Place]:
    attributes = {a.name: a.i for a in node.attribute}
    if attributes.get("accuracy_level") == INTEGER_PRODUCTS:
        held = [evaluation.initializers.get(name) for name in node.input[1:]]
        weight = packed_weight(held, attributes)
        integers, scales, *zeros = held
        assert scales is not None
        cut = packed_weight([integers, _upper_half(scales), *zeros], attributes)
        yield _Place(
            node.input[0], attributes["block_size"], node.output[0], node.name, weight, cut
        )


def _read(
    evaluation: Evaluation, places: Sequence[_Place], reading: Reading, values: Values,
    weights: Mapping[str, Array] = types.MappingProxyType({}),
) -> Mapping[str, Array]:  # fmt: skip
    """Return the inputs, or products, as they are read; later ones follow from those before.

    Args:
        evaluation: The right graph.
        places: Where inputs are rounded, in the order of the graph.
        reading: The rounding.
        values: The values of the graph.
        weights: Other weights, by the names of values.
    """
    found = dict(weights)
    for place in places:
        here = evaluation.recompute(values, found) if found else values
        x = here[place.x]
        assert x is not None
        read = reading(x, place.block)
        found[place.changed] = read if place.weight is None else read @ place.weight
    return found
