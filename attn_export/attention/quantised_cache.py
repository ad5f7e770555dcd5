"""KV cache in the type of the layer, in float16, or in integers with scales."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_export.attention import functional, onnx_attention
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import IN_A_BYTE, KV_RANGES

Pair = tuple[Tensor, Tensor]
"""Keys and values."""

Past = tuple[Tensor | None, Tensor | None]
"""Cached keys and values, in the type of the cache; None for no past."""


@dataclasses.dataclass(frozen=True)
class Quotients:
    """Keys or values in steps of a cache, before they are rounded to whole steps.

    Attributes:
        values: The numbers, `[B, Hkv, L, N]`.
        low: The least integer, or -inf for a cache in floating point.
        units: For a cache in floating point the spacing of its type at each number, else 1.
    """

    values: Tensor
    low: float
    high: float
    units: Tensor | float = 1.0


MIDDLE = 8
"""The nibble that represents 0: it is added to a signed integer of 4 bits to make it 0 to 15."""


def pack(x: Tensor) -> Tensor:
    """Pack whole numbers from -8 to 7, floating `[..., D]`, in pairs to uint8 `[..., D / 2]`."""
    return join_nibbles(x.int() + MIDDLE).to(torch.uint8)


def join_nibbles(nibbles: Tensor) -> Tensor:
    """Join neighbouring integers from 0 to 15 to bytes, the first in the lower half.

    Both are int32: the integers `[..., D]` for an even D, and the bytes `[..., D / 2]`.
    """
    return nibbles[..., ::2] + 16 * nibbles[..., 1::2]


def byte_nibbles(middle: int = MIDDLE) -> Tensor:
    """Return the two integers that each byte holds, float32 `[256, 2]`; `middle` represents 0."""
    byte = torch.arange(256)
    return (torch.stack([byte & 15, byte >> 4], dim=-1) - middle).float()


class CacheRounding(nn.Module, abc.ABC):
    """Base class of conversions of keys and values to the type of a cache, and back."""

    @abc.abstractmethod
    def forward(self, key: Tensor, value: Tensor) -> Pair:
        """Return new keys `[B, Hkv, L, D]` and values `[B, Hkv, L, Dv]` in the cache's type.

        Keys are those after `change_basis`, here and below.
        """

    @abc.abstractmethod
    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:
        """Return the keys and values that a cache `[B, Hkv, S, .]` represents, in a type."""

    def change_basis(self, x: Tensor) -> Tensor:
        """Return queries or keys, `[B, heads, L, D]`, in the basis in which keys are stored."""
        return x

    def step_sizes(self, key: Tensor, value: Tensor) -> Pair:
        """Return the steps between numbers of the cache; they broadcast to keys and values."""
        return self._step_size(key, 0), self._step_size(value, 1)

    def quotients(self, key: Tensor, value: Tensor) -> list[Quotients]:
        """Return the numbers that are rounded, those of keys first."""
        return [*self._quotients(key, 0), *self._quotients(value, 1)]

    @abc.abstractmethod
    def _step_size(self, x: Tensor, part: int) -> Tensor:
        """Return the step at each element of keys (part 0) or values (part 1)."""

    @abc.abstractmethod
    def _quotients(self, x: Tensor, part: int) -> list[Quotients]:
        """Return the numbers that are rounded for keys (part 0) or values (part 1)."""


class CacheScales(CacheRounding):
    """Rounding of keys and values to integers with fixed scales.

    Quotients by the scale are rounded half to even and clipped. A cache holds int8 of the shapes
    of keys and values, or bytes with two 4-bit integers each, see `pack`.

    Attributes:
        k_scale: The scale of keys, float32: a scalar, or `[Hkv, 1, D]` by channel.
        v_scale: The scale of values: a scalar, or `[Hkv, 1, Dv]`.
        nibbles: The two integers that each byte holds, `[256, 2]`; None if a byte holds one. A
            table is faster than shifts, and every runtime has Gather.
    """

    k_scale: Tensor
    v_scale: Tensor
    nibbles: Tensor | None

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.low, self.high = KV_RANGES[spec.kv_dtype]
        nibbles = byte_nibbles() if spec.kv_dtype in IN_A_BYTE else None
        self.register_buffer("nibbles", nibbles, persistent=False)
        for name, width in zip(("k_scale", "v_scale"), spec.cache_widths, strict=True):
            shape = (spec.num_kv_heads, 1, width) if spec.kv_scale == "per-channel" else ()
            self.register_buffer(name, torch.ones(shape))

    def forward(self, key: Tensor, value: Tensor) -> Pair:
        """Return new keys and values in the type of the cache."""
        pairs = ((key, self.k_scale), (value, self.v_scale))
        if self.nibbles is None and onnx_attention.emitting():
            new_key, new_value = (onnx_attention.quantise(*pair) for pair in pairs)
            return new_key, new_value
        quotients = [x / scale for x, scale in pairs]
        return self._integers(quotients[0]), self._integers(quotients[1])

    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:
        """Return the keys and values that a cache represents."""
        if self.nibbles is not None:
            numbers = [F.embedding(x.int(), self.nibbles.to(dtype)) for x in (key, value)]
            return numbers[0].flatten(-2) * self.k_scale, numbers[1].flatten(-2) * self.v_scale
        if onnx_attention.emitting():
            return (
                onnx_attention.dequantise(key, self.k_scale),
                onnx_attention.dequantise(value, self.v_scale),
            )
        return key.to(dtype) * self.k_scale, value.to(dtype) * self.v_scale

    def _step_size(self, x: Tensor, part: int) -> Tensor:  # noqa: ARG002 (one for all)
        return self.v_scale if part else self.k_scale

    def _quotients(self, x: Tensor, part: int) -> list[Quotients]:
        return [Quotients(x / self._step_size(x, part), self.low, self.high)]

    def _integers(self, quotients: Tensor) -> Tensor:
        rounded = quotients.round().clamp(self.low, self.high)
        return rounded.to(torch.int8) if self.nibbles is None else pack(rounded)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        # Checkpoints have no scales; they are calibrated afterwards.
        scales = {f"{prefix}k_scale": self.k_scale, f"{prefix}v_scale": self.v_scale}
        super()._load_from_state_dict(scales | state, prefix, *args)


# -- cache in float16 of a layer in float32 ------------------------------------------------------

_FLOAT16_DIGITS = 11
"""The bits of the significand of a normal float16 number, with the implicit one."""

LEAST_FLOAT16_STEP, LARGEST_FLOAT16 = 2.0**-24, torch.finfo(torch.float16).max
"""The difference between neighbouring subnormal float16 numbers; the largest finite one, 65504."""


def _float16_steps(x: Tensor) -> Tensor:
    """Return the spacing of float16 numbers around each value; infinity if it is not finite."""
    exponent = torch.frexp(x.detach()).exponent  # |x| = [0.5, 1) * 2^exponent
    steps = torch.ldexp(torch.ones_like(x), exponent - _FLOAT16_DIGITS).clamp_min(
        LEAST_FLOAT16_STEP
    )
    return torch.where(x.isfinite(), steps, torch.inf)


def _round_to_float16(x: Tensor) -> Tensor:
    """Return the nearest float16 number of each value of a tensor of any shape, half to even.

    For float64 they are float64, since the truth computes in float64 throughout.
    """
    if x.dtype != torch.float64:
        return x.to(torch.float16)
    steps = _float16_steps(x)
    nearest = torch.where(steps.isinf(), x, (x / steps).round() * steps)
    return torch.where(nearest.abs() > LARGEST_FLOAT16, torch.inf * nearest.sign(), nearest)


class Float16Cache(CacheRounding):
    """Rounding of keys and values to float16, without scales.

    Values that round to more than 65504, from 65520 on, become infinite, as in a layer in float16.
    """

    def forward(self, key: Tensor, value: Tensor) -> Pair:
        """Return new keys and values in the type of the cache."""
        return _round_to_float16(key), _round_to_float16(value)

    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:
        """Return the keys and values that a cache represents."""
        return key.to(dtype), value.to(dtype)

    def _step_size(self, x: Tensor, part: int) -> Tensor:  # noqa: ARG002 (the same for both)
        return _float16_steps(x)

    def _quotients(self, x: Tensor, part: int) -> list[Quotients]:  # noqa: ARG002
        steps = _float16_steps(x)
        return [Quotients(x / steps, -torch.inf, torch.inf, steps)]


def _append(past: Tensor | None, new: Tensor, past_length: Tensor | None) -> Tensor:
    """Return `[B, Hkv, S, .]`: a cache, None or `[B, Hkv, P, .]`, with new keys or values."""
    if past is None:
        return new
    if past_length is None:
        return torch.cat([past, new], dim=2)
    write = onnx_attention.write if onnx_attention.emitting() else functional.scatter
    return write(past, new, past_length)


def append_to_past(
    rounding: CacheRounding | None, past: Past, new: Pair, past_length: Tensor | None
) -> tuple[Pair, Pair]:
    """Return a cache with new keys and values, and what it represents in the type of the layer.

    `new`: New keys `[B, Hkv, L, D]` and values `[B, Hkv, L, Dv]`.
    `past_length`: The number of past keys of each batch element, int64 `[B]`, if the cache is
    written in place.
    """
    stored = new if rounding is None else rounding(*new)
    present = (_append(past[0], stored[0], past_length), _append(past[1], stored[1], past_length))
    return present, present if rounding is None else rounding.read(*present, new[0].dtype)
