"""Known mistakes in keeping keys and values as integers: scales, rounding, zeros, order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from attn_export.diagnose.in_integers import bfloat16, neighbours
from attn_export.diagnose.integer_cache_steps import MIDDLE, CachePart, Change, Steps, cache_parts
from attn_export.diagnose.mistake import Mistake
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    from attn_export.diagnose.evaluate import Evaluation, Values


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
    "those of int4": lambda s: s * 127 / 7, "rounded to bfloat16": bfloat16,
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
     Steps(written=neighbours(-1), read=neighbours(-1))),
    ("nibble order", "neighbouring channels of {} are swapped where they are written",
     Steps(written=neighbours(-1))),
    ("nibble order", "neighbouring channels of {} are swapped where they are read",
     Steps(read=neighbours(-1))),
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
