"""Positions of queries and keys: rotary embedding, ALiBi, T5's relative bias, windows.

Legend: L queries at positions P … P + L - 1, S keys at positions 0 … S - 1, R rotated elements of a
head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.attention import functional
from attn_export.spec import AttentionSpec

NARROW = (torch.float16, torch.bfloat16)
"""Floating types narrower than float32."""


class _WideBuffers(nn.Module):
    """Base class of modules whose constants stay float32 or wider, even after ``.half()``.

    Frequencies and slopes rounded to 8 or 11 bits would change the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self._exact: dict[str, Tensor] = {}

    def add_wide(self, name: str, exact: Tensor) -> None:
        """Register a float64 tensor as a buffer of the default dtype."""
        self._exact[name] = exact
        self.register_buffer(name, exact.to(torch.get_default_dtype()), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, exact in self._exact.items():
            buffer = self.get_buffer(name)
            if buffer.dtype in NARROW:
                setattr(self, name, exact.to(device=buffer.device, dtype=torch.float32))
        return self


# -- rotary positions: queries and keys are rotated (Su et al. 2021) ----------------------------

_Turns = tuple[Tensor, Tensor]
"""Cosine and sine of the angle of each position and pair, each `[L, R/2]` or `[B, 1, L, R/2]`."""


class Rotary(_WideBuffers):
    """Rotary position embedding: rotation of pairs of elements by position."""

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

    def turns(self, positions: Tensor) -> _Turns:
        """Return the cosine and sine of the angle of each position and pair.

        Positions are int64 `[L]`, or `[B, L]` if batch elements have different ones.
        """
        frequencies = self.inv_freq
        if self.spec.rotary_scaling == "dynamic":
            frequencies = frequencies * self._growth(positions) ** self.growth_power
        if self.spec.rotary_scaling == "longrope":
            # Past keys were rotated with the frequencies of their time, as with "dynamic".
            is_long = positions.max() + 1 > self.spec.rotary_original_len
            frequencies = torch.where(is_long, self.long_inv_freq, frequencies)
        angles = positions[..., None].to(frequencies.dtype) * frequencies  # [.., L, R/2]
        if positions.dim() > 1:
            angles = angles.unsqueeze(1)  # [B, 1, L, R/2], the same for all heads
        magnitude = self.spec.turn_magnitude
        return angles.cos() * magnitude, angles.sin() * magnitude

    def forward(self, x: Tensor, turns: _Turns) -> Tensor:
        """Return `x` with the first R elements of each head rotated.

        `x`: `[B, H, L, D]` or, for keys, `[B, Hkv, L, D]`.
        """
        cos, sin = (tensor.to(x.dtype) for tensor in turns)
        R = self.spec.rotary_dim
        rotary, plain = x[..., :R], x[..., R:]
        interleaved = self.spec.rotary == "interleaved"
        if interleaved:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
        else:
            a, b = rotary[..., : R // 2], rotary[..., R // 2 :]
        pair = (a * cos - b * sin, b * cos + a * sin)
        rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
        return torch.cat([rotated, plain], dim=-1) if x.shape[-1] > R else rotated

    def _growth(self, positions: Tensor) -> Tensor:
        """Return the growth of the base of dynamic NTK scaling, to the power (R - 2)/R.

        The base is multiplied by (factor·S/original - (factor - 1))^(R/(R - 2)), where S is the
        largest position plus 1; by 1 within the original context. Past keys were rotated with the
        base of their time.
        """
        factor, original = self.spec.rotary_factor, self.spec.rotary_original_len
        length = (positions.max() + 1).to(self.inv_freq.dtype)
        return (factor * length / original - (factor - 1)).clamp(min=1.0)


def inverse_frequencies(spec: AttentionSpec, *, long: bool = False) -> Tensor:
    """Return the angle of each pair from one position to the next, float64 `[R/2]`.

    It is theta^(-2i/R) (Su et al. 2021, sec. 3.2.2), scaled by `rotary_scaling`: "linear" (Chen
    et al. 2023), "llama3" (Llama 3.1's rope_scaling), "yarn" (Peng et al. 2023, sec. 3.2, with the
    ramp over pairs of their code), "longrope" (Ding et al. 2024). "dynamic" depends on the length,
    so `Rotary.turns` applies it.
    """
    R, factor = spec.rotary_dim, spec.rotary_factor
    plain = spec.rotary_theta ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    if spec.rotary_scaling == "linear":
        return plain / factor
    if spec.rotary_scaling == "llama3":
        rotations = spec.rotary_original_len * plain / (2 * math.pi)
        low, high = spec.rotary_low_freq, spec.rotary_high_freq
        kept = ((rotations - low) / (high - low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / factor)
    if spec.rotary_scaling == "yarn":
        kept = 1 - _yarn_ramp(spec)
        return plain * (kept + (1 - kept) / factor)
    if spec.rotary_scaling == "longrope":
        divisors = spec.rotary_long_factors if long else spec.rotary_short_factors
        return plain / torch.tensor(divisors, dtype=torch.float64)
    return plain


def _yarn_ramp(spec: AttentionSpec) -> Tensor:
    """Return 0 for pairs with the original frequency and 1 for scaled pairs, float64 `[R/2]`."""
    R = spec.rotary_dim

    def pair_of(turns: float) -> float:
        """Return the index of the pair that rotates `turns` times within the original context."""
        span = spec.rotary_original_len / (turns * 2 * math.pi)
        return R * math.log(span) / (2 * math.log(spec.rotary_theta))

    low, high = pair_of(spec.rotary_beta_fast), pair_of(spec.rotary_beta_slow)
    if spec.rotary_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    ramp = (torch.arange(R // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    return ramp.clamp(0, 1)


# -- offsets of keys from queries: windows, ALiBi, T5's relative bias ---------------------------


def _key_offsets(queries: Tensor, S: int) -> Tensor:
    """Return the offsets of keys, key position minus query position, int64 `[L, S]`.

    If queries have other positions in each batch element, they are `[B, L, S]`.

    `queries`: The positions of queries, int64 `[L]`, or `[B, L]` if batch elements differ.
    """
    return torch.arange(S, device=queries.device) - queries[..., None]


def _window_mask(offsets: Tensor, left: int | None, right: int | None) -> Tensor | None:
    """Return the mask of a window, bool, of the shape of `offsets`; None without a window.

    `offsets`: Key position minus query position, of any shape.
    """
    shown = None if left is None else offsets >= -left
    if right is not None:
        shown = offsets <= right if shown is None else shown & (offsets <= right)
    return shown


def alibi_slopes(heads: int) -> list[float]:
    """Return a slope for each head: 2^(-8h/H) if H is a power of 2 (Press et al. 2022, sec. 3).

    For other numbers of heads, the slopes of the next lower power of 2 come first, then every other
    slope of the next higher power, as in the paper's code.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]


def relative_buckets(buckets: int, max_distance: int, *, both_sides: bool) -> Tensor:
    """Return the bucket of every offset in [-max_distance, max_distance], int64 `[2 * max + 1]`.

    Half of the buckets of a side are for single distances; the others are for ranges that grow
    logarithmically (Raffel et al. 2020, sec. 2.1). The result is used as a table, since runtimes
    round a logarithm at the edge of a bucket differently.
    """
    one_side = buckets // 2 if both_sides else buckets
    exact = one_side // 2
    distance = torch.arange(max_distance + 1)
    share = (distance.clamp(min=1) / exact).log() / math.log(max_distance / exact)
    far = exact + (share * (one_side - exact)).to(torch.int64)
    before = torch.where(distance < exact, distance, far.clamp(max=one_side - 1))
    after = before[1:] + one_side if both_sides else torch.zeros_like(before[1:])
    return torch.cat([before.flip(0), after])


# -- effects of positions on the scores: ALiBi, T5's relative bias, windows ---------------------


class ScoreBias(_WideBuffers):
    """Mask and bias on scores that depend on positions: windows, ALiBi, relative bias."""

    slopes: Tensor
    buckets: Tensor

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.alibi:
            slopes = torch.tensor(alibi_slopes(spec.num_heads), dtype=torch.float64)
            slopes = _in_bfloat16(slopes) if spec.alibi_falcon else slopes
            self.add_wide("slopes", slopes[:, None, None])  # [H, 1, 1]
        if spec.relative_buckets:
            self.relative_attention_bias: nn.Embedding = nn.Embedding(
                spec.relative_buckets, spec.num_heads
            )
            # Hidden keys need no buckets, as in T5's decoder.
            table = relative_buckets(
                spec.relative_buckets, spec.relative_max_distance, both_sides=not spec.causal
            )
            self.register_buffer("buckets", table, persistent=False)

    def forward(self, mask: Tensor | None, queries: Tensor, S: int, like: Tensor) -> Tensor | None:
        """Return the mask with windows and biases; the same mask if the spec has none.

        `mask`: Bool or float, broadcasts to `[B, H, L, S]`; None for no mask.
        `queries`: The positions of queries among the keys, int64 `[L]`, or `[B, L]` if batch
        elements differ.
        """
        spec = self.spec
        has_window = spec.window_left is not None or spec.window_right is not None
        if not (spec.alibi or spec.relative_buckets or has_window):
            return mask  # offsets that nothing reads would make the exporter trace it again
        offsets = _key_offsets(queries, S)  # [L, S] or [B, L, S]
        shown = _window_mask(offsets, spec.window_left, spec.window_right)
        if shown is not None and shown.dim() == 3:
            shown = shown.unsqueeze(1)  # [B, 1, L, S]
        mask = functional.restrict(mask, shown)
        if spec.alibi_falcon:
            mask = functional.add_bias(mask, self._falcon(S).to(like.dtype))
        elif spec.alibi:
            penalty = offsets.abs().to(self.slopes.dtype).unsqueeze(-3) * self.slopes
            mask = functional.add_bias(mask, -_with_batch(penalty).to(like.dtype))
        if spec.relative_buckets:
            far = spec.relative_max_distance
            by_offset = self.relative_attention_bias.weight.index_select(0, self.buckets)
            bias = F.embedding(offsets.clamp(-far, far) + far, by_offset)  # [.., L, S, H]
            mask = functional.add_bias(mask, _with_batch(bias.movedim(-1, -3)))
        return mask

    def _falcon(self, S: int) -> Tensor:
        """Return Falcon's bias of each key, `[1, H, 1, S]`.

        Falcon's code computes positions and their products with slopes in bfloat16. Positions above
        256 are rounded so, and models were trained with that.
        """
        keys = torch.arange(S, device=self.slopes.device).to(self.slopes.dtype)
        bias = _in_bfloat16(_in_bfloat16(keys) * self.slopes)  # [H, 1, S]
        return bias.unsqueeze(0) * self.spec.softmax_scale


def _in_bfloat16(x: Tensor) -> Tensor:
    """Return the values rounded to bfloat16, in their own type."""
    return x.to(torch.bfloat16).to(x.dtype)


def _with_batch(bias: Tensor) -> Tensor:
    """Reshape `[H, L, S]` to `[1, H, L, S]`; return `[B, H, L, S]` unchanged."""
    return bias if bias.dim() == 4 else bias.unsqueeze(0)
