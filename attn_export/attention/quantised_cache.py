"""A KV cache: keys and values as they are, or as integers with scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_export.attention import functional, onnx_attention
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import IN_A_BYTE, KV_RANGES

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


@dataclasses.dataclass(frozen=True)
class Quotients:
    """Numbers that are rounded to integers.

    Attributes:
        values: `[B, Hkv, L, N]`.
        low: The least integer; -inf where there is none.
        high: The largest integer, or inf.
        units: The spacing of the type at each number, `[B, Hkv, L, N]`, of floating point; None for
            integers, where it is 1.
    """

    values: Tensor
    low: float
    high: float
    units: Tensor | None = None


MIDDLE = 8
"""The addition to an integer of 4 bits that makes it 0 to 15."""


def packed(x: Tensor) -> Tensor:
    """Return whole numbers of -8 to 7, two neighbours in a byte: the first in its lower half.

    Args:
        x: Floating point, `[..., D]`; D is even.

    Returns:
        uint8 `[..., D / 2]`.
    """
    return in_bytes(x.int() + MIDDLE).to(torch.uint8)


def in_bytes(halves: Tensor) -> Tensor:
    """Return bytes of neighbours from 0 to 15, the first in the lower half: int32 `[..., D / 2]`.

    Args:
        halves: int32, `[..., D]`; D is even.
    """
    return halves[..., ::2] + 16 * halves[..., 1::2]


def halves_of_bytes(middle: int = MIDDLE) -> Tensor:
    """Return the two numbers that each byte holds, float32 `[256, 2]`.

    Args:
        middle: The half that stands for 0.
    """
    byte = torch.arange(256)
    return (torch.stack([byte & 15, byte >> 4], dim=-1) - middle).float()


class CacheScales(nn.Module):
    """Scales of a cache of integers.

    Args:
        spec: The spec; it has a `kv_dtype`.

    Attributes:
        k_scale: The scale of keys, float32: a scalar, or `[Hkv, 1, D]` by channel.
        v_scale: The scale of values: a scalar, or `[Hkv, 1, Dv]`.
        low: The least integer.
        high: The largest integer.
        halves: The two numbers that each byte holds, `[256, 2]`, or None: a table is faster than
            shifts, and every runtime has it.
    """

    k_scale: Tensor
    v_scale: Tensor
    halves: Tensor | None

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.low, self.high = KV_RANGES[spec.kv_dtype]
        halves = halves_of_bytes() if spec.kv_dtype in IN_A_BYTE else None
        self.register_buffer("halves", halves, persistent=False)
        for name, width in zip(("k_scale", "v_scale"), spec.cache_widths, strict=True):
            shape = (spec.num_kv_heads, 1, width) if spec.kv_scale == "per-channel" else ()
            self.register_buffer(name, torch.ones(shape))

    def forward(self, key: Tensor, value: Tensor) -> Pair:
        """Return new keys and values as integers.

        Args:
            key: `[B, Hkv, L, D]`.
            value: `[B, Hkv, L, Dv]`.

        Returns:
            Divided by the scale, rounded half to even, clipped: int8 of the same shapes, or two
            of 4 bits in a byte, as `packed` has them.
        """
        if self.halves is not None:
            quotients = (key / self.k_scale, value / self.v_scale)
            return packed(self._rounded(quotients[0])), packed(self._rounded(quotients[1]))
        if onnx_attention.emitting():
            return (
                onnx_attention.quantise(key, self.k_scale),
                onnx_attention.quantise(value, self.v_scale),
            )
        rounded = self._rounded(key / self.k_scale), self._rounded(value / self.v_scale)
        return rounded[0].to(torch.int8), rounded[1].to(torch.int8)

    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:
        """Return what integers stand for.

        Args:
            key: `[B, Hkv, S, D]`, int8; `[B, Hkv, S, D / 2]`, uint8, if a byte holds two.
            value: `[B, Hkv, S, Dv]`, int8, or `[B, Hkv, S, Dv / 2]`, uint8.
            dtype: The type of the result.
        """
        if self.halves is not None:
            numbers = [F.embedding(x.int(), self.halves.to(dtype)) for x in (key, value)]
            return numbers[0].flatten(-2) * self.k_scale, numbers[1].flatten(-2) * self.v_scale
        if onnx_attention.emitting():
            return (
                onnx_attention.dequantise(key, self.k_scale),
                onnx_attention.dequantise(value, self.v_scale),
            )
        return key.to(dtype) * self.k_scale, value.to(dtype) * self.v_scale

    def mixed(self, x: Tensor) -> Tensor:
        """Return queries or keys as they are."""
        return x

    def step_sizes(self, key: Tensor, value: Tensor) -> Pair:  # noqa: ARG002 (one for all)
        """Return the difference that one integer more makes, which spreads over keys and values.

        Args:
            key: `[B, Hkv, L, D]`.
            value: `[B, Hkv, L, Dv]`.
        """
        return self.k_scale, self.v_scale

    def quotients(self, key: Tensor, value: Tensor) -> list[Quotients]:
        """Return what is rounded to integers, of keys and of values.

        Args:
            key: `[B, Hkv, L, D]`.
            value: `[B, Hkv, L, Dv]`.
        """
        pairs = ((key, self.k_scale), (value, self.v_scale))
        return [Quotients(x / scale, self.low, self.high) for x, scale in pairs]

    def _rounded(self, quotient: Tensor) -> Tensor:
        return quotient.round().clamp(self.low, self.high)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        # Checkpoints have no scales: they are found afterwards.
        found = {f"{prefix}k_scale": self.k_scale, f"{prefix}v_scale": self.v_scale}
        super()._load_from_state_dict(found | state, prefix, *more)


class Rounding(Protocol):
    """Keys and values as the integers of a cache, and back."""

    def __call__(self, key: Tensor, value: Tensor) -> Pair:
        """Return the rows of new keys and values that the cache holds."""

    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:
        """Return what rows of the cache stand for.

        Args:
            key: `[B, Hkv, S, .]`.
            value: `[B, Hkv, S, .]`.
            dtype: The type of the result.
        """


def after(past: Tensor | None, new: Tensor, past_length: Tensor | None) -> Tensor:
    """Return the new keys or values after those of the past, along the length: `[B, Hkv, S, .]`.

    Args:
        past: The cache, `[B, Hkv, P, .]`, or `[B, Hkv, S, .]` if it is written in place; or None.
        new: `[B, Hkv, L, .]`.
        past_length: The number of keys of each row, int64 `[B]`, if it is written in place.
    """
    if past is None:
        return new
    if past_length is None:
        return torch.cat([past, new], dim=2)
    write = onnx_attention.write if onnx_attention.emitting() else functional.written
    return write(past, new, past_length)


def with_past(
    scales: Rounding | None,
    past: Sequence[Tensor | None],
    new: Pair,
    past_length: Tensor | None,
) -> tuple[Pair, Pair]:
    """Return the cache with its new keys and values, and the keys and values that are read.

    Args:
        scales: Those of a cache of integers; None for one of floating point.
        past: The caches of keys and values, or None for each.
        new: `[B, Hkv, L, D]` and `[B, Hkv, L, Dv]`.
        past_length: The number of keys of each row, int64 `[B]`, if it is written in place.
    """
    rows = new if scales is None else scales(*new)
    present = (after(past[0], rows[0], past_length), after(past[1], rows[1], past_length))
    return present, present if scales is None else scales.read(*present, new[0].dtype)
