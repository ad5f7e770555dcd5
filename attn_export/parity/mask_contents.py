"""Contents of masks and of caches in place: hidden and unused keys, rows of other lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from attn_export.parity.contents import HUGE, HUGE_FLOAT16, Content, Drawn, multiply
from attn_export.parity.draw import limits
from attn_export.tensorfile import ArrayDict, is_floating, lowest_number

# -- contents of a cache that is written in place -----------------------------------------------


LOUD = 1e3
"""The factor on what lies behind the keys of a row; float16 can hold its scores."""


def keys_of_rows(inputs: ArrayDict, *, in_place: bool) -> np.ndarray:
    """Return the number of keys of each row of the batch, with its new ones: `[B]`.

    Args:
        inputs: The inputs, by name.
        in_place: Whether the cache is written in place.
    """
    B, L = inputs["query"].shape[:2]
    if in_place:
        return np.asarray(inputs["past_length"] + L)
    return np.full(B, inputs["attn_mask"].shape[-1])


def _beyond_length(drawn: Drawn) -> None:
    """Let rows hold 0, 1 or 2 keys of many, and make the unused capacity after them loud."""
    inputs = drawn.inputs
    lengths = inputs["past_length"]
    unused = inputs["past_key"].shape[2] - inputs["query"].shape[1]
    lengths[...] = np.arange(len(lengths)) % max(min(unused, 3), 1)
    for name in ("past_key", "past_value"):
        array, wanted = inputs[name], drawn.wanted[name]
        rest = np.arange(array.shape[2]) >= lengths[:, None]  # [B, S]
        rows = np.broadcast_to(rest[:, None], array.shape[:3])
        if is_floating(array.dtype):
            array[rows] *= LOUD
        else:  # integers are as large as there are
            low, high = limits(wanted, drawn.sizes)
            array[rows] = np.where(array[rows] < (low + high + 1) // 2, low, high)


def _empty_and_full(drawn: Drawn) -> None:
    """Let rows hold nothing, and the last one be full when the new keys are written."""
    inputs = drawn.inputs
    inputs["past_length"][...] = 0
    inputs["past_length"][-1] = inputs["past_key"].shape[2] - inputs["query"].shape[1]


LENGTHS = (
    Content(
        "beyond_length", "what a row does not hold is never seen", "keys behind the length",
        _beyond_length,
    ),
    Content(
        "empty_and_full", "rows of a batch have lengths of their own",
        "the length of one row for all", _empty_and_full,
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Mask:
    """A mask, and its values for keys that are seen and hidden."""

    array: np.ndarray
    seen: float | bool
    hidden: float | bool


def _masks(drawn: Drawn) -> Iterator[_Mask]:
    for name in drawn.masks():
        array, wanted = drawn.inputs[name], drawn.wanted[name]
        if array.dtype == np.bool_:
            seen = wanted.first is not False
            yield _Mask(array, seen, not seen)
        elif is_floating(array.dtype):
            yield _Mask(array, 0.0, -np.inf)
        else:
            yield _Mask(array, 1, 0)


def _nothing_hidden(drawn: Drawn) -> None:
    for mask in _masks(drawn):
        mask.array[...] = mask.seen


def _masked_rows(drawn: Drawn) -> None:
    """Hide all keys from the first, the middle and the last row of the mask."""
    for mask in _masks(drawn):
        rows = mask.array.shape[:-1]
        for place in ([0] * len(rows), [n // 2 for n in rows], [n - 1 for n in rows]):
            if mask.array.size:
                mask.array[tuple(place)] = mask.hidden


def _all_masked(drawn: Drawn) -> None:
    for mask in _masks(drawn):
        mask.array[...] = mask.hidden


def _one_visible(drawn: Drawn) -> None:
    """Show each row one key, which gives its value for any scores.

    They are huge, and may be far below those that are hidden: no finite number stands for -inf.
    """
    for name in drawn.values():
        narrow = drawn.is_narrow(name) or drawn.spec is None
        multiply(drawn, name, HUGE_FLOAT16 if narrow else HUGE)
    for mask in _masks(drawn):
        rows = mask.array.reshape(-1, mask.array.shape[-1])
        if rows.size:
            mask.array[...] = mask.hidden
            cache_lengths = _cache_lengths(drawn, mask)
            for row, keys in enumerate(
                np.repeat(cache_lengths, max(len(rows) // len(cache_lengths), 1))
            ):
                rows[row, (3 * row) % max(keys, 1)] = mask.seen


def _left_padding(drawn: Drawn) -> None:
    _pad(drawn, left=True)


def _right_padding(drawn: Drawn) -> None:
    _pad(drawn, left=False)


def _pad(drawn: Drawn, *, left: bool) -> None:
    """Hide the first or last keys of each row of the batch, of a number of its own."""
    for mask in _masks(drawn):
        mask.array[...] = mask.seen
        cache_lengths = _cache_lengths(drawn, mask)
        padding = padding_of(cache_lengths)
        for row, (keys, hidden) in enumerate(zip(cache_lengths, padding, strict=True)):
            side = slice(None, hidden) if left else slice(keys - hidden, keys)
            rows = (
                mask.array[row]
                if len(cache_lengths) > 1 or mask.array.shape[0] == 1
                else mask.array
            )
            rows[..., side] = mask.hidden
        if left and "position_ids" in drawn.inputs and drawn.spec is not None:
            _count_from_padding(drawn, cache_lengths, padding)


def padding_of(cache_lengths: np.ndarray) -> np.ndarray:
    """Return the number of padding keys of each row: some and not all, where there are two."""
    spread = cache_lengths // 3 + np.arange(len(cache_lengths))
    return np.where(
        cache_lengths > 1,
        1 + spread % np.maximum(cache_lengths - 1, 1),
        np.arange(len(cache_lengths)) % 2,
    )


def _count_from_padding(drawn: Drawn, cache_lengths: np.ndarray, padding: np.ndarray) -> None:
    """Count the positions of each row from the end of its padding."""
    B, L = drawn.inputs["position_ids"].shape
    first = np.broadcast_to(cache_lengths - L - padding, (B,))[:, None]
    drawn.inputs["position_ids"][...] = np.maximum(first + np.arange(L), 0)


def _cache_lengths(drawn: Drawn, mask: _Mask) -> np.ndarray:
    """Return the number of keys of each row of the batch; one number if rows share the mask."""
    keys, first = mask.array.shape[-1], mask.array.shape[0]
    if drawn.in_place:
        cache_lengths = keys_of_rows(drawn.inputs, in_place=True)
        return cache_lengths if first == len(cache_lengths) else cache_lengths.min(keepdims=True)
    by_row = first == drawn.sizes.get("batch") and mask.array.ndim > 1
    return np.full(first if by_row else 1, keys)


def _lowest(drawn: Drawn) -> None:
    """Give the first row of the mask the lowest number of its type, which hides nothing."""
    for mask in _masks(drawn):
        if is_floating(mask.array.dtype) and mask.array.size:
            # A row of nothing but float16's lowest has no bits left for its scores.
            first = 1 if mask.array.dtype == np.float16 else 0
            row = (0,) * (mask.array.ndim - 1)
            mask.array[row][first:] = lowest_number(mask.array.dtype)


MASKS = (
    Content(
        "nothing_masked", "every key is visible", "keys that are dropped", _nothing_hidden
    ),
    Content(
        "fully_masked_rows", "a row with nothing to attend to gives 0",
        "NaN or averages for masked rows", _masked_rows, is_opaque=True,
    ),
    Content(
        "all_keys_masked", "no row attends to anything", "NaN or averages for masked rows",
        _all_masked, is_opaque=True,
    ),
    Content(
        "one_visible_key", "a row with one key gives its value", "finite numbers for -inf",
        _one_visible, is_opaque=True, is_loud=True,
    ),
    Content(
        "left_padding", "rows of a batch start late", "keys that are always visible",
        _left_padding,
    ),
    Content(
        "right_padding", "rows of a batch end early", "keys that are always visible",
        _right_padding,
    ),
)  # fmt: skip
LOWEST = Content(
    "lowest_float", "finfo.min is a low score, not a masked key", "low scores taken for -inf",
    _lowest,
)  # fmt: skip
