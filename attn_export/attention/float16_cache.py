"""Cache in float16 of a layer in float32 (`kv_dtype = "float16"`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_export.attention.quantised_cache import Pair, Quotients

DIGITS = 11
"""The bits of the significand of a normal float16 number, with the implicit one."""

LEAST_STEP = 2.0**-24
"""The difference between neighbouring subnormal float16 numbers."""


def float16_steps(x: Tensor) -> Tensor:
    """Return the spacing of float16 numbers around each value; infinity if a value is not finite.

    Args:
        x: A floating point tensor of any shape.

    Returns:
        A tensor of the same shape and type.
    """
    exponent = torch.frexp(x.detach()).exponent  # |x| = [0.5, 1) * 2^exponent
    steps = torch.ldexp(torch.ones_like(x), exponent - DIGITS).clamp_min(LEAST_STEP)
    return torch.where(x.isfinite(), steps, torch.inf)


LARGEST = torch.finfo(torch.float16).max
"""The largest finite float16 number, 65504."""


def round_to_float16(x: Tensor) -> Tensor:
    """Return the nearest float16 number of each value, half to even.

    Args:
        x: A floating point tensor of any shape.

    Returns:
        float16; or float64 if `x` is float64, since the truth computes in float64 throughout.
    """
    if x.dtype != torch.float64:
        return x.to(torch.float16)
    steps = float16_steps(x)
    nearest = torch.where(steps.isinf(), x, (x / steps).round() * steps)
    return torch.where(nearest.abs() > LARGEST, torch.inf * nearest.sign(), nearest)


class Float16Cache(nn.Module):
    """Rounding of keys and values to float16, without scales.

    Values that round to more than 65504, from 65520 on, become infinite, as in a layer in float16.
    """

    def forward(self, key: Tensor, value: Tensor) -> Pair:
        """Return new keys and values rounded by `round_to_float16`.

        Args:
            key: `[B, Hkv, L, D]`.
            value: `[B, Hkv, L, Dv]`.
        """
        return round_to_float16(key), round_to_float16(value)

    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:
        """Return the same numbers in another type.

        Args:
            key: float16, `[B, Hkv, S, D]`.
            value: float16, `[B, Hkv, S, Dv]`.
            dtype: The type of the result.
        """
        return key.to(dtype), value.to(dtype)

    def change_basis(self, x: Tensor) -> Tensor:
        """Return queries or keys, `[B, heads, L, D]`, unchanged: only block scales have a basis."""
        return x

    def step_sizes(self, key: Tensor, value: Tensor) -> Pair:
        """Return the spacing of float16 numbers around each key and value.

        Args:
            key: `[B, Hkv, L, D]`.
            value: `[B, Hkv, L, Dv]`.
        """
        return float16_steps(key), float16_steps(value)

    def quotients(self, key: Tensor, value: Tensor) -> list[Quotients]:
        """Return keys and values divided by the spacing of float16 around each.

        Args:
            key: `[B, Hkv, L, D]`.
            value: `[B, Hkv, L, Dv]`.
        """
        pairs = zip((key, value), self.step_sizes(key, value), strict=True)
        return [Quotients(x / steps, -torch.inf, torch.inf, steps) for x, steps in pairs]
