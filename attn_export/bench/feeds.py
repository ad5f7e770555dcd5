"""Input arrays of candidates, alike for all, and the result of a maker."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.errors import UsageError
from attn_export.runtimes.protocol import Facts
from attn_export.spec import Input, Shape
from attn_export.tensorfile import numpy_dtype

# -- arrays for all candidates alike ------------------------------------------------------------


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
    """Return an array as its feed describes; the same seed gives the same array.

    Args:
        feed: The description of the array.
        seed: Seed of the values.
    """
    array = empty(feed)
    if feed.fill is not None:
        array.fill(feed.fill)
    elif array.dtype == np.float32:
        np.random.default_rng(seed).standard_normal(out=array, dtype=np.float32)
    else:
        drawn = np.random.default_rng(seed).standard_normal(feed.shape, np.float32)
        array[...] = drawn.astype(array.dtype)
    return array


# -- the inputs and outputs of a graph at given sizes -------------------------------------------


Sizes = Mapping[str, int]


def feeds_of(inputs: Mapping[str, Input], sizes: Sizes) -> dict[str, Feed]:
    """Return the feed of each input.

    Masks hide nothing, `past_length` is full, positions are those after the past.

    Args:
        inputs: Shapes and types of the inputs, by name.
        sizes: Sizes of the axes, by name.

    Raises:
        UsageError: If an axis has no size.
    """
    return {
        name: Feed(shape_at(wanted.shape, sizes), wanted.dtype, _fill(name, wanted, sizes))
        for name, wanted in inputs.items()
    }


def known_feeds(outputs: Mapping[str, Shape], sizes: Sizes) -> dict[str, Feed]:
    """Return feeds for the outputs of known sizes; the graph determines their types.

    Args:
        outputs: Shapes of the outputs, by name.
        sizes: Sizes of the axes, by name.
    """
    return {
        name: Feed(shape_at(shape, sizes))
        for name, shape in outputs.items()
        if all(axis in sizes for axis in shape if isinstance(axis, str))
    }


def shape_at(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    """Replace the names in a shape by sizes.

    Args:
        shape: Sizes or names of axes.
        sizes: Sizes of the axes, by name.

    Raises:
        UsageError: If a name has no size.
    """
    unknown = [axis for axis in shape if isinstance(axis, str) and axis not in sizes]
    if unknown:
        raise UsageError(
            f"no size is known for the axis {unknown[0]!r}; bench knows {', '.join(sizes)}"
        )
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shape)


def _fill(name: str, wanted: Input, sizes: Sizes) -> float | None:
    if wanted.dtype == "bool":
        return 1
    if name in ("past_length", "position_ids"):
        return sizes.get("past_len", 0)
    if name == "attn_mask" or not wanted.dtype.startswith(("float", "bfloat")):
        return 0
    return None


# -- result of a maker, for the worker ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A candidate that is ready: loaded, its memory allocated and bound.

    Attributes:
        run: Does the work once. Its inputs are the same every time.
        facts: Facts about the run.
    """

    run: Callable[[], object]
    facts: Facts = dataclasses.field(default_factory=dict)
