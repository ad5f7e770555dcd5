"""Known mistakes in caches of keys and values: of integers, with block scales, and in float16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from attn_export.errors import counted
from attn_export.explain.mistake import (
    WRONG_SCALES,
    Locator,
    Mistake,
    constant,
    fitted,
    of_step,
    plain,
    plus,
    repeat_first,
    roll,
    round_to_bfloat16,
    rows,
    step,
    swap_neighbours,
    times,
)
from attn_export.float64.attention_steps import StepChange
from attn_export.parts.low_precision.typed_cache_places import cache, hadamard
from attn_export.quantiser import MIDDLE
from attn_export.tensorfile import Array

# -- changes ------------------------------------------------------------------------------------

_OCTAVE = 8
"""The number of scales in an octave: each is 2^(1/8) times the one before."""


def _before_rounding(_: Array, at: Mapping[str, Any]) -> Array:
    return np.asarray(at["before_rounding"]())


def _permute_pairs(*perm: int) -> StepChange:
    """Return a permutation of the axes of channel pairs, `[B, Hkv, S, D / 2, 2]`."""
    return plain(lambda x: x.reshape(*x.shape[:-1], -1, 2).transpose(perm).reshape(x.shape))


def _round_again(ratio: float) -> StepChange:
    """Return the change that rounds int8 once more, to `ratio` times the scale."""
    return plain(lambda x: np.clip(np.rint(np.rint(x / ratio) * ratio), -128, 127))


def _linear(scales: Array, _: object) -> Array:
    octaves, eighths = np.divmod(np.arange(len(scales)), _OCTAVE)
    return np.asarray(2.0**octaves * (1 + eighths / _OCTAVE) * scales[0])


def _stale(first: int, last: int) -> StepChange:
    """Return the change to what the cache held before, of the parts of scales and zero points."""

    def change(present: Array, at: Mapping[str, Any]) -> Array:
        start, n = at["bytes_of_integers"], at["blocks"]
        old, present = slice(start + first * n, start + last * n), present.copy()
        present[..., old] = at["past"][..., old]
        return present

    return change


def _exchange_scales_and_zeros(present: Array, at: Mapping[str, Any]) -> Array:
    integers, scales, zeros = np.split(present, [-2 * at["blocks"], -at["blocks"]], -1)
    return np.concatenate([integers, zeros, scales], -1)


def _every_nth(x: Array, at: Mapping[str, Any]) -> Array:
    return x.reshape(*x.shape[:-1], -1, at["blocks"]).swapaxes(-1, -2).reshape(x.shape)


def _undo_every_nth(x: Array, at: Mapping[str, Any]) -> Array:
    return x.reshape(*x.shape[:-1], at["blocks"], -1).swapaxes(-1, -2).reshape(x.shape)


def _to_float16(x: Array, end: float) -> Array:
    """Round toward 0 for `end` 0, and away from 0 for infinity."""
    nearest = x.astype(np.float16)
    is_beyond = np.abs(nearest.astype(np.float64)) > np.abs(x)
    steps = np.nextafter(nearest, np.copysign(np.float16(end), nearest))
    return np.where((nearest == x) | (is_beyond != (end == 0)), nearest, steps)


# -- the table ----------------------------------------------------------------------------------

SCALES: Final[Mapping[str, StepChange]] = {
    **WRONG_SCALES, "left out": plain(np.ones_like), "127/128 of the right ones": times(127 / 128),
    "7/8 of the right ones": times(7 / 8), "those of int8": times(7 / 127),
    "those of int4": times(127 / 7),
}  # fmt: skip
"""Wrong scales that any cache may have."""

AXES: Final[Mapping[str, StepChange]] = {
    "exchanged between heads and channels": plain(lambda s: s.transpose(2, 1, 0)),
    "those of the previous channel": roll(1, -1), "those of the next channel": roll(-1, -1),
    "those of the previous head": roll(1, 0), "those of the next head": roll(-1, 0),
    "those of the first head for all": repeat_first(0),
    "the largest for all channels": plain(lambda s: s * 0 + s.max()),
}  # fmt: skip
"""Wrong scales of a cache with a scale for each channel, `[Hkv, 1, D]`."""

_INDICES: Final[Mapping[str, StepChange]] = {
    "one too large": plus(1), "one too small": plus(-1),
    "an octave too large": plus(_OCTAVE), "an octave too small": plus(-_OCTAVE),
    "rounded down to octaves": plain(lambda i: i // _OCTAVE * _OCTAVE),
    "those of the previous block": roll(1, -1), "those of the next block": roll(-1, -1),
    "those of the first block for all": repeat_first(-1),
    "those of the previous head": roll(1, 1), "those of the next head": roll(-1, 1),
    "those of the previous token": roll(1, 2), "those of the next token": roll(-1, 2),
    "those of the first token for all": repeat_first(2),
}  # fmt: skip
"""Wrong scale indices, `[B, Hkv, tokens, blocks]`."""

ZEROS: Final[Mapping[str, StepChange]] = {
    "one too large": plus(1), "one too small": plus(-1), "left out": plain(np.zeros_like),
    "in the middle": plain(lambda z: z * 0 - 8), "of the other sign": plain(np.negative),
    "128 too large": plus(128), "those of the previous block": roll(1, -1),
    "those of the next block": roll(-1, -1), "those of the first block for all": repeat_first(-1),
    "those of the previous token": roll(1, 2), "those of the next token": roll(-1, 2),
    "those of the previous head": roll(1, 1), "those of the next head": roll(-1, 1),
}  # fmt: skip
"""Wrong zero points, `[B, Hkv, tokens, blocks]`."""

TABLES: Final[Mapping[str, StepChange]] = {
    **WRONG_SCALES, "in the other order": plain(lambda s: s[::-1]),
    "linear within an octave": _linear,
}  # fmt: skip
"""Wrong tables of scales, `[256]`."""

READ, WRITTEN = " when the cache is read", " when the cache is written"


def _both_ways(
    at: Locator, kind: str, effect: str, read: str, written: str, change: StepChange,
    undo: StepChange | None = None, ends: tuple[str, str] = (READ, WRITTEN),
) -> tuple[Mistake, ...]:  # fmt: skip
    """Return a mistake of writing and reading, of reading alone and of writing alone."""
    back = {read: undo or change}
    return rows(
        at,
        (kind, effect, {written: change, **back}),
        (kind, effect + ends[0], back),
        (kind, effect + ends[1], {written: change}),
    )


SCALE, ZERO, LAYOUT = "cache scale", "zero point", "cache layout"
CLIPPED, SIGN, NIBBLES = "clipped range", "signedness", "nibble order"
BOUNDS, ROTATION, ROUNDING = "block bounds", "key rotation", "cache rounding"
HELD = "that the cache held before"
_SCALE_STEPS = ("read_scale", "write_scale")

_IN_WHOLE_CACHES: Final = (
    *(row for at, kind, changes in (
        (cache("whole"), SCALE, SCALES), (cache("whole", "channels"), "scale axis", AXES))
      for name, change in changes.items()
      for row in _both_ways(at, kind, f"the scales of {{}} are {name}", *_SCALE_STEPS, change)),
    *_both_ways(cache("whole", "both"), SCALE, "the scales of {} are exchanged", *_SCALE_STEPS,
                step("other_scale")),
    *(row for by in (1, -1, -128) for row in _both_ways(
        cache("whole"), ZERO, f"the zero point of {{}} is off by {by:+d}", "read", "written",
        plus(by), plus(-by))),
)  # fmt: skip
"""Mistakes of caches of integers with a scale for all, or for each channel."""

IN_INTEGER_CACHES: Final = (
    *rows(cache("integers"),
        ("rounding", "{} are rounded down", {"rounded": of_step(np.floor, "quotients")}),
        ("rounding", "{} are rounded up", {"rounded": of_step(np.ceil, "quotients")}),
        ("rounding", "{} are rounded towards 0", {"rounded": of_step(np.trunc, "quotients")}),
        ("rounding", "new {} are used before quantisation", {"dequantised": _before_rounding}),
        (NIBBLES, f"neighbouring channels of {{}} are swapped{WRITTEN}",
         {"written": swap_neighbours(-1)}),
        (NIBBLES, f"neighbouring channels of {{}} are swapped{READ}",
         {"read": swap_neighbours(-1)})),
    *rows(cache("nibbles"),
        (NIBBLES, "the two integers of a byte of {} are swapped",
         {"written": swap_neighbours(-1), "read": swap_neighbours(-1)}),
        (LAYOUT, "a byte holds the first of two channels of {} twice",
         {"written": lambda q, _: q[..., ::2].repeat(2, -1)}),
        (LAYOUT, "the upper half of a byte of {} is moved by 3 bits, not 4",
         {"packed": lambda b, _: (b & 15) + 8 * (b >> 4)})),
    *rows(cache("whole"),
        (CLIPPED, "{} are clipped at one more than the least integer", {"low": plus(1)}),
        (CLIPPED, "{} are clipped at one less than the largest integer", {"high": plus(-1)}),
        (CLIPPED, "{} are not clipped from below", {"low": times(2)}),
        (CLIPPED, "{} are not clipped from above", {"high": lambda high, _: 2 * high + 1}),
        (SIGN, "the sign of {} is lost", {"rounded": plain(np.abs)}),
        (SIGN, f"the sign of {{}} is lost{READ}", {"read": plain(np.abs)})),
    *rows(cache("int8"),
        (CLIPPED, "{} are clipped to the range of 4 bits",
         {"low": constant(-8), "high": constant(7)}),
        *(("quantised twice", f"{{}} are rounded once more, to {ratio} times the scale",
           {"stored": _round_again(ratio)}) for ratio in range(2, 17))),
    *rows(cache("whole", "nibbles"),
        (SIGN, "{} are read as two's complement",
         {"read": lambda x, _: np.where(x < 0, x + MIDDLE, x - MIDDLE)}),
        (LAYOUT, "lower halves of all bytes of {} are read before all upper ones",
         {"read": _permute_pairs(0, 1, 4, 2, 3)}),
        (LAYOUT, "bytes of {} are read by channel first, then by key",
         {"read": _permute_pairs(0, 1, 3, 2, 4)}),
        (LAYOUT, "lower halves of the bytes of each key of {} are read before upper ones",
         {"read": _permute_pairs(0, 1, 2, 4, 3)}),
        (LAYOUT, "a byte holds channels c and c + D / 2 of {}",
         {"written": lambda x, _: np.stack(np.split(x, 2, -1), axis=-1).reshape(x.shape)})),
)  # fmt: skip

_IN_BLOCK_CACHES: Final = (
    *(row for kind, part, described, changes in (
        (SCALE, "index", "scales", _INDICES), (ZERO, "zero", "zero points", ZEROS))
      for name, change in changes.items()
      for row in _both_ways(
          cache("blocks"), "block scale" if name.startswith("those") else kind,
          f"the {described} of {{}} are {name}", f"read_{part}", f"stored_{part}", change)),
    *(row for name, change in TABLES.items() for row in _both_ways(
        cache("blocks"), SCALE, f"the table of the scales of {{}} is {name}", "table",
        "written_table", change, ends=(" where it is read", " where it is written"))),
    *rows(cache("blocks"),
        *((SCALE, f"{{}} are divided by scales {distance} too {size}", {"ranges": times(by)})
          for distance, factor in (("a step", 2 ** (1 / _OCTAVE)), ("an octave", 2.0))
          for size, by in (("large", factor), ("small", 1 / factor))),
        ("stale scales", f"new {{}} are read with scales {HELD}", {"bytes": _stale(0, 1)}),
        ("stale scales", f"new {{}} are read with zero points {HELD}", {"bytes": _stale(1, 2)}),
        ("stale scales", f"new {{}} are read with scales and zero points {HELD}",
         {"bytes": _stale(0, 2)}),
        (CLIPPED, "integers of {} beyond 15 start at 0 again",
         {"clipped": of_step(lambda x: x % 16, "integers")}),
        (CLIPPED, "integers of {} beyond 15 are not clipped", {"clipped": step("integers")}),
        (CLIPPED, "integers of {} are clipped at 14", {"clipped": plain(lambda x: x.clip(0, 14))}),
        (LAYOUT, "a byte of {} is read as channels c and c + D / 2",
         {"read": lambda x, _: np.concatenate([x[..., ::2], x[..., 1::2]], -1)}),
        (LAYOUT, f"the bytes of scales and zero points of {{}} are exchanged{READ}",
         {"bytes": _exchange_scales_and_zeros}),
        *((BOUNDS, f"blocks of {{}} begin {counted(by, 'channel')} {way}{where}", changes)
          for by in (1, 2, 8, 16) for way, to in (("late", -by), ("early", by))
          for where, changes in (
              ("", {"ordered": roll(to, -1), "unordered": roll(-to, -1)}),
              (WRITTEN, {"ordered": roll(to, -1)}))),
        (BOUNDS, "blocks of {} are every channel c, c + {blocks}, …",
         {"ordered": _every_nth, "unordered": _undo_every_nth}),
        (BOUNDS, f"blocks of {{}} are every channel c, c + {{blocks}}, …{WRITTEN}",
         {"ordered": _every_nth})),
    *rows(hadamard,
        (ROTATION, "{} are not multiplied by the Hadamard matrix", {"output": step("input")}),
        (ROTATION, "{} are multiplied by the Hadamard matrix without its scale",
         {"output": lambda x, at: x / np.abs(at["weight"]).max()}),
        (ROTATION, "{} are multiplied by the Hadamard matrix in reverse order",
         {"output": lambda x, _: x[..., ::-1]}),
        (ROTATION, "{} are multiplied by the Hadamard matrix one column late",
         {"output": roll(1, -1)})),
)  # fmt: skip
"""Mistakes of caches with block scales, and of the rotation before them."""

IN_FLOAT16_CACHES: Final = (
    *rows(cache("float16"),
        (ROUNDING, "new {} are rounded to float16 toward 0, not to nearest",
         {"rounded": of_step(lambda x: _to_float16(x, 0.0), "x")}),
        (ROUNDING, "new {} are rounded to float16 away from 0, not to nearest",
         {"rounded": of_step(lambda x: _to_float16(x, np.inf), "x")}),
        (ROUNDING, "new {} are rounded to bfloat16 before float16",
         {"rounded": of_step(lambda x: round_to_bfloat16(x).astype(np.float16), "x")}),
        (ROUNDING, "attention reads new {} that are not rounded to float16",
         {"dequantised": _before_rounding})),
    *rows(cache("float16", "both"),
        ("keys and values exchanged", "values are written as keys, and keys as values",
         {"rounded": of_step(lambda x: x.astype(np.float16), "other")})),
)  # fmt: skip

FITTED: Final = tuple(
    fitted(cache("whole", "both"), SCALE,
           f"the scales of {{}} are {{factor}} times the right ones{where}", *steps)
    for where, steps in (("", _SCALE_STEPS), (READ, _SCALE_STEPS[:1]), (WRITTEN, _SCALE_STEPS[1:]))
)  # fmt: skip

KNOWN: Final = (*_IN_WHOLE_CACHES, *IN_INTEGER_CACHES, *_IN_BLOCK_CACHES, *IN_FLOAT16_CACHES)
