"""A cache of float16 numbers beside a layer in float32 (`kv_dtype = "float16"`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_export.attention.quantised_cache import Pair, Quotients

DIGITS = 11
"""The binary digits of a normal number in float16."""

LEAST_STEP = 2.0**-24
"""The difference of two subnormal neighbours."""


def float16_steps(x: Tensor) -> Tensor:
    """Return the difference of neighbours in float16 around each value, in its type.

    Args:
        x: Floating point, of any shape; infinite where it is not finite.
    """
    exponent = torch.frexp(x.detach()).exponent  # |x| = [0.5, 1) * 2^exponent
    steps = torch.ldexp(torch.ones_like(x), exponent - DIGITS).clamp_min(LEAST_STEP)
    return torch.where(x.isfinite(), steps, torch.inf)


LARGEST = torch.finfo(torch.float16).max


def rounded_to_float16(x: Tensor) -> Tensor:
    """Return the nearest float16 number of each value, half to even; in float16.

    float64 stays float64, as all of the module's copy in it does.

    Args:
        x: Floating point, of any shape.
    """
    if x.dtype != torch.float64:
        return x.to(torch.float16)
    steps = float16_steps(x)
    found = torch.where(steps.isinf(), x, (x / steps).round() * steps)
    return torch.where(found.abs() > LARGEST, torch.inf * found.sign(), found)


class Float16Cache(nn.Module):
    """The rounding of keys and values to float16, and back.

    It has no scales: values beyond 65504 become infinite, as in a layer in float16.
    """

    def forward(self, key: Tensor, value: Tensor) -> Pair:
        """Return new keys and values as `rounded_to_float16` has them.

        Args:
            key: `[B, Hkv, L, D]`.
            value: `[B, Hkv, L, Dv]`.
        """
        return rounded_to_float16(key), rounded_to_float16(value)

    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:
        """Return the same numbers in another type.

        Args:
            key: float16, `[B, Hkv, S, D]`.
            value: float16, `[B, Hkv, S, Dv]`.
            dtype: The type of the result.
        """
        return key.to(dtype), value.to(dtype)

    def mixed(self, x: Tensor) -> Tensor:
        """Return queries or keys as they are."""
        return x

    def step_sizes(self, key: Tensor, value: Tensor) -> Pair:
        """Return the difference of neighbours around each key and value.

        Args:
            key: `[B, Hkv, L, D]`.
            value: `[B, Hkv, L, Dv]`.
        """
        return float16_steps(key), float16_steps(value)

    def quotients(self, key: Tensor, value: Tensor) -> list[Quotients]:
        """Return keys and values in units of the last place, each with its own.

        Args:
            key: `[B, Hkv, L, D]`.
            value: `[B, Hkv, L, Dv]`.
        """
        pairs = zip((key, value), self.step_sizes(key, value), strict=True)
        return [Quotients(x / steps, -torch.inf, torch.inf, steps) for x, steps in pairs]
