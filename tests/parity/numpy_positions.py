"""Positions once more, in plain numpy, from the definitions: rotary, ALiBi, T5's relative bias.

Nothing of `attn_export.attention` is used. Legend: see `numpy_attention`; R rotated width.
"""

from __future__ import annotations

import math

import numpy as np

from attn_export.spec import AttentionSpec

LOW_TURNS, HIGH_TURNS = 1, 4
"""Llama 3: pairs with fewer turns in the trained context are stretched, with more are kept."""

SLOW_TURNS, FAST_TURNS = 1, 32
"""YaRN's beta_slow and beta_fast."""


def frequencies(spec: AttentionSpec) -> np.ndarray:
    """Radians from one position to the next, float32 `[R/2]`, stretched as the spec says."""
    plain = [spec.rotary_theta ** (-2 * i / spec.rotary_dim) for i in range(spec.rotary_dim // 2)]
    stretched = {"none": _kept, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
    return np.float32(stretched[spec.rotary_scaling](spec, plain))


def magnitude(spec: AttentionSpec) -> float:
    """YaRN's factor on rotated queries and keys."""
    return 1 + 0.1 * math.log(spec.rotary_factor) if spec.rotary_scaling == "yarn" else 1.0


def rotated(
    x: np.ndarray, inv_freq: np.ndarray, start: int, layout: str, factor: float
) -> np.ndarray:
    """Pairs of the first R elements as complex numbers, turned by their position."""
    R = 2 * len(inv_freq)
    pairs = {
        "half": (np.s_[..., : R // 2], np.s_[..., R // 2 : R]),
        "interleaved": (np.s_[..., 0:R:2], np.s_[..., 1:R:2]),
    }
    real, imaginary = pairs[layout]
    position = np.arange(start, start + x.shape[2], dtype=np.float32)
    turn = np.exp(1j * np.multiply.outer(position, inv_freq)) * factor  # [L, R/2]
    turned = (x[real] + 1j * x[imaginary]) * turn.astype(np.complex64)
    y = x.copy()
    y[real], y[imaginary] = turned.real, turned.imag
    return y


def offsets(P: int, shape: tuple[int, ...]) -> np.ndarray:
    """Position of the key minus position of the query, `[L, S]`."""
    i, j = np.indices(shape[-2:])
    return j - (i + P)


def slopes(heads: int) -> np.ndarray:
    """ALiBi's slopes `[H, 1, 1]`: 2^(-8/n), its square, ... for n heads, n a power of 2.

    Other numbers take those of the power below, then the 1st, 3rd, ... of twice that power.
    """
    power = 2 ** math.floor(math.log2(heads))
    more = geometric(2 * power)[::2][: heads - power]
    return np.concatenate([geometric(power), more])[:, None, None]


def geometric(heads: int) -> np.ndarray:
    """2^(-8h/H) for h from 1 to H."""
    return np.float32([2 ** (-8 * h / heads) for h in range(1, heads + 1)])


def buckets(offset: np.ndarray, spec: AttentionSpec, *, both_sides: bool) -> np.ndarray:
    """T5's bucket of each offset. With both sides, later keys have the second half."""
    count = spec.relative_buckets // 2 if both_sides else spec.relative_buckets
    distance = np.abs(offset) if both_sides else np.maximum(-offset, 0)
    table = np.array([_bucket(d, count, spec.relative_max_distance) for d in range(600)])
    return table[distance] + (count * (offset > 0) if both_sides else 0)


def _bucket(distance: int, count: int, longest: int) -> int:
    """The first half are distances of their own, the rest is equal steps of the logarithm.

    In whole numbers, so that nothing is rounded: the step k that distance d has reached is the
    largest one with (longest / exact)^(k / steps) <= d / exact.
    """
    exact = count // 2
    steps = count - exact
    if distance < exact:
        return distance
    reached = [
        k
        for k in range(steps)
        if longest**k * exact**steps <= distance**steps * exact**k
    ]  # fmt: skip
    return exact + reached[-1]


def _kept(_: AttentionSpec, plain: list[float]) -> list[float]:
    return plain


def _linear(spec: AttentionSpec, plain: list[float]) -> list[float]:
    return [f / spec.rotary_factor for f in plain]


def _llama3(spec: AttentionSpec, plain: list[float]) -> list[float]:
    def one(f: float) -> float:
        wavelength = 2 * math.pi / f
        if wavelength > spec.rotary_original_len / LOW_TURNS:
            return f / spec.rotary_factor
        if wavelength < spec.rotary_original_len / HIGH_TURNS:
            return f
        turns = spec.rotary_original_len / wavelength
        smooth = (turns - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS)
        return (1 - smooth) * f / spec.rotary_factor + smooth * f

    return [one(f) for f in plain]


def _yarn(spec: AttentionSpec, plain: list[float]) -> list[float]:
    """As in the published code: the ramp is linear in the number of the pair."""
    R, context = spec.rotary_dim, spec.rotary_original_len

    def pair(turns: int) -> float:
        """The i with theta^(-2i/R) * context = 2 pi turns."""
        return R / 2 * math.log(context / (2 * math.pi * turns), spec.rotary_theta)

    first, last = max(math.floor(pair(FAST_TURNS)), 0), min(math.ceil(pair(SLOW_TURNS)), R - 1)
    stretched = np.interp(range(len(plain)), [first, last], [0, 1])
    return [f * (1 - s) + f / spec.rotary_factor * s for f, s in zip(plain, stretched, strict=True)]
