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


def frequencies(spec: AttentionSpec) -> list[float]:
    """The angle by which each pair turns in one step."""
    R, base = spec.rotary_dim, spec.rotary_theta
    plain = [1.0 / base ** (2 * i / R) for i in range(R // 2)]
    if spec.rotary_scaling == "linear":
        return [frequency / spec.rotary_factor for frequency in plain]
    if spec.rotary_scaling == "llama3":
        return [_llama3(f, spec.rotary_factor, spec.rotary_original_len) for f in plain]
    if spec.rotary_scaling == "yarn":
        return _yarn(plain, R, base, spec.rotary_factor, spec.rotary_original_len)
    return plain


def magnitude(spec: AttentionSpec) -> float:
    """YaRN's attention_factor."""
    if spec.rotary_scaling != "yarn" or spec.rotary_factor <= 1:
        return 1.0
    return 0.1 * math.log(spec.rotary_factor) + 1.0


def _llama3(frequency: float, factor: float, old_context_len: int) -> float:
    low_freq_factor, high_freq_factor = 1.0, 4.0
    wavelength = 2 * math.pi / frequency
    if wavelength < old_context_len / high_freq_factor:
        return frequency
    if wavelength > old_context_len / low_freq_factor:
        return frequency / factor
    smooth = (old_context_len / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(plain: list[float], dim: int, base: float, factor: float, length: int) -> list[float]:
    def correction_dim(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = float(max(math.floor(correction_dim(32)), 0))
    high = float(min(math.ceil(correction_dim(1)), dim - 1))
    if low == high:
        high += 0.001
    scaled = []
    for i, extrapolated in enumerate(plain):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        scaled.append(extrapolated / factor * ramp + extrapolated * (1 - ramp))
    return scaled


def rotated(x: NDArray[np.float64], spec: AttentionSpec, start: int) -> NDArray[np.float64]:
    """[B, H, L, D]: pairs as complex numbers, times e^(i * position * frequency)."""
    R = spec.rotary_dim
    if spec.rotary == "half":
        first, second = np.arange(R // 2), np.arange(R // 2, R)
    else:
        first, second = np.arange(0, R, 2), np.arange(1, R, 2)
    places = np.arange(start, start + x.shape[2])[:, None]
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * places * frequencies(spec))
    result = x.copy()
    result[..., first] = turned.real * magnitude(spec)
    result[..., second] = turned.imag * magnitude(spec)
    return result


def alibi_slopes(n: int) -> list[float]:
    """`get_slopes` of https://github.com/ofirpress/attention_with_linear_biases."""

    def power_of_2(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + alibi_slopes(2 * closest)[0::2][: n - closest]


def t5_bucket(offset: int, buckets: int, max_distance: int, *, both_sides: bool) -> int:
    """The bucket of key position minus query position, in float32 as T5 computes it."""
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
    """Whether a window shows a key that is so far after the query."""
    return (left is None or -offset <= left) and (right is None or offset <= right)
