"""Known mistakes in keeping keys and values as integers: scales, rounding, zeros, order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from attn_export.diagnose.in_integers import round_to_bfloat16, swap_neighbours
from attn_export.diagnose.mistake import Mistake
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.diagnose.evaluate import Evaluation, Values


# -- the steps by which a graph keeps keys and values as integers -------------------------------

Change = Callable[[Array], Array]

MIDDLE = 8
"""The addition to an integer of 4 bits that makes it 0 to 15."""


def _same(x: Array) -> Array:
    return x


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps by which a cache is written and read; without changes the right ones.

    Attributes:
        write_scale: Of the scale that new rows are divided by.
        read_scale: Of the scale that integers are multiplied by.
        rounds: From quotients to whole numbers.
        limits: Of the least and the largest integer.
        written: Of new integers, `[B, Hkv, L, D]`.
        packed: Of new bytes, as they are stored.
        kept: Of the whole cache, in integers, after it was written.
        read: Of the integers that are read, `[B, Hkv, S, D]`.
        unrounded: Whether new rows are read as they were before.
    """

    write_scale: Change = _same
    read_scale: Change = _same
    rounds: Change = np.rint
    limits: Callable[[int, int], tuple[int, int]] = lambda low, high: (low, high)
    written: Change = _same
    packed: Change = _same
    kept: Change = _same
    read: Change = _same
    unrounded: bool = False


@dataclasses.dataclass(frozen=True)
class CachePart:
    """Keys or values of a cache of integers in a graph.

    Attributes:
        scale: Its scale.
        new: The name of the new rows, `[B, Hkv, L, D]`, before they are divided.
        scatter: The node that writes them.
        meant: The name of what the integers stand for, `[B, Hkv, S, D]`.
    """

    scale: Array
    new: str
    scatter: onnx.NodeProto
    meant: str

    def replaced(self, evaluation: Evaluation, steps: Steps, values: Values) -> dict[str, Array]:
        """Return the cache, and what is read of it, by other steps.

        Args:
            evaluation: The right graph.
            steps: The steps.
            values: All values of the graph.
        """
        x, past = values[self.new], values[self.scatter.input[0]]
        assert x is not None
        assert past is not None
        in_bytes = past.dtype == np.uint8
        low, high = steps.limits(*((-8, 7) if in_bytes else (-128, 127)))
        whole = steps.rounds(x / steps.write_scale(self.scale))
        if in_bytes:
            rows = steps.packed(_packed(steps.written(np.clip(whole, low, high))))
        else:  # QuantizeLinear saturates after it has added the zero point
            rows = np.clip(steps.written(whole), low, high)
        rows = rows.astype(np.int64).astype(past.dtype)
        present = scatter_into_cache(self.scatter, evaluation, values, past, rows)
        present = steps.kept(present).astype(past.dtype)
        read = steps.read(_unpacked(present) if in_bytes else present.astype(np.float64))
        meant = read * steps.read_scale(self.scale)
        if steps.unrounded:
            before = (_unpacked(past) if in_bytes else past) * self.scale
            meant = scatter_into_cache(self.scatter, evaluation, values, before, x)
        return {self.scatter.output[0]: present, self.meant: meant}


def scatter_into_cache(
    node: onnx.NodeProto, evaluation: Evaluation, values: Values, past: Array, new: Array
) -> Array:
    """Return the cache that a TensorScatter writes from other inputs, `[B, Hkv, capacity, .]`.

    Args:
        node: The node.
        evaluation: The graph.
        values: All values of the graph.
        past: `[B, Hkv, capacity, .]`.
        new: `[B, Hkv, L, .]`.
    """
    given = dict(zip(node.input[:2], (past, new), strict=True))
    return evaluation.compute_node(node, {**values, **given})[node.output[0]]


def _packed(q: Array) -> Array:
    halves = q.astype(np.int64) + MIDDLE
    return np.asarray((halves[..., ::2] + 16 * halves[..., 1::2]) % 256)


def _unpacked(stored: Array) -> Array:
    halves = np.stack([stored & 15, stored >> 4], axis=-1).astype(np.float64) - MIDDLE
    return halves.reshape(*stored.shape[:-1], -1)


def cache_parts(evaluation: Evaluation) -> dict[str, CachePart]:
    """Return the keys and the values of a cache of integers, as far as the graph has them."""
    found = {}
    for name, part in (("keys", "k_scale"), ("values", "v_scale")):
        scale = next((n for n in evaluation.initializers if n.endswith(f"kv_scales.{part}")), None)
        users = [node for node in evaluation.nodes if scale is not None and scale in node.input]
        writing = [node for node in users if node.op_type in ("Div", "QuantizeLinear")]
        reading = [node for node in users if node.op_type == "Mul"]
        past = "past_key" if name == "keys" else "past_value"
        scatters = [
            n for n in evaluation.nodes if n.op_type == "TensorScatter" and n.input[0] == past
        ]
        if scale is not None and len(writing) == len(reading) == len(scatters) == 1:
            found[name] = CachePart(
                evaluation.initializers[scale], writing[0].input[0], scatters[0],
                reading[0].output[0],
            )  # fmt: skip
    return found


# -- known mistakes in them ---------------------------------------------------------------------


def _pairs_in_order(*perm: int) -> Change:
    """Return the reading of pairs of channels, `[B, Hkv, S, D / 2, 2]`, in another order."""
    return lambda x: x.reshape(*x.shape[:-1], -1, 2).transpose(perm).reshape(x.shape)


def _halves_of_row(x: Array) -> Array:
    return np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape)


def _other_sign(x: Array) -> Array:
    return np.where(x < 0, x + MIDDLE, x - MIDDLE)


def _again(ratio: float) -> Change:
    """Return the change of int8 that is rounded once more, to a scale of this ratio."""
    return lambda x: np.clip(np.rint(np.rint(x / ratio) * ratio), -128, 127)


def _zeros() -> Iterator[tuple[str, str, Steps]]:
    kind = "zero point"
    for by in (1, -1, -128):
        says = f"the zero of {{}} is {by:+d}"
        write, read = functools.partial(np.add, by), functools.partial(np.add, -by)
        yield kind, f"{says} where it is written", Steps(written=write)
        yield kind, f"{says} where it is read", Steps(read=read)
        yield kind, says, Steps(written=write, read=read)


SCALES: Final[Mapping[str, Change]] = {
    "halved": lambda s: s / 2, "doubled": lambda s: s * 2, "squared": np.square,
    "left out": np.ones_like, "127/128 of the right ones": lambda s: s * 127 / 128,
    "7/8 of the right ones": lambda s: s * 7 / 8, "those of int8": lambda s: s * 7 / 127,
    "those of int4": lambda s: s * 127 / 7, "rounded to bfloat16": round_to_bfloat16,
}  # fmt: skip
"""Wrong scales of any cache."""

AXES: Final[Mapping[str, Change]] = {
    "of the other axis": lambda s: s.transpose(2, 1, 0),
    "those of the channel before": lambda s: np.roll(s, 1, -1),
    "those of the next channel": lambda s: np.roll(s, -1, -1),
    "those of the head before": lambda s: np.roll(s, 1, 0),
    "those of the next head": lambda s: np.roll(s, -1, 0),
    "those of the first head for all": lambda s: s * 0 + s[:1],
    "the largest for all channels": lambda s: s * 0 + s.max(),
}
"""Wrong scales of a cache with one for each channel, `[Hkv, 1, D]`."""

STEPS: Final[tuple[tuple[str, str, Steps], ...]] = (
    *_zeros(),
    ("rounding", "{} are rounded down", Steps(rounds=np.floor)),
    ("rounding", "{} are rounded up", Steps(rounds=np.ceil)),
    ("rounding", "{} are rounded towards 0", Steps(rounds=np.trunc)),
    ("rounding", "new {} are read as they were before they are rounded", Steps(unrounded=True)),
    ("clipped range", "{} are clipped at one more than the least integer",
     Steps(limits=lambda low, high: (low + 1, high))),
    ("clipped range", "{} are clipped at one less than the largest integer",
     Steps(limits=lambda low, high: (low, high - 1))),
    ("clipped range", "{} are clipped to the range of 4 bits", Steps(limits=lambda *_: (-8, 7))),
    ("clipped range", "{} are not clipped from below", Steps(limits=lambda low, h: (2 * low, h))),
    ("clipped range", "{} are not clipped from above",
     Steps(limits=lambda low, h: (low, 2 * h + 1))),
    *(("quantised twice", f"{{}} are rounded once more, to {ratio} times the scale",
       Steps(kept=_again(ratio))) for ratio in range(2, 17)),
    ("signedness", "the sign of {} is lost", Steps(rounds=lambda x: np.rint(np.abs(x)))),
    ("signedness", "the sign of {} is lost where they are read", Steps(read=np.abs)),
    ("signedness", "{} are read as two's complement", Steps(read=_other_sign)),
    ("nibble order", "the two integers of a byte of {} are swapped",
     Steps(written=swap_neighbours(-1), read=swap_neighbours(-1))),
    ("nibble order", "neighbouring channels of {} are swapped where they are written",
     Steps(written=swap_neighbours(-1))),
    ("nibble order", "neighbouring channels of {} are swapped where they are read",
     Steps(read=swap_neighbours(-1))),
    ("cache layout", "a byte of {} is read as neighbours along the length",
     Steps(read=_pairs_in_order(0, 1, 4, 2, 3))),
    ("cache layout", "a byte of {} is read as channels of two keys",
     Steps(read=_pairs_in_order(0, 1, 3, 2, 4))),
    ("cache layout", "lower halves of the bytes of {} are read before upper ones",
     Steps(read=_pairs_in_order(0, 1, 2, 4, 3))),
    ("cache layout", "a byte holds channels c and c + D / 2 of {}", Steps(written=_halves_of_row)),
    ("cache layout", "a byte holds the first of two channels of {} twice",
     Steps(written=lambda q: q[..., ::2].repeat(2, -1))),
    ("cache layout", "the upper half of a byte of {} is moved by 3 bits, not 4",
     Steps(packed=lambda b: (b & 15) + 8 * (b >> 4))),
)  # fmt: skip
"""Kinds of mistakes, their effects, and the steps that make them."""


def cache_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of writing and reading a cache of integers.

    Args:
        evaluation: The right graph.
    """
    parts = cache_parts(evaluation)
    if len(parts) != 2:
        return
    both = tuple(parts.values())
    for where, fields in PLACES.items():
        for kind, name, change in _wrong_scales(both[0].scale):
            steps = _with(fields, change)
            for which, some in {"keys and values": both, **_alone(parts)}.items():
                says = f"the scales of cached {which} are {name}{where}"
                yield _mistake(evaluation, some, kind, says, [steps] * len(some))
        exchanged = [_with(fields, functools.partial(_scale_of, part)) for part in both[::-1]]
        says = f"the scales of cached keys and values are exchanged{where}"
        yield _mistake(evaluation, both, "cache scale", says, exchanged)
    for kind, says, steps in STEPS:
        words = says.format("cached keys and values")
        yield _mistake(evaluation, both, kind, words, [steps] * 2)


def _wrong_scales(scale: Array) -> Iterator[tuple[str, str, Change]]:
    for name, change in SCALES.items():
        yield "cache scale", name, change
    for name, change in AXES.items() if scale.ndim else ():
        yield "scale axis", name, change


PLACES: Final[Mapping[str, Sequence[str]]] = {
    "": ("write_scale", "read_scale"),
    " where they are read": ("read_scale",),
    " where they are written": ("write_scale",),
}
"""The places of a wrong scale, with the steps that it is in."""


def stale_scales(evaluation: Evaluation) -> list[Callable[[float], Mistake]]:
    """Return what makes the mistakes of scales that are a factor times the right ones.

    Args:
        evaluation: The right graph.
    """
    parts = tuple(cache_parts(evaluation).values())

    def make(where: str, factor: float) -> Mistake:
        steps = _with(PLACES[where], lambda s: s * factor)
        says = f"the scales of cached keys and values are stale: {factor:.4g} times the right ones"
        return _mistake(evaluation, parts, "stale scales", says + where, [steps] * len(parts))

    return [functools.partial(make, where) for where in PLACES] if len(parts) == 2 else []


def _with(fields: Sequence[str], change: Change) -> Steps:
    changes: dict[str, Any] = dict.fromkeys(fields, change)
    return Steps(**changes)


def _alone(parts: Mapping[str, CachePart]) -> dict[str, tuple[CachePart, ...]]:
    return {name: (part,) for name, part in parts.items()}


def _scale_of(other: CachePart, _: Array) -> Array:
    return other.scale


def _mistake(
    evaluation: Evaluation, parts: Sequence[CachePart], kind: str, says: str,
    steps: Sequence[Steps],
) -> Mistake:  # fmt: skip
    def replaced(values: Values) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for part, each in zip(parts, steps, strict=True):
            found |= part.replaced(evaluation, each, values)
        return found

    return Mistake(kind, says, parts[0].scatter.name, replaced)
