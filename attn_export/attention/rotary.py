"""Rotary positions (Su et al. 2021): queries and keys turn with their position.

Legend: L queries at positions P … P + L - 1, R rotated width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_export.attention.wide_buffers import WideBuffers
from attn_export.spec import AttentionSpec

Turns = tuple[Tensor, Tensor]
"""Cosine and sine for every position and pair, each `[L, R/2]` or `[B, 1, L, R/2]`."""


class Rotary(WideBuffers):
    """Rotation of pairs of elements by position.

    Args:
        spec: Its rotary fields are used.
    """

    inv_freq: Tensor
    long_inv_freq: Tensor
    growth_power: Tensor

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.add_wide("inv_freq", inverse_frequencies(spec))
        if spec.rotary_scaling == "longrope":
            self.add_wide("long_inv_freq", inverse_frequencies(spec, long=True))
        if spec.rotary_scaling == "dynamic":
            R = spec.rotary_dim
            self.add_wide("growth_power", -torch.arange(0, R, 2, dtype=torch.float64) / (R - 2))

    def turns(self, positions: Tensor) -> Turns:
        """Return cosine and sine of every angle.

        Args:
            positions: `[L]`, or `[B, L]` where every row has its own.
        """
        frequencies = self.inv_freq
        if self.spec.rotary_scaling == "dynamic":
            frequencies = frequencies * self._growth(positions) ** self.growth_power
        if self.spec.rotary_scaling == "longrope":
            # Keys of the past keep the frequencies of their time, as with "dynamic".
            is_long = positions.max() + 1 > self.spec.rotary_original_len
            frequencies = torch.where(is_long, self.long_inv_freq, frequencies)
        angles = positions[..., None].to(frequencies.dtype) * frequencies  # [.., L, R/2]
        if positions.dim() > 1:
            angles = angles.unsqueeze(1)  # [B, 1, L, R/2], the same for all heads
        magnitude = self.spec.turn_magnitude
        return angles.cos() * magnitude, angles.sin() * magnitude

    def forward(self, x: Tensor, turns: Turns) -> Tensor:
        """Rotate the first R elements of `x` `[B, H, L, D]`.

        Args:
            x: `[B, H, L, D]` or, for keys, `[B, Hkv, L, D]`.
            turns: Cosines and sines of the angles.
        """
        cos, sin = (part.to(x.dtype) for part in turns)
        R = self.spec.rotary_dim
        turning, rest = x[..., :R], x[..., R:]
        interleaved = self.spec.rotary == "interleaved"
        if interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
        else:
            a, b = turning[..., : R // 2], turning[..., R // 2 :]
        turned = (a * cos - b * sin, b * cos + a * sin)
        joined = (
            torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
        )
        return torch.cat([joined, rest], dim=-1) if x.shape[-1] > R else joined

    def _growth(self, positions: Tensor) -> Tensor:
        """Return the growth of the base beyond the original context, to the power (R - 2)/R.

        Dynamic NTK scaling: base·(factor·S/original - (factor - 1))^(R/(R - 2)), S the largest
        position and one, so 1 within the context. Keys of the past keep the base of their time.
        """
        factor, original = self.spec.rotary_factor, self.spec.rotary_original_len
        length = (positions.max() + 1).to(self.inv_freq.dtype)
        return (factor * length / original - (factor - 1)).clamp(min=1.0)


def inverse_frequencies(spec: AttentionSpec, *, long: bool = False) -> Tensor:
    """Return the angle of each pair from one position to the next, float64 `[R/2]`.

    theta^(-2i/R) (Su et al. 2021, sec. 3.2.2), stretched by `rotary_scaling`: "linear" (Chen
    et al. 2023), "llama3" (Llama 3.1's rope_scaling), "yarn" (Peng et al. 2023, sec. 3.2, with the
    ramp over pairs of their code), "longrope" (Ding et al. 2024). "dynamic" stretches by the length
    at hand, not here.

    Args:
        spec: Its rotary fields are used.
        long: Whether longrope's divisors for long sequences apply, not those for short ones.
    """
    R, factor = spec.rotary_dim, spec.rotary_factor
    plain = spec.rotary_theta ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    if spec.rotary_scaling == "linear":
        return plain / factor
    if spec.rotary_scaling == "llama3":
        turns = spec.rotary_original_len * plain / (2 * math.pi)
        low, high = spec.rotary_low_freq, spec.rotary_high_freq
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / factor)
    if spec.rotary_scaling == "yarn":
        kept = 1 - _yarn_ramp(spec)
        return plain * (kept + (1 - kept) / factor)
    if spec.rotary_scaling == "longrope":
        divisors = spec.rotary_long_factors if long else spec.rotary_short_factors
        return plain / torch.tensor(divisors, dtype=torch.float64)
    return plain


def _yarn_ramp(spec: AttentionSpec) -> Tensor:
    """Return 0 for pairs that keep their frequency and 1 for stretched pairs, float64 `[R/2]`."""
    R = spec.rotary_dim

    def pair_of(turns: float) -> float:
        """Return the index of the pair that makes `turns` turns within the original context."""
        span = spec.rotary_original_len / (turns * 2 * math.pi)
        return R * math.log(span) / (2 * math.log(spec.rotary_theta))

    low, high = pair_of(spec.rotary_beta_fast), pair_of(spec.rotary_beta_slow)
    if spec.rotary_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    ramp = (torch.arange(R // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    return ramp.clamp(0, 1)
