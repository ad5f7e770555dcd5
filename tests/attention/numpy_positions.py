"""Reference for positions in plain numpy: rotary, ALiBi, T5's relative bias.

Nothing of `attn_export.attention` is used. Legend: see `numpy_attention`; R rotated width.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from attn_export.spec import AttentionSpec


def frequencies(spec: AttentionSpec, length: int) -> np.ndarray:
    """Return radians per position, `[R/2]`, stretched as the spec defines."""
    if spec.rotary_scaling == "dynamic":
        longest = max(length, spec.rotary_original_len)
        return of_base(spec, stretched_base(spec, longest))
    plain = [spec.rotary_theta ** (-2 * i / spec.rotary_dim) for i in range(spec.rotary_dim // 2)]
    if spec.rotary_scaling == "longrope":
        longer = length > spec.rotary_original_len
        return np.array(plain) / (spec.rotary_long_factors if longer else spec.rotary_short_factors)
    stretched = {"none": _kept, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
    return np.array(stretched[spec.rotary_scaling](spec, plain))


def of_base(spec: AttentionSpec, base: float | np.ndarray) -> np.ndarray:
    """Return base^(-2i/R), `[.., R/2]`."""
    pairs = np.arange(spec.rotary_dim // 2)
    return np.power(np.asarray(base, np.float64)[..., None], -2 * pairs / spec.rotary_dim)


def stretched_base(
    spec: AttentionSpec, length: int | np.ndarray, power: float | None = None
) -> float | np.ndarray:
    """Return the base of dynamic NTK for a sequence of that length, long or not."""
    R, factor = spec.rotary_dim, spec.rotary_factor
    grown = factor * length / spec.rotary_original_len - (factor - 1)
    return spec.rotary_theta * grown ** (R / (R - 2) if power is None else power)


def magnitude(spec: AttentionSpec) -> float:
    """Return the factor of YaRN or LongRoPE on rotated queries and keys."""
    if spec.rotary_scaling not in ("yarn", "longrope"):
        return 1.0
    if spec.rotary_magnitude is not None:
        return spec.rotary_magnitude
    if spec.rotary_scaling == "longrope":
        return math.sqrt(1 + math.log(spec.rotary_factor, spec.rotary_original_len))
    return 1 + 0.1 * math.log(spec.rotary_factor)


def rotated(
    x: np.ndarray, inv_freq: np.ndarray, position: np.ndarray, layout: str, factor: float
) -> np.ndarray:
    """Rotate pairs of the first R elements as complex numbers, by their position.

    Args:
        x: `[B, H, L, D]`.
        inv_freq: `[R/2]`, or `[.., L, R/2]` where each position has its own.
        position: `[L]`, or `[B, L]` where each row has its own.
        layout: Which elements are a pair.
        factor: On what was turned.
    """
    R = 2 * inv_freq.shape[-1]
    pairs = {
        "half": (np.s_[..., : R // 2], np.s_[..., R // 2 : R]),
        "interleaved": (np.s_[..., 0:R:2], np.s_[..., 1:R:2]),
    }
    real, imaginary = pairs[layout]
    angle = position.astype(x.dtype)[..., None] * inv_freq  # [L, R/2] or [B, L, R/2]
    turn = np.exp(1j * (angle if angle.ndim == 2 else angle[:, None])) * factor
    turned = (x[real] + 1j * x[imaginary]) * turn.astype(np.result_type(x.dtype, np.complex64))
    y = x.copy()
    y[real], y[imaginary] = turned.real, turned.imag
    return y


def offsets(P: int | np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return key position minus query position, `[L, S]`, or as P is `[B, 1, L, S]`."""
    i, j = np.indices(shape[-2:])
    return j - (i + P)


def slopes(heads: int) -> np.ndarray:
    """Return ALiBi's slopes `[H, 1, 1]`: 2^(-8/n), its square, ... for n heads, n a power of 2.

    Other numbers take those of the power below, then the 1st, 3rd, ... of twice that power.
    """
    power = 2 ** math.floor(math.log2(heads))
    more = geometric(2 * power)[::2][: heads - power]
    return np.concatenate([geometric(power), more])[:, None, None]


def falcon(spec: AttentionSpec, S: int) -> np.ndarray:
    """Return Falcon's bias `[H, 1, S]`: keys, slopes and their products are in bfloat16."""
    keys, of_heads = (x.astype(ml_dtypes.bfloat16) for x in (np.arange(S), slopes(spec.num_heads)))
    product = keys.astype(np.float64) * of_heads.astype(np.float64)
    return product.astype(ml_dtypes.bfloat16).astype(np.float64) * spec.softmax_scale


def geometric(heads: int) -> np.ndarray:
    """Return 2^(-8h/H) for h from 1 to H."""
    return np.array([2 ** (-8 * h / heads) for h in range(1, heads + 1)])


def buckets(offset: np.ndarray, spec: AttentionSpec, *, both_sides: bool) -> np.ndarray:
    """Return T5's bucket of each offset. With both sides, later keys have the second half."""
    count = spec.relative_buckets // 2 if both_sides else spec.relative_buckets
    distance = np.abs(offset) if both_sides else np.maximum(-offset, 0)
    furthest = int(distance.max(initial=0))
    table = np.array([_bucket(d, count, spec.relative_max_distance) for d in range(furthest + 1)])
    return table[distance] + (count * (offset > 0) if both_sides else 0)


def _bucket(distance: int, count: int, longest: int) -> int:
    """Return the bucket: half are single distances, the rest equal steps of the logarithm.

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
    low, high = spec.rotary_low_freq, spec.rotary_high_freq

    def one(f: float) -> float:
        wavelength = 2 * math.pi / f
        if wavelength > spec.rotary_original_len / low:
            return f / spec.rotary_factor
        if wavelength < spec.rotary_original_len / high:
            return f
        turns = spec.rotary_original_len / wavelength
        smooth = (turns - low) / (high - low)
        return (1 - smooth) * f / spec.rotary_factor + smooth * f

    return [one(f) for f in plain]


def _yarn(spec: AttentionSpec, plain: list[float]) -> list[float]:
    """Stretch as in the published code: the ramp is linear in the number of the pair."""
    R, context = spec.rotary_dim, spec.rotary_original_len

    def pair(turns: float) -> float:
        """Return the i with theta^(-2i/R) * context = 2 pi turns."""
        return R / 2 * math.log(context / (2 * math.pi * turns), spec.rotary_theta)

    first, last = pair(spec.rotary_beta_fast), pair(spec.rotary_beta_slow)
    if spec.rotary_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    last += 0.001 * (first == last)
    stretched = np.interp(range(len(plain)), [first, last], [0, 1])
    return [f * (1 - s) + f / spec.rotary_factor * s for f, s in zip(plain, stretched, strict=True)]
