"""Positions as the papers and the models' code state them, one number at a time.

Shares no code with the package. Rotary scaling is Hugging Face's `modeling_rope_utils`, ALiBi's
slopes are those of the paper's repository and T5's buckets `T5Attention._relative_position_bucket`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from attn_export.spec import AttentionSpec


def frequencies(spec: AttentionSpec, length: int = 0) -> list[float]:
    """Return the angle of each pair for one step, in a sequence of that length."""
    R, base = spec.rotary_dim, spec.rotary_theta
    plain = [1.0 / base ** (2 * i / R) for i in range(R // 2)]
    if spec.rotary_scaling == "linear":
        return [frequency / spec.rotary_factor for frequency in plain]
    if spec.rotary_scaling == "llama3":
        return [_llama3(f, spec) for f in plain]
    if spec.rotary_scaling == "yarn":
        return _yarn(plain, spec)
    if spec.rotary_scaling == "longrope":
        is_long = length > spec.rotary_original_len
        factors = spec.rotary_long_factors if is_long else spec.rotary_short_factors
        return [f / factor for f, factor in zip(plain, factors, strict=True)]
    if spec.rotary_scaling == "dynamic":
        longest = max(length, spec.rotary_original_len)
        stretched = spec.rotary_factor * longest / spec.rotary_original_len
        base *= (stretched - (spec.rotary_factor - 1)) ** (R / (R - 2))
        return [1.0 / base ** (2 * i / R) for i in range(R // 2)]
    return plain


def magnitude(spec: AttentionSpec) -> float:
    """Return YaRN's or LongRoPE's attention_factor."""
    if spec.rotary_scaling not in ("yarn", "longrope"):
        return 1.0
    if spec.rotary_magnitude is not None:
        return spec.rotary_magnitude
    if spec.rotary_factor <= 1:
        return 1.0
    if spec.rotary_scaling == "longrope":
        return math.sqrt(1 + math.log(spec.rotary_factor) / math.log(spec.rotary_original_len))
    return 0.1 * math.log(spec.rotary_factor) + 1.0


def _llama3(frequency: float, spec: AttentionSpec) -> float:
    factor, old_context_len = spec.rotary_factor, spec.rotary_original_len
    low_freq_factor, high_freq_factor = spec.rotary_low_freq, spec.rotary_high_freq
    wavelength = 2 * math.pi / frequency
    if wavelength < old_context_len / high_freq_factor:
        return frequency
    if wavelength > old_context_len / low_freq_factor:
        return frequency / factor
    smooth = (old_context_len / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(plain: list[float], spec: AttentionSpec) -> list[float]:
    dim, base, factor = spec.rotary_dim, spec.rotary_theta, spec.rotary_factor
    length = spec.rotary_original_len

    def correction_dim(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = correction_dim(spec.rotary_beta_fast), correction_dim(spec.rotary_beta_slow)
    if spec.rotary_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = float(max(low, 0)), float(min(high, dim - 1))
    if low == high:
        high += 0.001
    scaled = []
    for i, extrapolated in enumerate(plain):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        scaled.append(extrapolated / factor * ramp + extrapolated * (1 - ramp))
    return scaled


def rotated(
    x: NDArray[np.float64], spec: AttentionSpec, start: int | NDArray[np.int64]
) -> NDArray[np.float64]:
    """Rotate [B, H, L, D]: pairs as complex numbers, times e^(i * position * frequency).

    `start` is the position of the first, or the positions of all, [B, L].
    """
    R = spec.rotary_dim
    if spec.rotary == "half":
        first, second = np.arange(R // 2), np.arange(R // 2, R)
    else:
        first, second = np.arange(0, R, 2), np.arange(1, R, 2)
    if isinstance(start, int):
        places = np.arange(start, start + x.shape[2])[:, None]
    else:
        places = start[:, None, :, None]
    angles = places * np.array(frequencies(spec, int(places.max()) + 1))
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    result = x.copy()
    result[..., first] = turned.real * magnitude(spec)
    result[..., second] = turned.imag * magnitude(spec)
    return result


def alibi_slopes(n: int) -> list[float]:
    """Return `get_slopes` of https://github.com/ofirpress/attention_with_linear_biases."""

    def power_of_2(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + alibi_slopes(2 * closest)[0::2][: n - closest]


def t5_bucket(offset: int, buckets: int, max_distance: int, *, both_sides: bool) -> int:
    """Return the bucket of key position minus query position, in float32 as T5 computes it."""
    bucket = 0
    if both_sides:
        buckets //= 2
        if offset > 0:
            bucket += buckets
        offset = abs(offset)
    else:
        offset = -min(offset, 0)
    max_exact = buckets // 2
    if offset < max_exact:
        return bucket + offset
    share = torch.tensor(float(offset)) / max_exact
    far = torch.log(share) / math.log(max_distance / max_exact) * (buckets - max_exact)
    return bucket + min(max_exact + int(far.to(torch.long)), buckets - 1)


def window_shows(offset: int, left: int | None, right: int | None) -> bool:
    """Return whether a window shows a key at this offset after the query."""
    return (left is None or -offset <= left) and (right is None or offset <= right)
