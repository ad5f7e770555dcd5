"""Positions in attention: rotary, ALiBi, T5's relative bias, windows.

Legend: L queries at positions P … P + L - 1, S keys at 0 … S - 1, R rotated width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_export.spec import AttentionSpec

# Of Llama 3 and YaRN, as published with the models.
LLAMA3_LOW, LLAMA3_HIGH = 1.0, 4.0
YARN_FAST, YARN_SLOW = 32.0, 1.0


def inverse_frequencies(spec: AttentionSpec) -> Tensor:
    """The angle by which each pair turns from one position to the next, float64 `[R/2]`.

    theta^(-2i/R) (Su et al. 2021, sec. 3.2.2), stretched as `rotary_scaling` says: "linear" (Chen
    et al. 2023), "llama3" (Llama 3.1's rope_scaling), "yarn" (Peng et al. 2023, sec. 3.2, with the
    ramp over pairs of their code).
    """
    R, factor = spec.rotary_dim, spec.rotary_factor
    plain = spec.rotary_theta ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    if spec.rotary_scaling == "linear":
        return plain / factor
    if spec.rotary_scaling == "llama3":
        turns = spec.rotary_original_len * plain / (2 * math.pi)
        kept = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0, 1)
        return plain * (kept + (1 - kept) / factor)
    if spec.rotary_scaling == "yarn":

        def pair_of(turns: float) -> float:
            """Which pair makes so many turns within the original context."""
            span = spec.rotary_original_len / (turns * 2 * math.pi)
            return R * math.log(span) / (2 * math.log(spec.rotary_theta))

        low = max(math.floor(pair_of(YARN_FAST)), 0)
        high = min(math.ceil(pair_of(YARN_SLOW)), R - 1)
        ramp = (torch.arange(R // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return plain * (kept + (1 - kept) / factor)
    return plain


def rotary_magnitude(spec: AttentionSpec) -> float:
    """What YaRN multiplies rotated queries and keys by (Peng et al. 2023, eq. 22), else 1."""
    if spec.rotary_scaling == "yarn" and spec.rotary_factor > 1:
        return 0.1 * math.log(spec.rotary_factor) + 1.0
    return 1.0


def rotate(
    x: Tensor, inv_freq: Tensor, start: int, *, interleaved: bool, magnitude: float
) -> Tensor:
    """Rotate pairs of elements by position.

    Args:
        x: `[B, H, L, D]`; its first R elements are rotated.
        inv_freq: `[R/2]`.
        start: The position of the first of the L, the past length.
        interleaved: Whether pairs are 2i and 2i + 1, else i and i + R/2.
        magnitude: Factor on what is rotated.
    """
    half = inv_freq.shape[0]
    places = torch.arange(start, start + x.shape[2], device=x.device).to(x.dtype)
    angles = places[:, None] * inv_freq  # [L, R/2]
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = turning[..., :half], turning[..., half:]
    turned = (a * cos - b * sin, b * cos + a * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([joined, rest], dim=-1) if 2 * half < x.shape[-1] else joined


def distances(L: int, S: int, device: torch.device) -> Tensor:
    """Key position minus query position, int64 `[L, S]`; the queries are the last L of S."""
    queries = torch.arange(S - L, S, device=device)
    return torch.arange(S, device=device)[None, :] - queries[:, None]


def window(offsets: Tensor, left: int | None, right: int | None) -> Tensor | None:
    """Which keys a window shows, bool like `offsets`; None without a window."""
    shown = None if left is None else offsets >= -left
    if right is not None:
        shown = offsets <= right if shown is None else shown & (offsets <= right)
    return shown


def alibi_slopes(heads: int) -> list[float]:
    """One slope for each head: 2^(-8h/H) for powers of 2 (Press et al. 2022, sec. 3).

    Other numbers of heads take the slopes of the power of 2 below, then every other one of the
    power above, as in the paper's code.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]


def relative_buckets(buckets: int, max_distance: int, *, both_sides: bool) -> Tensor:
    """The bucket of every offset from -max_distance to max_distance, int64 `[2 * max + 1]`.

    Of the buckets of one side, half are distances of their own, the others grow logarithmically
    (Raffel et al. 2020, sec. 2.1). A table, since a logarithm at the edge of a bucket rounds
    differently in every runtime.

    Args:
        buckets: How many there are.
        max_distance: Distances from here on share the last bucket.
        both_sides: Whether keys after the query have buckets of their own, the second half.
    """
    one_side = buckets // 2 if both_sides else buckets
    exact = one_side // 2
    distance = torch.arange(max_distance + 1)
    share = (distance.clamp(min=1) / exact).log() / math.log(max_distance / exact)
    far = exact + (share * (one_side - exact)).to(torch.int64)
    before = torch.where(distance < exact, distance, far.clamp(max=one_side - 1))
    after = before[1:] + one_side if both_sides else torch.zeros_like(before[1:])
    return torch.cat([before.flip(0), after])
