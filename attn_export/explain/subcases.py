"""The smaller cases that a case holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

Array = np.ndarray
Arrays = Mapping[str, Array]
Axes = Mapping[str, Sequence[object]]
Sizes = Mapping[str, int]

LENGTHS = (1, 2, 3)
ROWS = 4
MOST = 60


def parts_of(inputs: Arrays, axes: Axes, sizes: Sizes) -> Iterator[tuple[Sizes, Arrays]]:
    """Yield smaller cases contained in a case, the smallest first.

    They are rows of the batch, the first queries with their keys, the last keys of the past.

    Args:
        inputs: Of the case.
        axes: The names of the axes of each input.
        sizes: Of every dynamic axis.
    """
    found = []
    for row, L, P, S in itertools.product(
        range(min(sizes.get("batch", 1), ROWS)),
        _lengths(sizes.get("query_len")),
        _past(inputs, sizes),
        _lengths(sizes.get("key_len")),
    ):
        keep = _kept(sizes, row, L, P, S)
        part = {name: _cut(array, axes.get(name, ()), keep) for name, array in inputs.items()}
        cut = {axis: len(keep[axis]) if axis in keep else size for axis, size in sizes.items()}
        found.append((cut, part))
    found.sort(key=lambda entry: sum(array.size for array in entry[1].values()))
    yield from found[:MOST]


def _lengths(size: int | None) -> list[int | None]:
    if size is None:
        return [None]
    return [*(n for n in LENGTHS if n < size), size]


def _past(inputs: Arrays, sizes: Sizes) -> list[int | None]:
    # The capacity of a cache that is written in place is not how much it holds.
    if "past_len" not in sizes or "past_length" in inputs:
        return [None]
    return [0, *_lengths(sizes["past_len"])] if sizes["past_len"] else [0]


def _kept(sizes: Sizes, row: int, L: int | None, P: int | None, S: int | None) -> dict[str, Array]:
    """Return the indices to keep on each axis."""
    keep = {"batch": np.arange(row, row + 1)} if "batch" in sizes else {}
    if L is not None:
        keep["query_len"] = np.arange(L)
    if S is not None:
        keep["key_len"] = np.arange(S)
    if P is not None:
        before = sizes["past_len"]
        keep["past_len"] = np.arange(before - P, before)
        if "total_len" in sizes and L is not None:
            keep["total_len"] = np.arange(before - P, before + L)
    elif "total_len" in sizes and L is not None and "past_len" not in sizes:
        keep["total_len"] = np.arange(L)
    return keep


def _cut(array: Array, axes: Sequence[object], keep: Mapping[str, Array]) -> Array:
    for axis, name in enumerate(axes):
        # Where a mask is broadcast, its axis has no name.
        if isinstance(name, str) and name in keep and axis < array.ndim:
            array = np.take(array, keep[name], axis=axis)
    return array
