"""Checks of the inputs of a `DecodeSession`, and what their padding holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attn_export.errors import UsageError, one_line
from attn_export.interface import Shape
from attn_export.schema import TensorSignature
from attn_export.tensorfile import ArrayDict, numpy_dtype

QUERY_LEN, CAPACITY, LOGIT_COUNT, ENCODED = "query_len", "capacity", "logit_count", "encoded_len"
"""The names of axes: new tokens, the size of a preallocated cache, positions with logits, and the
tokens of an encoder."""

_QUERY, IDS, LOGIT_INDEX, PAST_LENGTH = "query", "input_ids", "logit_index", "past_length"
"""The names of inputs: the new tokens of a layer and of a whole model, positions with logits, the
number of cached tokens."""

MASK = "attention_mask"
"""The input with 0 where a token is padding, else 1, `[B, L]`."""

HIDDEN, NEXT_HIDDEN = "hidden_states", "next_hidden_states"
"""The input of some layers of a model without the first, and the output of some without the last,
`[B, L, E]`."""

MOST_KEYS = 2**24
"""The largest capacity of a cache."""


def clear_padding(buffer: np.ndarray, axes: Shape, ends: Mapping[str, np.ndarray]) -> None:
    """Set elements of an input to 0 that belong to padding.

    No token attends to them, but a NaN or a large number in the cache would still be multiplied by
    the weight 0.

    `ends`: The size of each batch element along axes that are padded, int64 `[B]` by axis.
    """
    for axis in {*ends}.intersection(axes) if "batch" in axes else ():
        if ends[axis].min() >= buffer.shape[axes.index(axis)]:
            continue
        rows = np.moveaxis(buffer, (axes.index("batch"), axes.index(axis)), (0, 1))
        for row in np.flatnonzero(ends[axis] < rows.shape[1]):
            rows[row, ends[axis][row] :] = 0


SHOWN = 60
"""The number of characters of a wrong value that a message quotes."""


def arrays_of(inputs: Mapping[str, object]) -> ArrayDict:
    """Return the inputs as arrays; the first has the new tokens."""
    try:
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"an input is not an array: {one_line(error)}") from error
    name, tokens = next(iter(arrays.items()))
    axes = ["batch", QUERY_LEN] + ["embed_dim"] * (name == _QUERY)
    if tokens.ndim != len(axes):
        raise UsageError(f"{name} is {list(tokens.shape)}; give [{', '.join(axes)}]")
    if not tokens.shape[0] or not tokens.shape[1]:
        raise UsageError(f"{name} is {list(tokens.shape)}, which is empty; give one token or more")
    if name == IDS and np.issubdtype(tokens.dtype, np.integer):
        arrays[name] = tokens.astype(np.int64)
    return arrays


def check_ids(name: str, ids: np.ndarray, count: int) -> None:
    """Raise an error for ids of tokens, or numbers of positions, that are not below `count`."""
    wrong = ids[(ids < 0) | (ids >= count)]
    if wrong.size:
        raise UsageError(f"{name} has {wrong[0]}; give 0 to {count - 1}")


def moved_right(ids: np.ndarray, mask: object) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts with their padding moved to the right, and their lengths, int64 `[B]`.

    `mask`: 0 where a token is padding, else 1, `[B, L]`.
    """
    try:
        shown = np.asarray(mask)
    except (TypeError, ValueError, RuntimeError):
        shown = np.zeros(0)
    if shown.shape != ids.shape or not np.isin(shown, (0, 1)).all():
        raise UsageError(
            f"attention_mask is {list(shown.shape)}; give 0 and 1 of shape {list(ids.shape)}"
        )
    if not shown.any(axis=1).all():
        raise UsageError("attention_mask leaves a prompt without a token")
    order = np.argsort(shown == 0, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), (shown != 0).sum(axis=1)


def check_inputs(
    arrays: ArrayDict,
    described: Mapping[str, TensorSignature],
    sizes: Mapping[str, int],
    keys: int,
) -> None:
    """Check that the inputs have the names, shapes and dtypes of the manifest."""
    for name in sorted(set(described) ^ set(arrays)):
        problem = "missing" if name in described else "unexpected"
        raise UsageError(f"{problem} input {name}; give {', '.join(described)}")
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
    number = whole_numbers(value)
    if number is None or number.ndim or not 1 <= number <= most:
        raise UsageError(f"{name} is {_shown(value)}; give a whole number from 1 to {most}")
    return int(number)


def lengths_of(lengths: Sequence[int] | None, rows: int, tokens: int) -> np.ndarray:
    """Return the number of tokens of each prompt without its padding, int64 `[B]`."""
    if lengths is None:
        return np.full(rows, tokens, np.int64)
    counts = whole_numbers(lengths)
    if counts is None or counts.shape != (rows,) or counts.min() < 1 or counts.max() > tokens:
        raise UsageError(
            f"lengths are {_shown(lengths)}; give {rows} whole numbers from 1 to {tokens}, one for "
            "each row"
        )
    return counts


def rows_of(rows: Sequence[int], batch: int) -> np.ndarray:
    """Return the indices of batch elements as an int64 array `[N]` with N ≥ 1."""
    chosen = whole_numbers(rows)
    if chosen is None or chosen.ndim != 1 or not chosen.size:
        raise UsageError(f"rows are {_shown(rows)}; give the number of a row for each new one")
    if (chosen < 0).any() or (chosen >= batch).any():
        raise UsageError(f"rows are {_shown(rows)}; the cache has rows 0 to {batch - 1}")
    return chosen


def whole_numbers(values: object) -> np.ndarray | None:
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
