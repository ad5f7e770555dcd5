"""Feeds: shapes, types and values of the arrays, the same for all candidates of a workload."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.cases.draw import Sizes
from attn_export.errors import UsageError
from attn_export.interface import Input, Shape
from attn_export.runtimes.decode_inputs import LOGIT_INDEX
from attn_export.runtimes.protocol import Facts
from attn_export.tensorfile import numpy_dtype

ALIGNMENT = 64
"""Alignment of arrays in bytes: a cache line, and a register of AVX-512. numpy aligns to 16."""


@dataclasses.dataclass(frozen=True)
class Feed:
    """Description of the array for one input or output.

    Attributes:
        fill: The value of every element; None for normally distributed random values.
        below: Where it is not 0, elements are random whole numbers from 0 that are smaller.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    fill: float | None = None
    below: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def transpose(self, axes: Sequence[int]) -> Feed:
        """Return the feed with its axes permuted, as in `numpy.transpose`."""
        return dataclasses.replace(self, shape=tuple(self.shape[axis] for axis in axes))

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Feed:
        """Return the feed that `to_json` wrote."""
        return cls(**{**values, "shape": tuple(values["shape"])})


def empty(feed: Feed) -> np.ndarray:
    """Return an aligned array of a feed's shape and dtype, whose pages were not touched yet."""
    buffer = np.empty(feed.nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    flat = buffer[start : start + feed.nbytes].view(numpy_dtype(feed.dtype))
    return flat.reshape(feed.shape)


def filled(feed: Feed, seed: int) -> np.ndarray:
    """Return an aligned array of a feed's shape and dtype, with the values that it describes."""
    array = empty(feed)
    if feed.below:
        array[...] = np.random.default_rng(seed).integers(0, feed.below, feed.shape)
    elif feed.fill is not None:
        array.fill(feed.fill)
    elif array.dtype == np.float32:
        np.random.default_rng(seed).standard_normal(out=array, dtype=np.float32)
    else:
        drawn = np.random.default_rng(seed).standard_normal(feed.shape, np.float32)
        array[...] = drawn.astype(array.dtype)
    return array


# -- the inputs and outputs of a graph at given sizes -------------------------------------------


def feeds_of(inputs: Mapping[str, Input], sizes: Sizes) -> dict[str, Feed]:
    """Return the feed of each input.

    Masks let every query attend to every key. `past_length` and all positions equal the length
    of the past, and `logit_index` is the last token. Floating-point inputs are random; other
    integers are 0.
    """
    return {
        name: Feed(_shape_at(declared.shape, sizes), declared.dtype, _fill(name, declared, sizes))
        for name, declared in inputs.items()
    }


def output_feeds(outputs: Mapping[str, Shape], sizes: Sizes) -> dict[str, Feed]:
    """Return the feeds of the outputs whose axes all have a size, as float32.

    The worker replaces the type by that of the graph's output.
    """
    return {
        name: Feed(_shape_at(shape, sizes))
        for name, shape in outputs.items()
        if all(axis in sizes for axis in shape if isinstance(axis, str))
    }


def _shape_at(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    """Return a shape in which sizes replace the names of axes."""
    unknown = [axis for axis in shape if isinstance(axis, str) and axis not in sizes]
    if unknown:
        raise UsageError(
            f"no size is known for the axis {unknown[0]!r}; bench knows {', '.join(sizes)}"
        )
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shape)


def _fill(name: str, declared: Input, sizes: Sizes) -> float | None:
    if declared.dtype == "bool" or name == "attention_mask":
        return 1
    if name in ("past_length", "position_ids"):
        return sizes.get("past_len", 0)
    if name == LOGIT_INDEX:
        return sizes["query_len"] - 1
    if name == "attn_mask" or not declared.dtype.startswith(("float", "bfloat")):
        return 0
    return None


# -- result of the function that makes a candidate ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A candidate that is ready to run: loaded, its memory allocated and bound.

    Attributes:
        run: Function that does the work once, with the same inputs at every call.
    """

    run: Callable[[], object]
    facts: Facts = dataclasses.field(default_factory=dict)


Make = Callable[[Mapping[str, Any], int], Prepared]
"""A function that makes a candidate of options and a number of threads."""
