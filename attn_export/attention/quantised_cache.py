"""KV cache in the type of the layer, in float16, or in integers with scales."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_export.attention import onnx_attention
from attn_export.quantiser import MIDDLE, join_nibbles, split_nibbles
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import IN_A_BYTE, KV_RANGES

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


@dataclasses.dataclass(frozen=True)
class Quotients:
    """Numbers in steps of a narrower type, before they are rounded to whole steps.

    Attributes:
        values: Keys or values, `[B, Hkv, L, N]`, or the input of a projection, `[B, L, N]`.
        steps: The scales, or the spacing of a floating type at each number; they broadcast.
        low: The least integer, or -inf.
        is_float: Whether the type is floating.
    """

    values: Tensor
    steps: Tensor | float
    low: float = -torch.inf
    high: float = torch.inf
    is_float: bool = False

    @property
    def units(self) -> Tensor | float:
        """What numbers are compared in: steps of integers, or those of the layer's type."""
        return self.steps if self.is_float else 1.0

    def integers(self) -> Tensor:
        """Return the whole numbers of steps, rounded half to even and clipped."""
        return self.values.round().clamp(self.low, self.high)


def byte_nibbles(middle: int = MIDDLE) -> Tensor:
    """Return the two integers that each byte holds, float32 `[256, 2]`; `middle` represents 0."""
    return torch.from_numpy(split_nibbles(np.arange(256)[:, None]) - middle).float()


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

    def quotients(self, *pair: Tensor) -> list[Quotients]:
        """Return the numbers that are rounded, those of keys first."""
        return [each for part, x in enumerate(pair) for each in self.quotients_of(x, part)]

    @abc.abstractmethod
    def quotients_of(self, x: Tensor, part: int) -> list[Quotients]:
        """Return what is rounded of keys (part 0) or values (part 1), their elements first."""


class CacheScales(CacheRounding):
    """Rounding of keys and values to integers with fixed scales.

    Quotients by the scale are rounded half to even and clipped. A cache holds int8 of the shapes
    of keys and values, or bytes with two 4-bit integers each, see `join_nibbles`.

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
        new_key, new_value = map(self._stored, self.quotients(key, value))
        return new_key, new_value

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

    def quotients_of(self, x: Tensor, part: int) -> list[Quotients]:
        """Return keys or values over their scale."""
        scale = self.v_scale if part else self.k_scale
        return [Quotients(x / scale, scale, self.low, self.high)]

    def _stored(self, quotients: Quotients) -> Tensor:
        rounded = quotients.integers()
        if self.nibbles is None:
            return rounded.to(torch.int8)
        joined: Tensor = join_nibbles(rounded.int() + MIDDLE)
        return joined.to(torch.uint8)

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
    nearest = torch.where(steps.isinf(), x, Quotients(x / steps, steps).integers() * steps)
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

    def quotients_of(self, x: Tensor, part: int) -> list[Quotients]:  # noqa: ARG002 (as for both)
        """Return keys or values over the spacing of float16 numbers."""
        steps = _float16_steps(x)
        return [Quotients(x / steps, steps, is_float=True)]
