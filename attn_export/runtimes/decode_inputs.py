"""Inputs of a `DecodeSession`: checks, and what padding holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attn_export.errors import UsageError, one_line
from attn_export.schema import TensorSignature
from attn_export.spec import Shape
from attn_export.tensorfile import ArrayDict, numpy_dtype

CAPACITY = "capacity"
"""Name of the axis along which a cache is preallocated."""


def clear_padding(buffer: np.ndarray, axes: Shape, ends: Mapping[str, np.ndarray]) -> None:
    """Set elements of an input to 0 that belong to padding.

    No token attends to them, but a NaN or a large number in the cache would still be multiplied by
    the weight 0.

    `ends`: The size of each batch element along axes that are padded, int64 `[B]` by axis.
    """
    for axis in {*ends}.intersection(axes) if "batch" in axes else ():
        rows = np.moveaxis(buffer, (axes.index("batch"), axes.index(axis)), (0, 1))
        for row in np.flatnonzero(ends[axis] < rows.shape[1]):
            rows[row, ends[axis][row] :] = 0


SHOWN = 60
"""The number of characters of a wrong value that a message quotes."""


def arrays_of(inputs: Mapping[str, object]) -> ArrayDict:
    """Return the inputs as arrays."""
    try:
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"an input is not an array: {one_line(error)}") from error
    query = arrays["query"]
    if query.ndim != 3:
        raise UsageError(f"query is {list(query.shape)}; give [batch, query_len, embed_dim]")
    if not query.shape[0] or not query.shape[1]:
        raise UsageError(f"query is {list(query.shape)}, which is empty; give one token or more")
    return arrays


def check_inputs(
    arrays: ArrayDict,
    described: Mapping[str, TensorSignature],
    sizes: Mapping[str, int],
    keys: int,
) -> None:
    """Check that the inputs have the names, shapes and dtypes of the manifest."""
    for name in sorted(set(described) ^ set(arrays)):
        problem = "is missing" if name in described else "is not wanted"
        raise UsageError(f"{name} {problem}; give {', '.join(described)}")
    known = {**sizes, CAPACITY: keys}
    for name, array in arrays.items():
        axes = described[name].shape
        shape = [axis if isinstance(axis, int) else known.get(axis, axis) for axis in axes]
        if list(array.shape) != shape:
            raise UsageError(f"{name} is {list(array.shape)}, but should be {shape}")
        dtype = numpy_dtype(described[name].dtype)
        if array.dtype != dtype:
            raise UsageError(f"{name} is {array.dtype}; give {dtype}")


def whole_number(name: str, value: object, most: int) -> int:
    """Return an argument that must be a whole number from 1."""
    number = _whole_numbers(value)
    if number is None or number.ndim or not 1 <= number <= most:
        raise UsageError(f"{name} is {_shown(value)}; give a whole number from 1 to {most}")
    return int(number)


def lengths_of(lengths: Sequence[int] | None, rows: int, tokens: int) -> np.ndarray:
    """Return the number of tokens of each prompt without its padding, int64 `[B]`."""
    if lengths is None:
        return np.full(rows, tokens, np.int64)
    counts = _whole_numbers(lengths)
    if counts is None or counts.shape != (rows,) or counts.min() < 1 or counts.max() > tokens:
        raise UsageError(
            f"lengths are {_shown(lengths)}; give {rows} whole numbers from 1 to {tokens}, one for "
            "each row"
        )
    return counts


def rows_of(rows: Sequence[int], batch: int) -> np.ndarray:
    """Return the indices of batch elements as an int64 array `[N]` with N ≥ 1."""
    chosen = _whole_numbers(rows)
    if chosen is None or chosen.ndim != 1 or not chosen.size:
        raise UsageError(f"rows are {_shown(rows)}; give the number of a row for each new one")
    if (chosen < 0).any() or (chosen >= batch).any():
        raise UsageError(f"rows are {_shown(rows)}; the cache has rows 0 to {batch - 1}")
    return chosen


def _whole_numbers(values: object) -> np.ndarray | None:
    """Return the values as an int64 array; None if they are not integers."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else None


def _shown(values: object) -> str:
    """Shorten values for a message of one line."""
    text = " ".join(str(values).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
