"""Weights in 8 or 4 bits: integers, scales and zero points, and what they stand for.

Written here because onnxruntime.quantization and neural-compressor rewrite whole graphs and choose
any float32 scale. These scales have few digits, so that ``(integer - zero point) * scale`` is exact
in float32: the module, the graph and the float64 truth have the same weights to the last bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

DIGITS = 12
"""The binary digits of a scale: 12 and the 8 of an integer are fewer than the 24 of float32."""

LEAST_SCALE = 2.0**-100
"""The smallest scale: its products are normal numbers."""

BLOCK_LARGEST = 127
"""The largest magnitude of the integers of activations that have a scale for each block."""

LEAST_BLOCK_SCALE = float(np.finfo(np.float32).smallest_normal)
"""The least scale of such a block, so that a block of zeros has one."""

FLOAT32_PRODUCTS, INTEGER_PRODUCTS = 1, 4
"""The accuracy levels of MatMulNBits at which inputs are not rounded, and at which they are."""

RANGES = {"int4": (-7, 7), "uint4": (0, 15), "int8": (-127, 127), "uint8": (0, 255)}
"""The integers in use. Symmetric ones leave the lowest out, so that both signs reach as far."""


@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """The weight of a linear layer, in blocks of inputs that share a scale.

    Attributes:
        dtype: One of `RANGES`.
        integers: `[in, out]`, int8 or uint8.
        scales: `[in / block, out]`, float32.
        zero_points: Likewise, of the type of `integers`; None for zeros.
        is_blocked: Whether its form has blocks, and not one scale for all inputs.
        order: The input of each row, int64 `[in]`, where rows are not in the order of the inputs
            (GPTQ's ``desc_act``).
    """

    dtype: str
    integers: Array
    scales: Array
    zero_points: Array | None
    is_blocked: bool
    order: Array | None = None

    @property
    def block(self) -> int:
        """The number of inputs that share a scale."""
        return len(self.integers) // len(self.scales)

    def dequantised(self) -> Array:
        """Return the weights that the integers stand for, float32 `[in, out]`.

        None is rounded if scales have `DIGITS` digits. Rows are in the order of the inputs.
        """
        blocks = _in_blocks(self.integers, self.block).astype(np.float32)
        if self.zero_points is not None:
            blocks -= self.zero_points[:, None].astype(np.float32)
        blocks *= self.scales[:, None]
        rows = blocks.reshape(self.integers.shape)
        if self.order is None:
            return rows
        found = np.empty_like(rows)
        found[self.order] = rows
        return found


def quantise(weight: Array, dtype: str, block_size: int, *, symmetric: bool) -> QuantisedWeight:
    """Return a weight in integers: each block's largest value keeps its size, others are rounded.

    Args:
        weight: float32 `[in, out]`.
        dtype: ``"int8"`` or ``"int4"``.
        block_size: The number of inputs that share a scale, which divides `in`; 0 for all.
        symmetric: Whether 0 is the integer 0, and not a zero point of each scale.

    Raises:
        ValueError: If a weight is NaN or infinite.
    """
    if not np.isfinite(weight).all():
        raise ValueError("it holds NaN or infinite values, which no integer stands for")
    blocks = _in_blocks(weight, block_size or len(weight))
    kind = dtype if symmetric else f"u{dtype}"
    low, high = RANGES[kind]
    if symmetric:
        scales = _few_digits(np.abs(blocks).max(axis=1) / high)
        zeros = np.zeros_like(scales)
    else:
        least, most = (np.minimum(blocks.min(axis=1), 0.0), np.maximum(blocks.max(axis=1), 0.0))
        scales = _few_digits((most.astype(np.float64) - least) / high)
        zeros = np.clip(np.rint(-least / scales), low, high)
    integers = np.clip(np.rint(blocks / scales[:, None]) + zeros[:, None], low, high)
    stored = np.int8 if symmetric else np.uint8
    return QuantisedWeight(
        kind, integers.astype(stored).reshape(weight.shape), scales,
        None if symmetric else zeros.astype(stored), bool(block_size),
    )  # fmt: skip


def _in_blocks(array: Array, block: int) -> Array:
    """Reshape `[in, out]` to `[in / block, block, out]`."""
    return array.reshape(-1, block, array.shape[1])


def _few_digits(scales: Array) -> Array:
    """Round scales up to `DIGITS` digits, so that no value leaves the range; 1 in place of 0."""
    fraction, exponent = np.frexp(np.maximum(scales.astype(np.float64), LEAST_SCALE))
    rounded = np.ldexp(np.ceil(fraction * 2**DIGITS) / 2**DIGITS, exponent)
    return np.where(scales == 0, 1.0, rounded).astype(np.float32)
