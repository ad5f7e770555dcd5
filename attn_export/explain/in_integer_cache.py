"""Known mistakes in a KV cache of integers: scales, rounding, zero points, order of bytes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from attn_export.explain.mistake import (
    ArrayChange,
    Mistake,
    array_of,
    cache_scatters,
    join,
    keys_and_values,
    round_to_bfloat16,
    scatter_into_cache,
    swap_neighbours,
    unchanged,
)
from attn_export.float64.contrib_operators import unpack_nibbles
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

# -- steps of writing and reading a cache -------------------------------------------------------

NIBBLE_OFFSET = 8
"""The offset that makes integers of 4 bits unsigned, 0 to 15."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps of writing and reading a cache, in their order.

    Each maps the right array to the mistaken one. The default changes nothing.

    Attributes:
        write_scale: Of the scales by which new tokens are divided, `[Hkv, 1, D]` or `[]`.
        read_scale: Of the scales by which integers are multiplied, of the same shape.
        rounds: Maps the quotients of new tokens to integers, both `[B, Hkv, L, D]`.
        written: Of the new integers, `[B, Hkv, L, D]`; with 4 bits, before two become a byte.
        packed: Of the new bytes with two integers each, `[B, Hkv, L, D / 2]`.
        stored: Of the whole cache, int8 `[B, Hkv, S, D]` or bytes `[B, Hkv, S, D / 2]`.
        read: Of the integers that are read, `[B, Hkv, S, D]`.
        unrounded: Whether new tokens are read as they were before quantisation.
    """

    write_scale: ArrayChange = unchanged
    read_scale: ArrayChange = unchanged
    rounds: ArrayChange = np.rint
    limits: Callable[[int, int], tuple[int, int]] = lambda low, high: (low, high)
    written: ArrayChange = unchanged
    packed: ArrayChange = unchanged
    stored: ArrayChange = unchanged
    read: ArrayChange = unchanged
    unrounded: bool = False


@dataclasses.dataclass(frozen=True)
class CachePart:
    """The keys, or the values, of a cache of integers in a graph.

    Attributes:
        scale: The scale, `[]`, or `[Hkv, 1, D]` with one for each channel.
        new: The name of the new tokens before quantisation, `[B, Hkv, L, D]`.
        scatter: The node that writes new integers into the cache.
        dequantised: The name of the dequantised cache, `[B, Hkv, S, D]`.
        is_packed: Whether a byte of the cache holds two integers of 4 bits; else it is int8.
    """

    scale: Array
    new: str
    scatter: onnx.NodeProto
    dequantised: str
    is_packed: bool

    def replaced(self, evaluation: Evaluation, steps: Steps, values: Values) -> dict[str, Array]:
        """Return the cache and its dequantised values, computed with other steps."""
        x, past = array_of(values, self.new), array_of(values, self.scatter.input[0])
        low, high = steps.limits(*((-8, 7) if self.is_packed else (-128, 127)))
        rounded = steps.rounds(x / steps.write_scale(self.scale))
        if self.is_packed:
            new = steps.packed(_pack(steps.written(np.clip(rounded, low, high))))
        else:  # QuantizeLinear saturates after it has added the zero point
            new = np.clip(steps.written(rounded), low, high)
        new = new.astype(np.int64).astype(past.dtype)
        present = scatter_into_cache(self.scatter, evaluation, values, past, new)
        present = steps.stored(present).astype(past.dtype)
        read = steps.read(_unpack(present) if self.is_packed else present.astype(np.float64))
        dequantised = read * steps.read_scale(self.scale)
        if steps.unrounded:
            past_values = (_unpack(past) if self.is_packed else past) * self.scale
            dequantised = scatter_into_cache(self.scatter, evaluation, values, past_values, x)
        return {self.scatter.output[0]: present, self.dequantised: dequantised}


def _pack(q: Array) -> Array:
    nibbles = q.astype(np.int64) + NIBBLE_OFFSET
    return np.asarray((nibbles[..., ::2] + 16 * nibbles[..., 1::2]) % 256)


def _unpack(stored: Array) -> Array:
    return unpack_nibbles(stored).astype(np.float64) - NIBBLE_OFFSET


def _cache_parts(evaluation: Evaluation) -> dict[str, CachePart]:
    """Return the keys and the values of a cache of integers, if the graph has both."""
    parts = {}
    dtypes = {i.name: i.type.tensor_type.elem_type for i in evaluation.proto.graph.input}
    for name, scatter in cache_scatters(evaluation).items():
        # The initialisers are k_scale and v_scale.
        names = (n for n in evaluation.initializers if n.endswith(f"kv_scales.{name[0]}_scale"))
        scale = next(names, None)
        users = [node for node in evaluation.nodes if scale is not None and scale in node.input]
        writing = [node for node in users if node.op_type in ("Div", "QuantizeLinear")]
        reading = [node for node in users if node.op_type == "Mul"]
        if scale is None or not len(writing) == len(reading) == 1:
            return {}
        new, dequantised = writing[0].input[0], reading[0].output[0]
        is_packed = dtypes[scatter.input[0]] == onnx.TensorProto.UINT8
        parts[name] = CachePart(
            evaluation.initializers[scale], new, scatter, dequantised, is_packed
        )
    return parts


# -- known mistakes in them ---------------------------------------------------------------------


def _permute_pairs(*perm: int) -> ArrayChange:
    """Return a permutation of the axes of channel pairs, `[B, Hkv, S, D / 2, 2]`."""
    return lambda x: x.reshape(*x.shape[:-1], -1, 2).transpose(perm).reshape(x.shape)


def _round_again(ratio: float) -> ArrayChange:
    """Return a function that rounds int8 once more, to `ratio` times the scale."""
    return lambda x: np.clip(np.rint(np.rint(x / ratio) * ratio), -128, 127)


def _zero_point_steps() -> Iterator[tuple[str, str, Steps]]:
    kind = "zero point"
    for by in (1, -1, -128):
        effect = f"the zero point of {{}} is off by {by:+d}"
        write, read = functools.partial(np.add, by), functools.partial(np.add, -by)
        yield kind, f"{effect} when the cache is written", Steps(written=write)
        yield kind, f"{effect} when the cache is read", Steps(read=read)
        yield kind, effect, Steps(written=write, read=read)


SCALES: Final[Mapping[str, ArrayChange]] = {
    "halved": lambda s: s / 2, "doubled": lambda s: s * 2, "squared": np.square,
    "left out": np.ones_like, "127/128 of the right ones": lambda s: s * 127 / 128,
    "7/8 of the right ones": lambda s: s * 7 / 8, "those of int8": lambda s: s * 7 / 127,
    "those of int4": lambda s: s * 127 / 7, "rounded to bfloat16": round_to_bfloat16,
}  # fmt: skip
"""Wrong scales that any cache may have."""

AXES: Final[Mapping[str, ArrayChange]] = {
    "exchanged between heads and channels": lambda s: s.transpose(2, 1, 0),
    "those of the previous channel": lambda s: np.roll(s, 1, -1),
    "those of the next channel": lambda s: np.roll(s, -1, -1),
    "those of the previous head": lambda s: np.roll(s, 1, 0),
    "those of the next head": lambda s: np.roll(s, -1, 0),
    "those of the first head for all": lambda s: s * 0 + s[:1],
    "the largest for all channels": lambda s: s * 0 + s.max(),
}
"""Wrong scales of a cache with a scale for each channel, `[Hkv, 1, D]`."""

OF_ANY_CACHE: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("rounding", "{} are rounded down", {"rounds": np.floor}),
    ("rounding", "{} are rounded up", {"rounds": np.ceil}),
    ("rounding", "{} are rounded towards 0", {"rounds": np.trunc}),
    ("rounding", "new {} are used before quantisation", {"unrounded": True}),
    ("nibble order", "neighbouring channels of {} are swapped when the cache is written",
     {"written": swap_neighbours(-1)}),
    ("nibble order", "neighbouring channels of {} are swapped when the cache is read",
     {"read": swap_neighbours(-1)}),
)  # fmt: skip
"""Kind, effect and changed steps of mistakes in any cache, also in one with block scales."""

OF_PACKED_CACHE: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("nibble order", "the two integers of a byte of {} are swapped",
     {"written": swap_neighbours(-1), "read": swap_neighbours(-1)}),
    ("cache layout", "a byte holds the first of two channels of {} twice",
     {"written": lambda q: q[..., ::2].repeat(2, -1)}),
    ("cache layout", "the upper half of a byte of {} is moved by 3 bits, not 4",
     {"packed": lambda b: (b & 15) + 8 * (b >> 4)}),
)  # fmt: skip
"""The same of mistakes in a cache with two integers in a byte, also in one with block scales."""

STEP_MISTAKES: Final[tuple[tuple[str, str, Steps], ...]] = (
    *_zero_point_steps(),
    *((kind, effect, Steps(**steps)) for kind, effect, steps in OF_ANY_CACHE),
    ("clipped range", "{} are clipped at one more than the least integer",
     Steps(limits=lambda low, high: (low + 1, high))),
    ("clipped range", "{} are clipped at one less than the largest integer",
     Steps(limits=lambda low, high: (low, high - 1))),
    ("clipped range", "{} are not clipped from below",
     Steps(limits=lambda low, high: (2 * low, high))),
    ("clipped range", "{} are not clipped from above",
     Steps(limits=lambda low, high: (low, 2 * high + 1))),
    ("signedness", "the sign of {} is lost", Steps(rounds=lambda x: np.rint(np.abs(x)))),
    ("signedness", "the sign of {} is lost when the cache is read", Steps(read=np.abs)),
)  # fmt: skip
"""Kind, effect and steps of each mistake in any cache; ``{}`` stands for the keys and values."""

INT8_STEP_MISTAKES: Final[tuple[tuple[str, str, Steps], ...]] = (
    ("clipped range", "{} are clipped to the range of 4 bits", Steps(limits=lambda *_: (-8, 7))),
    *(("quantised twice", f"{{}} are rounded once more, to {ratio} times the scale",
       Steps(stored=_round_again(ratio))) for ratio in range(2, 17)),
)  # fmt: skip
"""The same of mistakes in a cache of int8."""

PACKED_STEP_MISTAKES: Final[tuple[tuple[str, str, Steps], ...]] = (
    *((kind, effect, Steps(**steps)) for kind, effect, steps in OF_PACKED_CACHE),
    ("signedness", "{} are read as two's complement",
     Steps(read=lambda x: np.where(x < 0, x + NIBBLE_OFFSET, x - NIBBLE_OFFSET))),
    ("cache layout", "lower halves of all bytes of {} are read before all upper ones",
     Steps(read=_permute_pairs(0, 1, 4, 2, 3))),
    ("cache layout", "bytes of {} are read by channel first, then by key",
     Steps(read=_permute_pairs(0, 1, 3, 2, 4))),
    ("cache layout", "lower halves of the bytes of each key of {} are read before upper ones",
     Steps(read=_permute_pairs(0, 1, 2, 4, 3))),
    ("cache layout", "a byte holds channels c and c + D / 2 of {}",
     Steps(written=lambda x: np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape))),
)  # fmt: skip
"""The same of mistakes in a cache with two integers in a byte."""

SCALE_USES: Final[Mapping[str, Sequence[str]]] = {
    "": ("write_scale", "read_scale"),
    " when the cache is read": ("read_scale",),
    " when the cache is written": ("write_scale",),
}
"""Ends of sentences on a wrong scale, with the steps that use the scale."""


def cache_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of writing and reading a cache of integers."""
    parts = _cache_parts(evaluation)
    if not parts:
        return
    both = tuple(parts.values())
    wrong_scales = [("cache scale", name, change) for name, change in SCALES.items()]
    if both[0].scale.ndim:
        wrong_scales += [("scale axis", name, change) for name, change in AXES.items()]
    for where, fields in SCALE_USES.items():
        for kind, name, change in wrong_scales:
            steps = _steps_with(fields, change)
            for described, changed in keys_and_values(parts).items():
                effect = f"the scales of cached {described} are {name}{where}"
                yield _mistake(evaluation, changed, kind, effect, [steps] * len(changed))
        exchanged = [_steps_with(fields, functools.partial(_scale_of, part)) for part in both[::-1]]
        effect = f"the scales of cached keys and values are exchanged{where}"
        yield _mistake(evaluation, both, "cache scale", effect, exchanged)
    of_type = PACKED_STEP_MISTAKES if both[0].is_packed else INT8_STEP_MISTAKES
    for kind, effect, steps in (*STEP_MISTAKES, *of_type):
        clause = effect.format("cached keys and values")
        yield _mistake(evaluation, both, kind, clause, [steps] * 2)


def fitted_cache_scales(evaluation: Evaluation) -> list[Callable[[float], Mistake]]:
    """Return functions from a factor to the mistake of scales that are wrong by this factor."""
    parts = tuple(_cache_parts(evaluation).values())

    def make(where: str, factor: float) -> Mistake:
        steps = _steps_with(SCALE_USES[where], lambda s: s * factor)
        effect = f"the scales of cached keys and values are {factor:.4g} times the right ones"
        return _mistake(evaluation, parts, "cache scale", effect + where, [steps] * len(parts))

    return [functools.partial(make, where) for where in SCALE_USES] if parts else []


def _steps_with(fields: Sequence[str], change: ArrayChange) -> Steps:
    changes: dict[str, Any] = dict.fromkeys(fields, change)
    return Steps(**changes)


def _scale_of(other: CachePart, _: Array) -> Array:
    return other.scale


def _mistake(
    evaluation: Evaluation, parts: Sequence[CachePart], kind: str, effect: str,
    steps: Sequence[Steps],
) -> Mistake:  # fmt: skip
    changes = (
        functools.partial(part.replaced, evaluation, part_steps)
        for part, part_steps in zip(parts, steps, strict=True)
    )
    return Mistake(kind, effect, parts[0].scatter.name, join(changes))
