"""Known mistakes in reading weights that integers hold: scales, zero points, order, signs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import ml_dtypes
import numpy as np

from attn_export.diagnose.mistake import Mistake
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.diagnose.evaluate import Evaluation, Values

ORDER = "_order"
"""The end of the name of the order in which a product reads its inputs (`g_idx` of GPTQ)."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight as it is stored, in float64.

    Attributes:
        q: The integers, `[in, out]`.
        s: The scales, `[blocks, out]`.
        z: The zero points, `[blocks, out]`.
        bits: 4 or 8.
    """

    q: Array
    s: Array
    z: Array
    bits: int

    @property
    def meant(self) -> Array:
        """The weight that they stand for, `[in, out]`."""
        rows = len(self.q) // len(self.s)
        return (self.q - self.z.repeat(rows, 0)) * self.s.repeat(rows, 0)


Reading = Callable[[Stored], Stored]


def _scale(of: Callable[[Array], Array]) -> Reading:
    return lambda w: dataclasses.replace(w, s=of(w.s))


def _integers(of: Callable[[Array], Array]) -> Reading:
    return lambda w: dataclasses.replace(w, q=of(w.q))


def _zero(of: Callable[[Array], Array]) -> Reading:
    return lambda w: dataclasses.replace(w, z=of(w.z))


def round_to_bfloat16(x: Array) -> Array:
    """Return numbers rounded to bfloat16, in float64."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def swap_neighbours(axis: int) -> Callable[[Array], Array]:
    """Return the change that swaps each two neighbours along an axis."""

    def swapped(q: Array) -> Array:
        x = np.moveaxis(q, axis, -1)
        return np.moveaxis(x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape), -1, axis)

    return swapped


def _other_sign(w: Stored) -> Stored:
    half, span = 2 ** (w.bits - 1), 2**w.bits
    is_signed = w.q.min() < 0
    q = w.q % span if is_signed else (w.q + half) % span - half
    return dataclasses.replace(w, q=q)


def _clipped(share: float) -> Reading:
    def read(w: Stored) -> Stored:
        low, high = w.q.min(), w.q.max()
        cut = (high - low) // share
        return dataclasses.replace(w, q=np.clip(w.q, low + cut, high - high // share - 1))

    return read


def _again(levels: float) -> Reading:
    """Return the reading of integers that were rounded to a coarser scale of each output."""

    def read(w: Stored) -> Stored:
        step = np.maximum(np.abs(w.q).max(axis=0) / levels, 1e-9)
        q = np.clip(np.rint(np.rint(w.q / step) * step), w.q.min(), w.q.max())
        return dataclasses.replace(w, q=q)

    return read


def _last_row_left_out(w: Stored) -> Stored:
    q = w.q.copy()
    q[-1] = 0
    return dataclasses.replace(w, q=q)


SCALE, AXIS, ZERO = "weight scale", "scale axis", "zero point"
READINGS: Final[tuple[tuple[str, str, Reading], ...]] = (
    (SCALE, "the scales of {} are squared", _scale(np.square)),
    (SCALE, "the scales of {} are halved", _scale(lambda s: s / 2)),
    (SCALE, "the scales of {} are doubled", _scale(lambda s: s * 2)),
    (SCALE, "the scales of {} are left out", _scale(np.ones_like)),
    (SCALE, "the scales of {} are divided by, not multiplied", _scale(lambda s: 1 / s)),
    (SCALE, "the scales of {} are rounded to bfloat16", _scale(round_to_bfloat16)),
    (AXIS, "each output of {} has the scale of the one before",
     _scale(lambda s: np.roll(s, 1, -1))),
    (AXIS, "each output of {} has the scale of the next", _scale(lambda s: np.roll(s, -1, -1))),
    (AXIS, "the scales of {} are in reverse order", _scale(lambda s: s[..., ::-1])),
    (AXIS, "all outputs of {} have the scale of the first", _scale(lambda s: s * 0 + s[..., :1])),
    (AXIS, "the scales of {} are read along the other axis",
     _scale(lambda s: s.T.reshape(s.shape))),
    (AXIS, "each block of {} has the scale of the one before", _scale(lambda s: np.roll(s, 1, 0))),
    (AXIS, "each block of {} has the scale of the next", _scale(lambda s: np.roll(s, -1, 0))),
    (AXIS, "all blocks of {} have the scale of the first", _scale(lambda s: s * 0 + s[:1])),
    (AXIS, "blocks of {} are read as twice as large",
     _scale(lambda s: np.repeat(s[::2], 2, 0)[: len(s)])),
    (ZERO, "the zero points of {} are one too high", _zero(lambda z: z + 1)),
    (ZERO, "the zero points of {} are one too low", _zero(lambda z: z - 1)),
    (ZERO, "the zero points of {} are left out", _zero(np.zeros_like)),
    (ZERO, "each output of {} has the zero point of the one before",
     _zero(lambda z: np.roll(z, 1, -1))),
    (ZERO, "each output of {} has the zero point of the next", _zero(lambda z: np.roll(z, -1, -1))),
    (ZERO, "{} is read as if its zero were in the middle",
     lambda w: dataclasses.replace(w, z=np.full_like(w.z, 2 ** (w.bits - 1)))),
    ("nibble order", "the two integers of each byte of {} are swapped",
     _integers(swap_neighbours(-1))),
    ("nibble order", "neighbouring inputs of {} are swapped, as two of a byte",
     _integers(swap_neighbours(0))),
    ("signedness", "the integers of {} are read with the other sign", _other_sign),
    ("weight transposed", "{} is transposed", _integers(np.transpose)),
    ("clipped range", "the integers of {} are clipped to a smaller range", _clipped(8)),
    ("rows left out", "the last row of {} is left out", _last_row_left_out),
)  # fmt: skip
"""Kinds of mistakes, their effects, and the weight as they read it."""


def weight_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of reading every weight that integers hold.

    Args:
        evaluation: The right graph, whose weights stand behind DequantizeLinear.
    """
    held = {node.output[0]: node for node in evaluation.nodes if is_weight(evaluation, node)}
    weights = {name: stored_weight(evaluation, node) for name, node in held.items()}
    for name, node in held.items():
        for kind, says, reading in READINGS:
            read = functools.partial(_read, name, weights[name], reading)
            yield Mistake(kind, says.format(node.input[0]), node.name, read)
        for other, node_2 in held.items():
            if other != name and weights[other].q.shape == weights[name].q.shape:
                says = f"{node.input[0]} has the integers of {node_2.input[0]}"
                read = functools.partial(_read, name, weights[name], _integers_of(weights[other]))
                yield Mistake("wrong weight", says, node.name, read)
    for node in evaluation.nodes:
        if node.op_type == "Gather" and node.input[1].endswith(ORDER):
            yield Mistake(
                "input order", f"{node.input[1]} is ignored: inputs are read in their own order",
                node.name, functools.partial(_passed_on, node),
            )  # fmt: skip


def fitted_weight_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield mistakes that have a number: of one output, or of a second scale.

    Args:
        evaluation: The right graph.
    """
    for node in evaluation.nodes:
        if not is_weight(evaluation, node):
            continue
        weight, name = stored_weight(evaluation, node), node.input[0]
        readings: list[tuple[str, str, Reading]] = [
            ("quantised twice", f"{name} was quantised twice, the second time to ±{levels:.1f}",
             _again(levels))
            for levels in LEVELS
        ]  # fmt: skip
        if weight.q.shape[1] <= MANY_OUTPUTS:
            readings += [
                (SCALE, f"the scale of output {output} of {name} is {said}",
                 _scale(functools.partial(_at, output=output, factor=factor)))
                for output in range(weight.q.shape[1])
                for said, factor in (("doubled", 2.0), ("halved", 0.5))
            ]  # fmt: skip
        for kind, says, reading in readings:
            read = functools.partial(_read, node.output[0], weight, reading)
            yield Mistake(kind, says, node.name, read)


LEVELS: Final = tuple(level / 10 for level in range(15, 80))
"""The largest integers of a second rounding that are tried."""

MANY_OUTPUTS = 64
"""Largest number of outputs of a weight of which each is tried."""


def _at(s: Array, output: int, factor: float) -> Array:
    return s * np.where(np.arange(s.shape[-1]) == output, factor, 1.0)


def _integers_of(other: Stored) -> Reading:
    return lambda w: dataclasses.replace(w, q=other.q)


def is_weight(evaluation: Evaluation, node: onnx.NodeProto) -> bool:
    """Return whether a node dequantises a weight of a graph.

    Args:
        evaluation: The graph.
        node: A node of it.
    """
    weight = evaluation.initializers.get(node.input[0]) if node.input else None
    return node.op_type == "DequantizeLinear" and weight is not None and weight.ndim == 2


def stored_weight(evaluation: Evaluation, node: onnx.NodeProto) -> Stored:
    """Return the weight that a node dequantises, as it is stored.

    Args:
        evaluation: The graph.
        node: A node of it.
    """
    q, s, *rest = (np.asarray(evaluation.initializers[n], np.float64) for n in node.input if n)
    s = np.atleast_2d(s)
    z = np.atleast_2d(rest[0]) if rest else np.zeros_like(s)
    return Stored(q, s, z, 4 if np.abs(q).max(initial=0) < 16 else 8)


def _read(name: str, weight: Stored, reading: Reading, _: Values) -> Mapping[str, Array]:
    meant = reading(weight).meant
    return {name: meant} if np.isfinite(meant).all() else {}


def _passed_on(node: onnx.NodeProto, values: Values) -> Mapping[str, Array]:
    array = values[node.input[0]]
    assert array is not None
    return {node.output[0]: array}
