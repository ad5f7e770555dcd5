"""Narrow floating formats: rounding of float64 arrays, and facts on values beside their limits."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from attn_export.measures import measure
from attn_export.tensorfile import Array, numpy_dtype, to_float64

_DIGITS = 53
"""The binary digits of float64."""

_CACHED_ELEMENTS = 2**14
"""The number of elements that are rounded together, which a cache holds."""

_FEW_ELEMENTS = 2**9
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
        if x.size < _FEW_ELEMENTS or self.name == "float32":
            with np.errstate(over="ignore"):
                return np.asarray(x.astype(self._dtype).astype(np.float64))
        flat, rounded = np.ascontiguousarray(x).reshape(-1), np.empty(x.size)
        for start in range(0, x.size, _CACHED_ELEMENTS):
            self._round(
                flat[start : start + _CACHED_ELEMENTS], rounded[start : start + _CACHED_ELEMENTS]
            )
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

_SEEN_ELEMENTS = 2**22
"""The number of elements that are looked at together."""


@dataclasses.dataclass(frozen=True)
class RangeFacts:
    """The magnitudes of a value over all inputs.

    Attributes:
        name: The name of the value.
        node: The name of the node that makes it; "" for inputs and weights.
        operator: Its operator, or ``"input"`` or ``"weight"``.
        index: The index of the node; -1 for inputs and weights.
        largest: The largest finite magnitude.
        smallest: The smallest magnitude other than 0; infinite if there is none.
        overflow: The largest share of elements that become infinite.
        subnormal: The largest share that has fewer digits or becomes 0.
        flushed: The largest share that becomes 0.
        loss: The largest relative L2 error of a row that the limits alone make; inf with overflow.
        coarse: Whether its elements are whole numbers, of which some become others.
    """

    name: str
    node: str
    operator: str
    index: int
    largest: float = 0.0
    smallest: float = math.inf
    overflow: float = 0.0
    subnormal: float = 0.0
    flushed: float = 0.0
    loss: float = 0.0
    coarse: bool = False

    def margin(self, format_: FloatFormat) -> float:
        """Return the bits between the largest magnitude and the limit; negative beyond it."""
        return math.log2(format_.largest / self.largest) if self.largest else math.inf

    def joined(self, other: RangeFacts) -> RangeFacts:
        """Return the facts over the inputs of both."""
        names = ("largest", "overflow", "subnormal", "flushed", "loss", "coarse")
        return dataclasses.replace(
            self, smallest=min(self.smallest, other.smallest),
            **{name: max(getattr(self, name), getattr(other, name)) for name in names},
        )  # fmt: skip


def facts_of(about: tuple[str, str, str, int], x: Array, format_: FloatFormat) -> RangeFacts:
    """Return facts on an array.

    `about`: The name, node, operator and index.
    `x`: A floating array of any type and shape.
    """
    if x.size > _SEEN_ELEMENTS:
        rows = np.atleast_2d(x.reshape(-1, x.shape[-1]))
        step, facts = max(1, _SEEN_ELEMENTS // x.shape[-1]), RangeFacts(*about)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            found = facts_of(about, part, format_)
            share = part.size / x.size
            found = dataclasses.replace(
                found, overflow=found.overflow * share, subnormal=found.subnormal * share,
                flushed=found.flushed * share,
            )  # fmt: skip
            facts = _summed(facts, found)
        return facts
    if x.dtype.itemsize < np.dtype(np.float32).itemsize:
        x = to_float64(x)
    sizes = np.abs(x)
    largest, smallest = (float(end) for end in (sizes.max(initial=0.0), sizes.min(initial=np.inf)))
    if not (smallest > 0 and largest < np.inf):
        usable = np.isfinite(sizes)
        largest = float(np.max(sizes, where=usable, initial=0.0))
        smallest = float(np.min(sizes, where=sizes > 0, initial=np.inf))
    coarse = largest > 2 / format_.eps and _is_coarse(x, format_)
    overflow = float(format_.overflows(x).mean()) if largest > format_.largest else 0.0
    if smallest >= format_.smallest and not overflow:
        return RangeFacts(*about, largest, smallest, coarse=coarse)
    loss = format_.loss_bound(sizes)
    if overflow:
        loss = math.inf
    elif loss > format_.eps:
        x = to_float64(x)
        loss = measure(format_.only_limited(x), x).row
    small = sizes[sizes < format_.smallest]
    subnormal, flushed = (
        float(mask.sum() / x.size) for mask in (format_.subnormal(small), format_.flushed(small))
    )
    return RangeFacts(*about, largest, smallest, overflow, subnormal, flushed, loss, coarse)


def _is_coarse(x: Array, format_: FloatFormat) -> bool:
    """Return whether an array has whole numbers alone, of which some become others."""
    first = x.flat[0]
    if first != np.rint(first):
        return False
    x = to_float64(x[np.isfinite(x) & (np.abs(x) <= format_.largest)])
    return bool(x.size and (x == np.rint(x)).all() and (format_.rounded(x) != x).any())


def _summed(one: RangeFacts, other: RangeFacts) -> RangeFacts:
    joined = one.joined(other)
    shares = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("overflow", "subnormal", "flushed")
    }
    return dataclasses.replace(joined, **shares)
