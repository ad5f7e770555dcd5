"""Buffers of keys and values with more capacity than keys."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

CAPACITY = "capacity"
"""The axis along which a cache has room."""

Axes = tuple[str | int, ...]


class Caches:
    """One buffer for each cache of a graph, in the order of axes in which that holds it.

    Args:
        axes: The axes of each, by name: ``("batch", 2, "capacity", 64)``.
        dtype: Of their elements.
        batch: Rows.
        capacity: The number of keys that fit.

    Attributes:
        arrays: The buffers, by the names of the graph's inputs. Unwritten elements are 0.
        batch: Rows.
        capacity: The number of keys that fit.
    """

    def __init__(
        self, axes: Mapping[str, Axes], dtype: np.dtype, batch: int, capacity: int
    ) -> None:
        self._axes, self._dtype = dict(axes), dtype
        self.batch, self.capacity = batch, capacity
        self.arrays = {name: self._empty(name) for name in axes}

    def grow(self, capacity: int) -> None:
        """Grow to the given capacity; keep the held keys."""
        held, self.capacity = self.arrays, max(capacity, self.capacity)
        self.arrays = {name: self._empty(name) for name in held}
        for name, array in held.items():
            self.arrays[name][tuple(slice(size) for size in array.shape)] = array

    def reorder(self, rows: np.ndarray) -> None:
        """Let row i hold what row ``rows[i]`` held; there may be more rows then, or fewer."""
        self.batch = len(rows)
        for name, array in self.arrays.items():
            at = self._axes[name].index("batch")
            self.arrays[name] = np.ascontiguousarray(np.take(array, rows, axis=at))

    def _empty(self, name: str) -> np.ndarray:
        sizes = {"batch": self.batch, CAPACITY: self.capacity}
        # Not np.empty: what nobody wrote is multiplied by 0, which does not help against NaN.
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in self._axes[name]]
        return np.zeros(shape, self._dtype)
