"""Input patterns of masks, and of the lengths of caches in place: changes of random inputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from attn_export.cases.draw import limits
from attn_export.cases.input_patterns import HUGE, HUGE_FLOAT16, DrawnCase, InputPattern, multiply
from attn_export.tensorfile import is_floating, lowest_number

# -- patterns of a cache that is written in place -----------------------------------------------

UNUSED_FACTOR, UNUSED_FACTOR_NARROW = 2.0**80, 1e3
"""The factor on keys that are not in use: their scores stay finite, since kernels may read them,
and are far above any finite number that stands for -inf. Narrow types can hold less."""


def _beyond_length(drawn: DrawnCase) -> None:
    """Set past lengths of 0, 1 and 2, and make the unused capacity after them large."""
    inputs = drawn.inputs
    lengths = inputs["past_length"]
    longest = inputs["past_key"].shape[2] - inputs["query"].shape[1]
    lengths[...] = np.arange(len(lengths)) % max(min(longest, 3), 1)
    for name in ("past_key", "past_value"):
        array, input_ = inputs[name], drawn.descriptions[name]
        is_unused = np.arange(array.shape[2]) >= lengths[:, None]  # [B, S]
        unused = np.broadcast_to(is_unused[:, None], array.shape[:3])
        if (
            array.dtype in (np.float32, np.float16)
            and name == "past_value"
            and not drawn.traits.has_latent
        ):
            # Their weights are 0, so they may be as large as finite numbers can be. A latent is
            # of keys as well, whose scores are to be finite.
            largest = -float(lowest_number(array.dtype))
            array[unused] = np.where(array[unused] < 0, -largest, largest)
        elif is_floating(array.dtype):
            wide = array.dtype == np.float32
            array[unused] *= UNUSED_FACTOR if wide else UNUSED_FACTOR_NARROW
        else:  # the least or the largest integer
            low, high = limits(input_, drawn.sizes)
            array[unused] = np.where(array[unused] < (low + high + 1) // 2, low, high)


def _empty_and_full(drawn: DrawnCase) -> None:
    """Empty the past of every batch element but the last, whose buffer the new keys fill."""
    inputs = drawn.inputs
    inputs["past_length"][...] = 0
    inputs["past_length"][-1] = inputs["past_key"].shape[2] - inputs["query"].shape[1]


LENGTHS = (
    InputPattern(
        "beyond_length", "what is beyond the length is never seen", "keys behind the length",
        _beyond_length,
    ),
    InputPattern(
        "empty_and_full", "batch elements have lengths of their own",
        "the length of one batch element for all", _empty_and_full,
    ),
)  # fmt: skip
LENGTH_NAMES = frozenset(pattern.name for pattern in LENGTHS)
"""Names of patterns that change nothing unless the past is at least 2 long."""


# -- patterns of masks --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Mask:
    """A mask, with the values that mean a visible and a hidden key."""

    array: np.ndarray
    visible: float | bool
    hidden: float | bool


def _masks(drawn: DrawnCase) -> Iterator[_Mask]:
    for name in drawn.mask_names():
        array, input_ = drawn.inputs[name], drawn.descriptions[name]
        if array.dtype == np.bool_:
            visible = input_.first is not False
            yield _Mask(array, visible, not visible)
        elif is_floating(array.dtype):
            yield _Mask(array, 0.0, -np.inf)
        else:
            yield _Mask(array, 1, 0)


def _fill(drawn: DrawnCase, *, hidden: bool) -> None:
    """Hide all keys, or none."""
    for mask in _masks(drawn):
        mask.array[...] = mask.hidden if hidden else mask.visible


def _masked_rows(drawn: DrawnCase) -> None:
    """Hide all keys in the first, the middle and the last row of the mask."""
    for mask in _masks(drawn):
        sizes = mask.array.shape[:-1]
        for index in ([0] * len(sizes), [n // 2 for n in sizes], [n - 1 for n in sizes]):
            if mask.array.size:
                mask.array[tuple(index)] = mask.hidden


def _one_visible(drawn: DrawnCase) -> None:
    """Show one key in each row of the mask, so that the result is its value for any scores."""
    # Scores are huge, and the visible one may be far below the hidden ones. So no finite number can
    # stand for -inf.
    for name in drawn.value_names():
        narrow = drawn.is_narrow(name) or not drawn.traits.is_attention
        multiply(drawn, name, HUGE_FLOAT16 if narrow else HUGE)
    for mask in _masks(drawn):
        rows = mask.array.reshape(-1, mask.array.shape[-1])
        if rows.size:
            mask.array[...] = mask.hidden
            cache_lengths = _cache_lengths(drawn, mask)
            for row, keys in enumerate(
                np.repeat(cache_lengths, max(len(rows) // len(cache_lengths), 1))
            ):
                rows[row, (keys - 1 - 3 * row) % max(keys, 1)] = mask.visible


def _one_element(drawn: DrawnCase) -> None:
    """Hide all keys of every batch element but the last."""
    for mask in _masks(drawn):
        mask.array[:-1] = mask.hidden
        mask.array[-1:] = mask.visible


_BLOCKS_HIDDEN = (16, 32, 64)
"""Numbers of keys that are hidden between visible ones, as kernels skip whole blocks."""

BLOCK_KEYS = 2 * sum(_BLOCKS_HIDDEN) - max(_BLOCKS_HIDDEN) + 16
"""The number of keys in which each of these blocks fits, each after as many visible keys."""


def _hidden_blocks(drawn: DrawnCase) -> None:
    """Hide blocks of keys between visible ones, in another order in each row."""
    for mask in _masks(drawn):
        rows = mask.array.reshape(-1, mask.array.shape[-1])
        rows[...] = mask.visible
        for number, row in enumerate(rows):
            start = number % 2  # aligned to blocks, or not
            for at in range(len(_BLOCKS_HIDDEN)):
                size = _BLOCKS_HIDDEN[(number + at) % len(_BLOCKS_HIDDEN)]
                start += 16
                row[start : min(start + size, len(row) - 1)] = mask.hidden
                start += size


BIASES = (-1e4, -512.0, -64.0, -16.0, 0.0, 6.0, 12.0, 20.0, 40.0)
"""Numbers that are added to scores: none of them hides a key."""


def _large_biases(drawn: DrawnCase) -> None:
    """Add numbers of many sizes, large ones, low ones, or very low ones to the scores of a row."""
    for mask in _masks(drawn):
        if not is_floating(mask.array.dtype):
            continue
        rows, random = mask.array.reshape(-1, mask.array.shape[-1]), drawn.random
        wide = mask.array.dtype.itemsize > 2  # narrow types have no digits left for scores
        for number, row in enumerate(rows):
            kind = number % 4 if wide else 0
            values = (
                random.choice(BIASES, len(row)), random.uniform(6, 40, len(row)),
                random.uniform(-32, -16, len(row)), random.uniform(-1000, -992, len(row)),
            )[kind]  # fmt: skip
            row[...] = values


def _pad(drawn: DrawnCase, *, left: bool) -> None:
    """Hide some of the first or last keys of each batch element; their number differs."""
    for mask in _masks(drawn):
        mask.array[...] = mask.visible
        cache_lengths = _cache_lengths(drawn, mask)
        padding = padding_of(cache_lengths)
        by_batch = len(cache_lengths) > 1 or mask.array.shape[0] == 1
        for batch, (keys, hidden) in enumerate(zip(cache_lengths, padding, strict=True)):
            side = slice(None, hidden) if left else slice(keys - hidden, keys)
            (mask.array[batch] if by_batch else mask.array)[..., side] = mask.hidden
        if left and "position_ids" in drawn.inputs and drawn.traits.is_attention:
            _count_from_padding(drawn, cache_lengths, padding)


def padding_of(cache_lengths: np.ndarray) -> np.ndarray:
    """Return the number of padding keys of each batch element, `[B]`.

    Of two or more keys at least one is padding and one is not; a single key is either.
    """
    spread = cache_lengths // 3 + np.arange(len(cache_lengths))
    return np.where(
        cache_lengths > 1,
        1 + spread % np.maximum(cache_lengths - 1, 1),
        np.arange(len(cache_lengths)) % 2,
    )


def _count_from_padding(drawn: DrawnCase, cache_lengths: np.ndarray, padding: np.ndarray) -> None:
    """Count the positions of each batch element from the end of its padding."""
    B, L = drawn.inputs["position_ids"].shape
    first = np.broadcast_to(cache_lengths - L - padding, (B,))[:, None]
    drawn.inputs["position_ids"][...] = np.maximum(first + np.arange(L), 0)


def _cache_lengths(drawn: DrawnCase, mask: _Mask) -> np.ndarray:
    """Return the number of keys of each batch element, `[B]`, or `[1]` if all share the mask."""
    keys, first = mask.array.shape[-1], mask.array.shape[0]
    if drawn.traits.in_place:
        cache_lengths: np.ndarray = drawn.inputs["past_length"] + drawn.inputs["query"].shape[1]
        return cache_lengths if first == len(cache_lengths) else cache_lengths.min(keepdims=True)
    by_batch = first == drawn.sizes.get("batch") and mask.array.ndim > 1
    return np.full(first if by_batch else 1, keys)


def _lowest(drawn: DrawnCase) -> None:
    """Fill the first row of the mask with the lowest number of its type, which hides nothing."""
    for mask in _masks(drawn):
        if is_floating(mask.array.dtype) and mask.array.size:
            # If float16's lowest is added to all scores of a row, none keeps any of its digits.
            first = 1 if mask.array.dtype == np.float16 else 0
            index = (0,) * (mask.array.ndim - 1)
            mask.array[index][first:] = lowest_number(mask.array.dtype)


MASKS = (
    InputPattern(
        "nothing_masked", "every key is visible", "keys that are dropped",
        functools.partial(_fill, hidden=False),
    ),
    InputPattern(
        "fully_masked_rows", "a row with nothing to attend to gives 0",
        "NaN or averages for masked rows", _masked_rows, is_opaque=True,
    ),
    InputPattern(
        "all_keys_masked", "no row attends to anything", "NaN or averages for masked rows",
        functools.partial(_fill, hidden=True), is_opaque=True,
    ),
    InputPattern(
        "one_visible_key", "a row with one key gives its value", "finite numbers for -inf",
        _one_visible, is_opaque=True, may_overflow=True,
    ),
    InputPattern(
        "left_padding", "batch elements start late", "keys that are always visible",
        functools.partial(_pad, left=True),
    ),
    InputPattern(
        "right_padding", "batch elements end early", "keys that are always visible",
        functools.partial(_pad, left=False),
    ),
    InputPattern(
        "one_visible_element", "every batch element but one attends to nothing",
        "the mask of one batch element for all", _one_element, is_opaque=True,
    ),
    InputPattern(
        "hidden_blocks", "blocks of keys are hidden between visible ones",
        "keys behind a hidden block that are dropped", _hidden_blocks,
    ),
)  # fmt: skip
LARGE_BIASES = InputPattern(
    "large_biases", f"numbers from {BIASES[0]:g} to {BIASES[-1]:g} are added to scores",
    "masks that are clipped, or taken for hidden keys", _large_biases, is_sharp=True,
)  # fmt: skip
LOWEST = InputPattern(
    "lowest_float", "finfo.min is a low score, not a masked key", "low scores taken for -inf",
    _lowest,
)  # fmt: skip
