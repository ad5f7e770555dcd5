"""Tensors of integers: weights of 8 or 4 bits, and what they share with caches and inputs.

onnxruntime.quantization and neural-compressor are not used, because they rewrite whole graphs and
choose arbitrary float32 scales. The scales here have few digits, so that
``(integer - zero point) * scale`` is exact in float32: the module, the graph and the float64
reference have bitwise the same weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from attn_export.tensorfile import Array

DIGITS = 12
"""The number of binary digits of a scale. With the 8 digits of an integer, these are fewer than the
24 of float32."""

_LEAST_SCALE = 2.0**-100
"""The smallest scale, whose products with integers are normal numbers."""

BLOCK_LARGEST = 127
"""The largest magnitude of the integers of activations with block scales."""

ORDER = "_order"
"""Suffix of the initialiser that holds the input order of a weight (`g_idx` of GPTQ)."""

FLOAT32_PRODUCTS, INTEGER_PRODUCTS = 1, 4
"""The accuracy levels of MatMulNBits: inputs in float32, and inputs rounded to 8-bit integers."""

_BLOCKS = (256, 128, 64, 32, 16)
"""Block sizes of MatMulNBits. Scales of other blocks are repeated for the largest that fits."""

_MOST_OF_BYTES = 32
"""The largest block of weights of 8 bits that have one scale for all inputs. Kernels may round as
many inputs together, the fewer the better, and are no faster with larger blocks."""

_PIECE = 2**20
"""The number of elements of a weight that are rounded, or dequantised, together: arrays of them fit
into a processor's cache."""

FLOAT8 = "float8e4m3fn"
"""Floating numbers of 8 bits, as checkpoints may hold. Nothing is rounded to them."""

RANGES = {"int4": (-7, 7), "uint4": (0, 15), "int8": (-127, 127), "uint8": (0, 255)}
"""The smallest and largest integer by dtype. Signed ranges are symmetric, without the lowest
integer of the dtype, which a search may take."""

MIDDLE = 8
"""The nibble that represents 0: it is added to a signed integer of 4 bits to make it 0 to 15."""


def join_nibbles(nibbles: Any) -> Any:
    """Join neighbouring integers from 0 to 15 to bytes, the first in the lower half.

    Arrays or tensors: the integers `[..., D]` for an even D, and the bytes `[..., D / 2]`.
    """
    return nibbles[..., ::2] + 16 * nibbles[..., 1::2]


def split_nibbles(joined: Array) -> Array:
    """Return the integers from 0 to 15 that bytes hold: uint8 `[..., D / 2]` to `[..., D]`."""
    return np.stack([joined & 15, joined >> 4], axis=-1).reshape(*joined.shape[:-1], -1)


def cached_integers(stored: Array, bits: int) -> Array:
    """Return the signed integers `[..., D]` that a cache stores: int8, or pairs in bytes."""
    return stored if bits == 8 else split_nibbles(stored).astype(np.int8) - MIDDLE


@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """The quantised weight of a linear layer, in blocks of input channels that share a scale.

    Attributes:
        integers: `[in, out]`, int8 or uint8; `FLOAT8` if that is the dtype.
        scales: `[in / block, out]`, float32.
        zero_points: `[in / block, out]`, of the dtype of `integers`; None if all are 0.
        is_blocked: Whether there are blocks; else one scale for all input channels.
        order: The input channel of each row of `integers`, int64 `[in]`; None if rows are in the
            order of the channels. Checkpoints of GPTQ with ``desc_act`` have another order.
    """

    dtype: str
    integers: Array
    scales: Array
    zero_points: Array | None
    is_blocked: bool
    order: Array | None = None

    @property
    def block(self) -> int:
        """The number of input channels that share a scale."""
        return len(self.integers) // len(self.scales)

    @property
    def bits(self) -> int:
        """The size of an integer."""
        return 4 if self.dtype.endswith("4") else 8

    @property
    def stored_bytes(self) -> int:
        """The bytes of integers, scales and zero points in a graph."""
        zeros = 0 if self.zero_points is None else self.zero_points.size
        return (self.integers.size + zeros) * self.bits // 8 + self.scales.nbytes

    @property
    def product_block(self) -> int | None:
        """The block of `product_block`; None of float8."""
        if self.dtype == FLOAT8:
            return None
        shared = self.block if self.is_blocked else 0
        return product_block(len(self.integers), shared, self.bits)

    def dequantised(self, dtype: type = np.float32) -> Array:
        """Return the dequantised weights, `[in, out]`, in the order of the input channels.

        They are exact if the scales have at most `DIGITS` digits.
        """
        blocks: Array = _in_blocks(self.integers, self.block).astype(dtype)
        if self.zero_points is not None:
            blocks -= self.zero_points[:, None].astype(dtype)
        blocks *= self.scales[:, None]
        rows = blocks.reshape(self.integers.shape)
        if self.order is None:
            return rows
        weights = np.empty_like(rows)
        weights[self.order] = rows
        return weights

    def by_output(self, outputs: slice = slice(None)) -> Array:
        """Return the dequantised weights of some outputs as a linear layer has them, `[out, in]`.

        They are float32, and computed in pieces: what is `[in, out]` would be copied whole.
        """
        given = {"integers": self.integers, "scales": self.scales, "zero_points": self.zero_points}
        parts = {name: array[:, outputs] for name, array in given.items() if array is not None}
        inputs, count = parts["integers"].shape
        weights, step = np.empty((count, inputs), np.float32), max(_PIECE // inputs, 1)
        for start in range(0, count, step):
            of = slice(start, start + step)
            piece: dict[str, Any] = {name: array[:, of] for name, array in parts.items()}
            weights[of] = dataclasses.replace(self, **piece).dequantised().T
        return weights


NEAREST, SEARCH = "nearest", "search"
"""The ways to choose scales: so that no value is clipped, or by the squared error of each block."""

_SHARES = (0.76, 0.82, 0.88, 0.94, 1.0)
"""The scales that are tried, over that by which the largest value is the lowest integer."""


def quantise(
    weight: Array, dtype: str, block_size: int, rounding: str = NEAREST
) -> QuantisedWeight:
    """Return a weight as integers.

    `weight`: float32 `[in, out]`.
    `rounding`: How scales are chosen. Those of few large blocks are such that nothing is clipped.
    """
    block = block_size or len(weight)
    low, high = RANGES[dtype]
    integers = np.empty(weight.shape, np.int8)
    scales = np.empty((len(weight) // block, weight.shape[1]), np.float32)
    searches = rounding == SEARCH and block_size > 0
    step = max(_PIECE // len(weight), 1)
    for start in range(0, weight.shape[1], step):
        outputs = slice(start, start + step)
        blocks = _in_blocks(weight[:, outputs], block)
        if not np.isfinite(blocks).all():
            raise ValueError("it holds NaN or infinite values, which no integer stands for")
        found = _few_digits(np.abs(blocks).max(axis=1) / high)
        rounded = np.clip(np.rint(blocks / found[:, None]), low, high)
        if searches:
            found, rounded = _searched(blocks, found, rounded, low - 1, high)
        scales[:, outputs], integers[:, outputs] = found, rounded.reshape(len(weight), -1)
    return QuantisedWeight(dtype, integers, scales, None, bool(block_size))


def _searched(
    blocks: Array, scales: Array, integers: Array, low: int, high: int
) -> tuple[Array, Array]:
    """Return scales and integers with the least squared error in each block.

    The largest magnitude may be the lowest integer, whatever its sign: scales may be negative.

    `blocks`, `integers`: `[in / block, block, out]`.
    `scales`, `integers`: Those to begin with, of which the best may be one.
    """
    places = np.abs(blocks).argmax(axis=1)[:, None]
    largest = np.take_along_axis(blocks, places, axis=1)[:, 0] / low
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        least = np.square(blocks - integers * scales[:, None]).sum(axis=1)
        for share in _SHARES:
            tried = _few_digits(largest * np.float32(share))
            for refines in (True, False):
                rounded = np.clip(np.rint(blocks / tried[:, None]), low, high)
                if refines:  # to the best scale of these integers
                    products, squares = (blocks * rounded).sum(axis=1), (rounded**2).sum(axis=1)
                    tried = _few_digits(products / np.maximum(squares, 1))
            error = np.square(blocks - rounded * tried[:, None]).sum(axis=1)
            better = error < least
            least, scales = np.where(better, error, least), np.where(better, tried, scales)
            integers = np.where(better[:, None], rounded, integers)
    return scales, integers


def product_block(inputs: int, shared: int, bits: int) -> int | None:
    """Return the block of a weight in MatMulNBits, whose inputs may be rounded together.

    `shared`: The number of inputs that share a scale; 0 for all.

    Returns:
        None if the operator has no block that fits.
    """
    most = _MOST_OF_BYTES if bits == 8 and not shared else _BLOCKS[0]
    return next((b for b in _BLOCKS if b <= most and (shared or inputs) % b == 0), None)


def _in_blocks(array: Array, block: int) -> Array:
    """Reshape `[in, out]` to `[in / block, block, out]`."""
    return array.reshape(-1, block, array.shape[1])


def _few_digits(scales: Array) -> Array:
    """Round scales up to `DIGITS` digits, so that no value is clipped; replace 0 by 1."""
    fraction, exponent = np.frexp(np.maximum(np.abs(scales.astype(np.float64)), _LEAST_SCALE))
    rounded = np.ldexp(np.ceil(fraction * 2**DIGITS) / 2**DIGITS, exponent)
    return np.where(scales == 0, 1.0, np.copysign(rounded, scales)).astype(np.float32)
