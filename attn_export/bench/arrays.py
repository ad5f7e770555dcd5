"""Arrays for all candidates alike: of one alignment, from one allocator, with the same values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.tensorfile import numpy_dtype

ALIGNMENT = 64
"""Bytes: a cache line, and a register of AVX-512. numpy itself aligns to 16."""


@dataclasses.dataclass(frozen=True)
class Feed:
    """One input or output, with all its sizes.

    Attributes:
        dtype: As numpy names it, or ``"bfloat16"``.
        fill: The value of every element; None for normal random ones.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    fill: float | None = None

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def laid_out(self, axes: Sequence[int]) -> Feed:
        """Return the same feed with its axes in another order."""
        return dataclasses.replace(self, shape=tuple(self.shape[axis] for axis in axes))

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Feed:
        """Return the feed that `to_json` wrote."""
        return cls(tuple(values["shape"]), values["dtype"], values["fill"])


def empty(feed: Feed) -> np.ndarray:
    """Return aligned memory that was never touched."""
    space = np.empty(feed.nbytes + ALIGNMENT, np.uint8)
    start = -space.ctypes.data % ALIGNMENT
    flat = space[start : start + feed.nbytes].view(numpy_dtype(feed.dtype))
    return flat.reshape(feed.shape)


def filled(feed: Feed, seed: int) -> np.ndarray:
    """Return an array as its feed describes; the same seed gives the same array."""
    array = empty(feed)
    if feed.fill is not None:
        array.fill(feed.fill)
    elif array.dtype == np.float32:
        np.random.default_rng(seed).standard_normal(out=array, dtype=np.float32)
    else:
        drawn = np.random.default_rng(seed).standard_normal(feed.shape, np.float32)
        array[...] = drawn.astype(array.dtype)
    return array
