"""Known mistakes in reading quantised weights: scales, zero points, order, signs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
import onnx

from attn_export.explain.mistake import (
    ArrayChange,
    Mistake,
    round_to_bfloat16,
    skip_node,
    swap_neighbours,
    unchanged,
)
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

ORDER = "_order"
"""Suffix of the initialiser that holds the input order of a product (`g_idx` of GPTQ)."""


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A quantised weight; all arrays are float64.

    Attributes:
        q: The integers, `[in, out]`.
        s: The scales, `[blocks, out]`.
        z: The zero points, `[blocks, out]`.
        bits: 4 if no integer has a magnitude of 16 or more, else 8.
    """

    q: Array
    s: Array
    z: Array
    bits: int

    @property
    def dequantised(self) -> Array:
        """The dequantised weight, `[in, out]`."""
        rows = len(self.q) // len(self.s)
        return (self.q - self.z.repeat(rows, 0)) * self.s.repeat(rows, 0)


WeightReading = Callable[[StoredWeight], StoredWeight]
"""Function that takes a weight as stored, and returns it as a mistake reads it."""


def _change(
    *, q: ArrayChange = unchanged, s: ArrayChange = unchanged, z: ArrayChange = unchanged
) -> WeightReading:
    """Return a reading that changes integers, scales or zero points."""
    return lambda weight: StoredWeight(q(weight.q), s(weight.s), z(weight.z), weight.bits)


def _flip_signedness(w: StoredWeight) -> StoredWeight:
    half, span = 2 ** (w.bits - 1), 2**w.bits
    is_signed = w.q.min() < 0
    q = w.q % span if is_signed else (w.q + half) % span - half
    return dataclasses.replace(w, q=q)


def _clip(w: StoredWeight) -> StoredWeight:
    """Return a weight whose integers lose an eighth of their range at both ends."""
    low, high = w.q.min(), w.q.max()
    cut = (high - low) // 8
    return dataclasses.replace(w, q=np.clip(w.q, low + cut, high - cut))


def _requantise(levels: float) -> WeightReading:
    """Return a reading of integers that were quantised again, per output, to `levels` at most."""

    def read(w: StoredWeight) -> StoredWeight:
        step = np.maximum(np.abs(w.q).max(axis=0) / levels, 1e-9)
        q = np.clip(np.rint(np.rint(w.q / step) * step), w.q.min(), w.q.max())
        return dataclasses.replace(w, q=q)

    return read


def _drop_last_row(w: StoredWeight) -> StoredWeight:
    q = w.q.copy()
    q[-1] = 0
    return dataclasses.replace(w, q=q)


SCALE, AXIS, ZERO = "weight scale", "scale axis", "zero point"
READINGS: Final[tuple[tuple[str, str, WeightReading], ...]] = (
    (SCALE, "the scales of {} are squared", _change(s=np.square)),
    (SCALE, "the scales of {} are halved", _change(s=lambda s: s / 2)),
    (SCALE, "the scales of {} are doubled", _change(s=lambda s: s * 2)),
    (SCALE, "the scales of {} are left out", _change(s=np.ones_like)),
    (SCALE, "the scales of {} are divided by, not multiplied", _change(s=lambda s: 1 / s)),
    (SCALE, "the scales of {} are rounded to bfloat16", _change(s=round_to_bfloat16)),
    (AXIS, "each output of {} has the scale of the one before",
     _change(s=lambda s: np.roll(s, 1, -1))),
    (AXIS, "each output of {} has the scale of the next", _change(s=lambda s: np.roll(s, -1, -1))),
    (AXIS, "the scales of {} are in reverse order", _change(s=lambda s: s[..., ::-1])),
    (AXIS, "all outputs of {} have the scale of the first",
     _change(s=lambda s: s * 0 + s[..., :1])),
    (AXIS, "the scales of {} are read along the other axis",
     _change(s=lambda s: s.T.reshape(s.shape))),
    (AXIS, "the scales of {} are those of inputs, not outputs",
     lambda w: dataclasses.replace(w, q=w.q * w.s.T, s=np.ones_like(w.s))),
    (AXIS, "each block of {} has the scale of the one before",
     _change(s=lambda s: np.roll(s, 1, 0))),
    (AXIS, "each block of {} has the scale of the next", _change(s=lambda s: np.roll(s, -1, 0))),
    (AXIS, "all blocks of {} have the scale of the first", _change(s=lambda s: s * 0 + s[:1])),
    (AXIS, "blocks of {} are read as twice as large",
     _change(s=lambda s: np.repeat(s[::2], 2, 0)[: len(s)])),
    (ZERO, "the zero points of {} are one too high", _change(z=lambda z: z + 1)),
    (ZERO, "the zero points of {} are one too low", _change(z=lambda z: z - 1)),
    (ZERO, "the zero points of {} are left out", _change(z=np.zeros_like)),
    (ZERO, "each output of {} has the zero point of the one before",
     _change(z=lambda z: np.roll(z, 1, -1))),
    (ZERO, "each output of {} has the zero point of the next",
     _change(z=lambda z: np.roll(z, -1, -1))),
    (ZERO, "the zero points of {} are taken to be the middle of the range",
     lambda w: dataclasses.replace(w, z=np.full_like(w.z, 2 ** (w.bits - 1)))),
    ("nibble order", "the two integers of each byte of {} are swapped",
     _change(q=swap_neighbours(-1))),
    ("nibble order", "neighbouring inputs of {} are swapped, as if two shared a byte",
     _change(q=swap_neighbours(0))),
    ("signedness", "signed integers of {} are read as unsigned, or the reverse", _flip_signedness),
    ("weight transposed", "{} is transposed", _change(q=np.transpose)),
    ("clipped range", "the integers of {} are clipped to a smaller range", _clip),
    ("rows left out", "the last row of {} is left out", _drop_last_row),
)  # fmt: skip
"""Kind, effect and reading of each mistake; ``{}`` stands for the name of the weight."""


def weight_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of reading each quantised weight, which stands behind DequantizeLinear."""
    weights = stored_weights(evaluation)
    for node, weight in weights:
        name = node.input[0]
        for kind, effect, reading in READINGS:
            yield _mistake(kind, effect.format(name), node, weight, reading)
        for other_node, other in weights:
            if other_node is not node and other.q.shape == weight.q.shape:
                effect = f"{name} has the integers of {other_node.input[0]}"
                yield _mistake("wrong weight", effect, node, weight, _use_integers_of(other))
    for node in evaluation.nodes:
        if node.op_type == "Gather" and node.input[1].endswith(ORDER):
            yield Mistake(
                "input order", f"{node.input[1]} is ignored: inputs keep their own order",
                node.name, skip_node(node),
            )  # fmt: skip


def fitted_weight_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield mistakes with a parameter: one output's scale, or the levels of a second rounding."""
    for node, weight in stored_weights(evaluation):
        name = node.input[0]
        for levels in LEVELS:
            effect = f"{name} was quantised twice, the second time to ±{levels:.1f}"
            yield _mistake("quantised twice", effect, node, weight, _requantise(levels))
        outputs = weight.q.shape[1]
        for output in range(outputs if outputs <= MANY_OUTPUTS else 0):
            for change, factor in (("doubled", 2.0), ("halved", 0.5)):
                effect = f"the scale of output {output} of {name} is {change}"
                scale = functools.partial(_scale_one_output, output=output, factor=factor)
                yield _mistake(SCALE, effect, node, weight, _change(s=scale))


LEVELS: Final = tuple(level / 10 for level in range(15, 80))
"""The largest integers of a second quantisation that are tried."""

MANY_OUTPUTS = 64
"""The largest number of outputs of a weight for which each output is tried."""


def _scale_one_output(s: Array, output: int, factor: float) -> Array:
    return s * np.where(np.arange(s.shape[-1]) == output, factor, 1.0)


def _use_integers_of(other: StoredWeight) -> WeightReading:
    return lambda w: dataclasses.replace(w, q=other.q)


def stored_weights(evaluation: Evaluation) -> list[tuple[onnx.NodeProto, StoredWeight]]:
    """Return each node of a graph that dequantises a weight, with the weight."""
    return [
        (node, _stored_weight(evaluation, node))
        for node in evaluation.nodes
        if node.op_type == "DequantizeLinear"
        and (integers := evaluation.initializers.get(node.input[0])) is not None
        and integers.ndim == 2
    ]


def _stored_weight(evaluation: Evaluation, node: onnx.NodeProto) -> StoredWeight:
    q, s, *optional = (np.asarray(evaluation.initializers[n], np.float64) for n in node.input if n)
    s = np.atleast_2d(s)
    z = np.atleast_2d(optional[0]) if optional else np.zeros_like(s)
    return StoredWeight(q, s, z, 4 if np.abs(q).max(initial=0) < 16 else 8)


def _mistake(
    kind: str, effect: str, node: onnx.NodeProto, weight: StoredWeight, reading: WeightReading
) -> Mistake:
    def replaced(_: Values) -> Mapping[str, Array]:
        dequantised = reading(weight).dequantised
        return {node.output[0]: dequantised} if np.isfinite(dequantised).all() else {}

    return Mistake(kind, effect, node.name, replaced)
