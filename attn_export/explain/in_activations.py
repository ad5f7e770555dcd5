"""Known mistakes in rounding the inputs of products to 8 bits, with a scale for each block."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import onnx

from attn_export.explain.in_integers import stored_weights
from attn_export.explain.mistake import (
    ArrayChange,
    Mistake,
    Replacement,
    change_in_order,
    round_to_bfloat16,
    unchanged,
)
from attn_export.float64.contrib_operators import packed_weight
from attn_export.float64.evaluate import Evaluation
from attn_export.quantiser import BLOCK_LARGEST, INTEGER_PRODUCTS
from attn_export.tensorfile import Array

InputReading = Callable[[Array, int], Array]
"""Function that takes an input `[…, K]` and the block size, and returns the input as rounded."""


@dataclasses.dataclass(frozen=True)
class _RoundedInput:
    """An input that a right graph rounds by block, with nodes of ai.onnx or within MatMulNBits.

    Attributes:
        output: The name of the rounded input, or of the output of MatMulNBits.
        weight: The weight of MatMulNBits, `[K, N]`; None for nodes of ai.onnx.
        truncated_weight: The same weight with its scales truncated to bfloat16, as KleidiAI does.
    """

    x: str
    block: int
    output: str
    node: str
    weight: Array | None = None
    truncated_weight: Array | None = None


@dataclasses.dataclass(frozen=True)
class _Symmetric:
    """Symmetric quantisation, with scales from the largest magnitude. The defaults are right.

    Attributes:
        axes: Axes of `[…, blocks, block]` whose elements share a scale; None for all axes.
        largest_integer: The integer that stands for the largest magnitude.
        low: The integer at which values are clipped from below.
        high: The integer at which values are clipped from above.
        scale_read: Changes the scales, `[…, blocks, 1]`, for dequantisation only.
    """

    axes: tuple[int, ...] | None = (-1,)
    block_factor: float = 1.0
    largest_integer: float = BLOCK_LARGEST
    low: float = -BLOCK_LARGEST
    high: float = BLOCK_LARGEST
    rounding: ArrayChange = np.rint
    scale_factor: float = 1.0
    scale_read: ArrayChange = unchanged
    change_integers: ArrayChange = unchanged

    def __call__(self, x: Array, size: int) -> Array:
        width = min(max(int(size * self.block_factor), 1), x.shape[-1])
        blocks = x.reshape(*x.shape[:-1], -1, width)
        largest = np.abs(blocks).max(axis=self.axes, keepdims=True)
        scales = np.where(largest > 0, largest / self.largest_integer, 1.0) * self.scale_factor
        integers = np.clip(self.rounding(blocks / scales), self.low, self.high)
        return np.asarray(
            (self.change_integers(integers) * self.scale_read(scales)).reshape(x.shape)
        )


def _with_zero_points(axes: tuple[int, ...]) -> InputReading:
    """Return asymmetric rounding to 256 integers; `axes` of `[…, blocks, block]` share a scale."""

    def rounded(x: Array, size: int) -> Array:
        blocks = x.reshape(*x.shape[:-1], -1, size)
        least = np.minimum(blocks.min(axis=axes, keepdims=True), 0.0)
        largest = np.maximum(blocks.max(axis=axes, keepdims=True), 0.0)
        scales = np.where(largest > least, (largest - least) / 255, 1.0)
        zero_point = np.rint(-least / scales)
        integers = np.clip(np.rint(blocks / scales) + zero_point, 0, 255) - zero_point
        return np.asarray((integers * scales).reshape(x.shape))

    return rounded


TOKEN = (-2, -1)
"""The axes of `[…, blocks, block]` that make up one token."""

NOT_ROUNDED, SCALE, INTEGERS = "inputs not rounded", "activation scale", "activation rounding"
READINGS: Final[tuple[tuple[str, str, InputReading], ...]] = (
    (NOT_ROUNDED, "{} is not rounded to 8 bits", lambda x, _: x),
    (SCALE, "{} has one scale for each token, not for each block", _Symmetric(axes=TOKEN)),
    (SCALE, "{} has one scale for all tokens, not for each block", _Symmetric(axes=None)),
    (SCALE, "{} has a scale and a zero point for each token", _with_zero_points(TOKEN)),
    (SCALE, "{} has a scale and a zero point for each block", _with_zero_points((-1,))),
    (SCALE, "blocks of {} are half as large", _Symmetric(block_factor=0.5)),
    (SCALE, "blocks of {} are twice as large", _Symmetric(block_factor=2)),
    (SCALE, "scales of {} are halved in dequantisation", _Symmetric(scale_read=lambda s: s / 2)),
    (SCALE, "scales of {} are doubled in dequantisation", _Symmetric(scale_read=lambda s: s * 2)),
    (SCALE, "scales of {} are squared in dequantisation", _Symmetric(scale_read=np.square)),
    (SCALE, "scales of {} are rounded to bfloat16 in dequantisation",
     _Symmetric(scale_read=round_to_bfloat16)),
    (SCALE, "each block of {} has the scale of the previous block",
     _Symmetric(scale_read=lambda s: np.roll(s, 1, -2))),
    (SCALE, "each block of {} has the scale of the next block",
     _Symmetric(scale_read=lambda s: np.roll(s, -1, -2))),
    (SCALE, "all blocks of {} have the scale of the first",
     _Symmetric(scale_read=lambda s: np.broadcast_to(s[..., :1, :], s.shape))),
    (SCALE, "scales of {} are doubled", _Symmetric(scale_factor=2.0)),
    (SCALE, "scales of {} are halved", _Symmetric(scale_factor=0.5)),
    (SCALE, "scales of {} are a 128th of the largest, not a 127th",
     _Symmetric(largest_integer=128)),
    (SCALE, "scales of {} are a 126th of the largest, not a 127th",
     _Symmetric(largest_integer=126)),
    (SCALE, "{} has 4 bits", _Symmetric(largest_integer=7, low=-7, high=7)),
    (INTEGERS, "{} has 7 bits", _Symmetric(change_integers=lambda q: np.floor(q / 2) * 2)),
    (INTEGERS, "quotients of {} are rounded down", _Symmetric(rounding=np.floor)),
    (INTEGERS, "quotients of {} are rounded up", _Symmetric(rounding=np.ceil)),
    (INTEGERS, "quotients of {} are rounded to 0", _Symmetric(rounding=np.trunc)),
    (INTEGERS, "integers of {} are clipped at 126", _Symmetric(high=126)),
    (INTEGERS, "integers of {} are clipped at -126", _Symmetric(low=-126)),
    (INTEGERS, "integers of {} are clipped at 0", _Symmetric(low=0)),
    (INTEGERS, "integers of {} are read as unsigned",
     _Symmetric(change_integers=lambda q: q % 256)),
    (INTEGERS, "integers of {} lose their sign", _Symmetric(change_integers=np.abs)),
)  # fmt: skip
"""Kind, effect and reading of each mistake; ``{}`` stands for the input."""


def activation_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of rounding, in all inputs together and in each alone.

    The graph rounds by block with nodes of ai.onnx, or in MatMulNBits.
    """
    inputs = list(_rounded_inputs(evaluation))
    if not inputs:
        return
    yield _as_kleidiai(evaluation, inputs)
    groups = [("the input of each product", "", inputs)]
    if len(inputs) > 1:
        groups += [(f"the input of {each.node}", each.node, [each]) for each in inputs]
    for kind, effect, reading in READINGS:
        for name, node, group in groups:
            replaced = _misround(evaluation, group, reading)
            yield Mistake(kind, effect.format(name), node, replaced)


def _as_kleidiai(evaluation: Evaluation, inputs: Sequence[_RoundedInput]) -> Mistake:
    """Return the measured rounding of inputs and weights by KleidiAI's product on ARM."""
    truncated = [dataclasses.replace(each, weight=each.truncated_weight) for each in inputs]
    weights = {}
    for node, weight in stored_weights(evaluation):
        truncated_weight = dataclasses.replace(weight, s=_truncate_to_bfloat16(weight.s))
        weights[node.output[0]] = truncated_weight.dequantised
    effect = (
        "the input of each product has a scale and a zero point for each token, and scales of "
        "weights are truncated to bfloat16, as in KleidiAI"
    )
    replaced = _misround(evaluation, truncated, _with_zero_points(TOKEN), weights)
    return Mistake(SCALE, effect, "", replaced)


def _truncate_to_bfloat16(scales: Array) -> Array:
    """Keep the upper 16 bits of each float32 scale."""
    bits = scales.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.asarray(bits.view(np.float32), np.float64)


ROUNDING: Final = ("Reshape", "Mul", "Round", "Div", "Reshape")
"""The operators of a rounding by block, last first; each makes the previous one's first input."""


def _rounded_inputs(evaluation: Evaluation) -> Iterator[_RoundedInput]:
    for node in evaluation.nodes:
        if node.op_type == "MatMulNBits":
            yield from _rounded_by_matmul(evaluation, node)
        names = [node.op_type]
        source: onnx.NodeProto | None = node
        while source is not None and len(names) < len(ROUNDING):
            source = evaluation.producer.get(source.input[0]) if source.input else None
            names.append(source.op_type if source is not None else "")
        if tuple(names) == ROUNDING and source is not None:
            shape = evaluation.initializers.get(source.input[1])
            if shape is not None:
                yield _RoundedInput(source.input[0], int(shape[-1]), node.output[0], node.name)


def _rounded_by_matmul(evaluation: Evaluation, node: onnx.NodeProto) -> Iterator[_RoundedInput]:
    attributes = {a.name: a.i for a in node.attribute}
    if attributes.get("accuracy_level") == INTEGER_PRODUCTS:
        constants = [evaluation.initializers.get(name) for name in node.input[1:]]
        weight = packed_weight(constants, attributes)
        integers, scales, *zeros = constants
        assert scales is not None
        truncated = packed_weight([integers, _truncate_to_bfloat16(scales), *zeros], attributes)
        yield _RoundedInput(
            node.input[0], attributes["block_size"], node.output[0], node.name, weight, truncated
        )


def _misround(
    evaluation: Evaluation, inputs: Sequence[_RoundedInput], reading: InputReading,
    weights: Mapping[str, Array] = types.MappingProxyType({}),
) -> Replacement:  # fmt: skip
    """Return the change of inputs, in the order of the graph, by a reading, and of weights."""
    changes = [
        (rounded_input.x, rounded_input.output, functools.partial(_apply, reading, rounded_input))
        for rounded_input in inputs
    ]
    return change_in_order(evaluation, changes, weights)


def _apply(reading: InputReading, rounded_input: _RoundedInput, x: Array) -> Array:
    """Return the input as it is read, or its product if MatMulNBits rounds it."""
    read = reading(x, rounded_input.block)
    return read if rounded_input.weight is None else read @ rounded_input.weight
