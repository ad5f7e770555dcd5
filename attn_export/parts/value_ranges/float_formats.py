"""Narrow floating formats as rounding of float64 arrays, with and without their limits."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from attn_export.tensorfile import Array, numpy_dtype

_DIGITS = 53
"""The binary digits of float64."""

_BLOCK = 2**14
"""The number of elements that are rounded together, which a cache holds."""

_FEW = 2**9
"""The number of elements below which a conversion is the fastest way to round."""


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A narrow floating format.

    Attributes:
        name: The name of the dtype.
        eps: The distance from 1 to the next number.
        largest: The largest number.
        smallest: The smallest positive number that has all digits.
    """

    name: str
    eps: float
    largest: float
    smallest: float

    @classmethod
    def of(cls, name: str) -> FloatFormat:
        """Return the format of a dtype."""
        dtype = numpy_dtype(name)
        limits: Any = np.finfo(dtype) if dtype.kind == "f" else ml_dtypes.finfo(dtype)
        return cls(name, float(limits.eps), float(limits.max), float(limits.smallest_normal))

    def rounded(self, x: Array) -> Array:
        """Return float64 numbers as this format holds them."""
        # A dtype rounds few numbers faster, and takes very long for infinities that it makes.
        if x.size < _FEW or self.name == "float32":
            with np.errstate(over="ignore"):
                return np.asarray(x.astype(self._dtype).astype(np.float64))
        flat, rounded = np.ascontiguousarray(x).reshape(-1), np.empty(x.size)
        for start in range(0, x.size, _BLOCK):
            self._round(flat[start : start + _BLOCK], rounded[start : start + _BLOCK])
        return rounded.reshape(x.shape)

    def _round(self, x: Array, rounded: Array) -> None:
        self._round_digits(x, rounded)
        sizes = np.abs(x)
        if not sizes.max() <= self.largest:
            beyond = np.abs(rounded) > self.largest
            rounded[beyond] = np.copysign(np.inf, x[beyond])
        if not sizes.min() >= self.smallest:
            small, step = np.nonzero(sizes < self.smallest), self.smallest * self.eps
            rounded[small] = np.rint(x[small] / step) * step

    def without_limits(self, x: Array, rounded: Array) -> Array:
        """Return float64 numbers as this format would hold them if it had all exponents.

        `rounded`: What `rounded` returns for x. It is returned itself if the limits change no row
            by more than rounding does.
        """
        sizes = np.abs(x)
        if self._is_inside(sizes) or self.loss_bound(sizes) <= self.eps:
            return rounded
        free = np.empty(x.shape)
        self._round_digits(x, free)
        return free

    def only_limited(self, x: Array) -> Array:
        """Return x with rounding only where the limits of this format concern it."""
        beyond = self._beyond(x)
        return np.where(beyond, self.rounded(x), x) if beyond.any() else x

    def _is_inside(self, sizes: Array) -> bool:
        """Return whether magnitudes have all digits of this format, or are 0."""
        if not sizes.size:
            return True
        least = sizes.min()
        if not least:
            least = np.min(sizes, where=sizes > 0, initial=np.inf)
        return bool(least >= self.smallest and sizes.max() <= self.largest)

    def loss_bound(self, sizes: Array) -> float:
        """Return a bound of the relative error that the limits make in a row; inf beyond them.

        `sizes`: Magnitudes, of any shape; rows are along the last axis.
        """
        if not sizes.size:
            return 0.0
        rows = sizes.max(-1) if sizes.ndim else sizes
        if not rows.max() <= self.largest:
            return math.inf
        least = float(rows.min())
        if not least:
            least = float(np.min(rows, where=rows > 0, initial=np.inf))
        width = sizes.shape[-1] if sizes.ndim else 1
        return self.smallest * self.eps / 2 * math.sqrt(width) / least

    def overflows(self, x: Array) -> Array:
        """Return a mask of the finite elements that become infinite."""
        # What is below half a step above the largest number rounds to it.
        limit = self.largest * (2 - self.eps / 2) / (2 - self.eps)
        return np.asarray((np.abs(x) >= limit) & np.isfinite(x))

    def subnormal(self, x: Array) -> Array:
        """Return a mask of the elements other than 0 that have fewer digits or become 0."""
        return np.asarray((np.abs(x) < self.smallest) & (x != 0))

    def flushed(self, x: Array) -> Array:
        """Return a mask of the elements other than 0 that become 0."""
        return np.asarray((np.abs(x) <= self.smallest * self.eps / 2) & (x != 0))

    def _beyond(self, x: Array) -> Array:
        sizes = np.abs(x)
        return ((sizes < self.smallest) & (sizes > 0)) | ((sizes > self.largest) & (sizes < np.inf))

    def _round_digits(self, x: Array, rounded: Array) -> None:
        """Round x to the digits of this format, with all exponents and ties to even."""
        dropped = _DIGITS - 1 + round(math.log2(self.eps))
        bits, found = (
            np.ascontiguousarray(x).view(np.int64).reshape(x.shape),
            rounded.view(np.int64),
        )
        np.right_shift(bits, dropped, out=found)
        found &= 1
        found += (1 << (dropped - 1)) - 1
        found += bits
        found &= -(1 << dropped)

    @functools.cached_property
    def _dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.name)


FORMATS = {name: FloatFormat.of(name) for name in ("float16", "bfloat16")}
