"""Arguments of a session: arrays of the right names, types and sizes, or one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.errors import UsageError, one_line
from attn_export.runtimes.decode_buffers import CAPACITY
from attn_export.tensorfile import ArrayDict, numpy_dtype

SHOWN = 60
"""Number of characters of a wrong value in a message."""


def arrays_of(inputs: Mapping[str, object]) -> ArrayDict:
    """Return the inputs as arrays.

    Raises:
        UsageError: If something is no array, or the queries are no `[B, L, E]` with L ≥ 1.
    """
    try:
        given = {name: np.asarray(array) for name, array in inputs.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"an input is no array: {one_line(error)}") from error
    query = given["query"]
    if query.ndim != 3:
        raise UsageError(f"query is {list(query.shape)}; give [batch, query_len, embed_dim]")
    if not query.shape[0] or not query.shape[1]:
        raise UsageError(f"query is {list(query.shape)}, which is empty; give one token or more")
    return given


def check_inputs(
    given: ArrayDict,
    described: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, int],
    keys: int,
) -> None:
    """Raise UsageError unless these are the inputs that are wanted.

    Args:
        given: By name.
        described: The dtype and the shape of each that is wanted, as a manifest has them.
        sizes: Of the batch and of the new tokens.
        keys: The number of keys of the longest row, with its new ones.
    """
    for name in sorted(set(described) ^ set(given)):
        problem = "is missing" if name in described else "is not wanted"
        raise UsageError(f"{name} {problem}; give {', '.join(described)}")
    for name, array in given.items():
        shape = [{**sizes, CAPACITY: keys}.get(axis, axis) for axis in described[name]["shape"]]
        if list(array.shape) != shape:
            raise UsageError(f"{name} is {list(array.shape)}, but should be {shape}")
        dtype = numpy_dtype(described[name]["dtype"])
        if array.dtype != dtype:
            raise UsageError(f"{name} is {array.dtype}; give {dtype}")


def lengths_of(lengths: Sequence[int] | None, rows: int, tokens: int) -> np.ndarray:
    """Return the number of own tokens of each row: int64 `[B]`; all of them by default.

    Args:
        lengths: The number of own tokens of each row, or None for all.
        rows: The number of rows.
        tokens: The number of tokens of the longest row.

    Raises:
        UsageError: If there is not one number for each row, or one is out of range.
    """
    if lengths is None:
        return np.full(rows, tokens, np.int64)
    own = _whole_numbers(lengths)
    if own is None or own.shape != (rows,) or (own < 1).any() or (own > tokens).any():
        raise UsageError(
            f"lengths are {_shown(lengths)}; give {rows} whole numbers from 1 to {tokens}, one for "
            "each row"
        )
    return own


def rows_of(rows: Sequence[int], batch: int) -> np.ndarray:
    """Return row numbers: int64, one or more.

    Args:
        rows: The rows to keep, in order.
        batch: The number of rows of the cache.

    Raises:
        UsageError: If there is no such row.
    """
    chosen = _whole_numbers(rows)
    if chosen is None or chosen.ndim != 1 or not chosen.size:
        raise UsageError(f"rows are {_shown(rows)}; give the number of a row for each new one")
    if (chosen < 0).any() or (chosen >= batch).any():
        raise UsageError(f"rows are {_shown(rows)}; the cache has rows 0 to {batch - 1}")
    return chosen


def _whole_numbers(values: object) -> np.ndarray | None:
    """Return the values as int64; None if they are not integers."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else None


def _shown(values: object) -> str:
    """Shorten values for a message of one line."""
    text = " ".join(str(values).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
