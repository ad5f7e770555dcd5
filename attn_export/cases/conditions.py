"""Conditions on sizes and input patterns that the cases of a subject must meet together.

Many faults show only for certain inputs: small or large sizes, one or several queries, padding,
masks. Each condition is a short text that some case must meet. `docs/parity.md` lists the
conditions with the faults that they are for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from attn_export.cases.blocks import LAST, near_blocks
from attn_export.cases.draw import Sizes
from attn_export.cases.mask_patterns import BLOCK_KEYS, LENGTH_NAMES
from attn_export.interface import BATCH, KEYS, KNOWN, PAST, QUERIES

LEVELS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    BATCH: {"small": (0, 2), "middle": (3, 6), "large": (7, math.inf)},
    "": {"small": (0, 3), "middle": (4, 15), "large": (16, math.inf)},
}
"""Ranges of small, middle and large sizes, by axis; "" stands for all other axes."""

VALUES = {
    BATCH: (1, 2, 3, 4, 5, 7, 8, 9, 16, 17),
    PAST: (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33),
    "": (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 49),
}
"""Sizes to try, by axis: small numbers, powers of 2 with their neighbours, and 49."""


PLAIN = "random inputs"
SMALLEST = f"{PLAIN}, smallest sizes"
ONE_QUERY = "one query"
_SUFFIX_ONE_QUERY = f", {ONE_QUERY}"
A_PAST, NO_PAST = f"{_SUFFIX_ONE_QUERY}, a past", f"{_SUFFIX_ONE_QUERY}, no past"
_MANY_KEYS = 16
_WITH_MANY_KEYS = frozenset({
    "fully_masked_rows", "large_logits", "left_padding", "one_visible_key", "outliers",
    "right_padding", "tiny_values",
})  # fmt: skip
"""Patterns that meet their conditions only with at least `_MANY_KEYS` keys: with few keys, no two
large scores are close to each other."""

_BY_BATCH = (
    "fully_masked_rows", "large_logits", "left_padding", "lowest_float", "one_visible_key",
)  # fmt: skip
"""Input patterns to try with batch size 1 as well, since graphs branch on it."""

_WITHOUT_PAST = ("large_logits", "one_visible_key", "outliers")
"""Input patterns to try with several queries without a past as well, since graphs branch on it."""

_LARGE_AND_EMPTY = "large_logits in empty rows"
"""Large logits in a batch element without a past, where a query may see its own key alone: its
score may be below any finite number that stands for -inf."""


def free_axes(names: Sequence[str], sums: Sequence[str]) -> list[str]:
    """Return the axes whose size is free, i.e. no sum of others; axes in `KNOWN` come first."""
    free = [name for name in names if name not in sums]
    return [n for n in KNOWN if n in free] + sorted(n for n in free if n not in KNOWN)


def tried_sizes(axis: str) -> tuple[int, ...]:
    """Return the sizes of an axis to try."""
    return VALUES.get(axis, VALUES[""])


def corners(axes: Sequence[str]) -> list[dict[str, int]]:
    """Return all combinations of the smallest and the largest size to try of each axis.

    They show faults that start or end at some size of one or several axes. There are none if an
    axis is not in `KNOWN`.
    """
    if not set(axes) <= set(KNOWN):
        return []
    ends = [
        (2 if axis == KEYS else min(tried_sizes(axis)), max(tried_sizes(axis))) for axis in axes
    ]
    return [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*ends)]


# -- sizes ---------------------------------------------------------------------------------------


def size_conditions(axes: Sequence[str]) -> dict[str, int]:
    """Return all conditions on the sizes of these axes, with their ranks.

    Conditions of a lower rank are met first; `BlockSizes.conditions` has those at blocks.
    """
    next_to_blocks = {size for size, distance in near_blocks().items() if distance}
    ranks = {
        f"{axis} {value}": 2 if value in next_to_blocks else 0
        for axis in axes
        for value in tried_sizes(axis)
    }
    ranks |= {
        f"{level} {one}, {other_level} {other}": 0
        for one, other in itertools.combinations(axes, 2)
        for level, other_level in itertools.product(_levels(one), _levels(other))
    }
    for corner in corners(axes):
        is_large = all(corner.get(axis) == max(tried_sizes(axis)) for axis in (BATCH, QUERIES))
        ranks[_joint_condition(corner)] = LAST if is_large else 0
    if QUERIES in axes:
        # Graphs for one query run only in cases with one query.
        others = size_conditions([axis for axis in axes if axis != QUERIES])
        ranks |= {f"{ONE_QUERY}, {condition}": rank for condition, rank in others.items()}
    return ranks


def met_by_sizes(sizes: Sizes, axes: Sequence[str], *, is_opaque: bool = False) -> Iterator[str]:
    """Yield the conditions that these sizes meet."""
    yield from (f"{axis} {sizes[axis]}" for axis in axes)
    if not is_opaque:
        for one, other in itertools.combinations(axes, 2):
            yield f"{_level(one, sizes[one])} {one}, {_level(other, sizes[other])} {other}"
        yield _joint_condition({axis: sizes[axis] for axis in axes})
    if sizes.get(QUERIES) == 1 and QUERIES in axes:
        others = [axis for axis in axes if axis != QUERIES]
        met = met_by_sizes(sizes, others, is_opaque=is_opaque)
        yield from (f"{ONE_QUERY}, {condition}" for condition in met)


def _joint_condition(sizes: Sizes) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items()) + " together"


def _keys_of(sizes: Sizes) -> int | None:
    """Return the number of keys, or None if the axes do not define it."""
    if KEYS in sizes:
        return sizes[KEYS]
    if QUERIES in sizes:
        return sizes[QUERIES] + sizes.get(PAST, 0)
    return None


def have_many_keys(sizes: Sizes) -> bool:
    """Return whether there are at least `_MANY_KEYS` keys, or no axis defines their number."""
    keys = _keys_of(sizes)
    return keys is None or keys >= _MANY_KEYS


def have_block_keys(sizes: Sizes) -> bool:
    """Return whether all blocks of hidden keys fit, or no axis defines the number of keys."""
    keys = _keys_of(sizes)
    return keys is None or keys >= BLOCK_KEYS


def are_smallest(sizes: Sizes) -> bool:
    """Return whether no size is more than 1."""
    return max(sizes.values(), default=1) == 1


def may_differ_in_length(sizes: Sizes) -> bool:
    """Return whether batch elements of a cache in place may have different lengths."""
    return sizes.get(PAST, 0) >= 2


def _levels(axis: str) -> Mapping[str, tuple[float, float]]:
    return LEVELS.get(axis, LEVELS[""])


def _level(axis: str, size: int) -> str:
    return next(name for name, (low, high) in _levels(axis).items() if low <= size <= high)


# -- input patterns ------------------------------------------------------------------------------


def kind_of_call(sizes: Sizes) -> str:
    """Return the suffix for the kind of a call: one query or several, a past or none."""
    if QUERIES not in sizes:
        return ""
    if sizes[QUERIES] > 1:
        return ", several queries"
    if PAST not in sizes:
        return _SUFFIX_ONE_QUERY
    return A_PAST if sizes[PAST] else NO_PAST


def _kinds_of_calls(axes: Sequence[str]) -> list[str]:
    """Return the suffixes for all kinds of calls, see `kind_of_call`."""
    if QUERIES not in axes:
        return [""]
    single = (A_PAST, NO_PAST) if PAST in axes else (_SUFFIX_ONE_QUERY,)
    return [", several queries", *single]


def pattern_conditions(
    values: Sequence[str], masks: Sequence[str], lengths: Sequence[str], axes: Sequence[str]
) -> list[str]:
    """Return all conditions on patterns."""
    calls, batches = _kinds_of_calls(axes), ("1", "> 1")
    with_past = [call for call in calls if call != NO_PAST]
    names = [f"{name}{call}" for name in (*values, *masks) for call in calls]
    names = [name for name in names if not name.startswith(f"causal_future, {ONE_QUERY}")]
    names += [f"{name}{call}" for name in lengths for call in with_past]
    names.append(SMALLEST)
    if BATCH in axes:
        names += [f"{PLAIN}{call}, batch {size}" for call in calls for size in batches]
        names += [
            f"{name}{call}, batch {size}"
            for name in (*values, *masks)
            if name in _BY_BATCH
            for call in with_past
            # A single query without a past sees its own key alone.
            if call != _SUFFIX_ONE_QUERY or KEYS in axes
            for size in batches
        ]
        names += [f"{name}, batch 1" for name in lengths if name == "empty_and_full"]
    if lengths:
        names += [f"{_LARGE_AND_EMPTY}{call}" for call in with_past]
    if QUERIES in axes and PAST in axes:
        no_past = [name for name in (*values, *masks) if name in _WITHOUT_PAST]
        names += [f"{name}, several queries, no past" for name in no_past]
    return names


def _has_no_effect(pattern: str, sizes: Sizes) -> bool:
    """Return whether a pattern changes nothing at these sizes, or shows nothing."""
    if pattern == "one_visible_element":
        return sizes.get(BATCH) == 1
    return pattern in LENGTH_NAMES and not may_differ_in_length(sizes)


def met_by_patterns(patterns: Sequence[str], sizes: Sizes) -> Iterator[str]:
    """Yield the conditions that patterns meet at these sizes."""
    call, many = kind_of_call(sizes), have_many_keys(sizes)
    batch = "1" if sizes.get(BATCH) == 1 else "> 1"
    may_have_more = sizes.get(QUERIES) != 1 or bool(sizes.get(PAST)) or KEYS in sizes
    few_keys = may_have_more and not many
    # Large logits scale batch elements in four ways: with one query in each, or one key visible to
    # it, only a large batch shows them all.
    few_elements = BATCH in sizes and _level(BATCH, sizes[BATCH]) != "large"
    small_batch = call == A_PAST and few_elements
    if (
        {"empty_and_full", "large_logits"} <= set(patterns)
        and may_differ_in_length(sizes)
        and not few_elements
    ):
        yield f"{_LARGE_AND_EMPTY}{call}"
    for name in patterns:
        if _has_no_effect(name, sizes) or (
            name == "hidden_blocks" and may_have_more and not have_block_keys(sizes)
        ):
            continue
        too_few_keys = few_keys and name in _WITH_MANY_KEYS
        if not too_few_keys and not (small_batch and name == "large_logits"):
            yield f"{name}{call}"
        if name in LENGTH_NAMES:
            yield f"{name}, batch {batch}"
        elif many:
            yield f"{name}{call}, batch {batch}"
        if not sizes.get(PAST):
            yield f"{name}{call}, no past"
    if not patterns and are_smallest(sizes):
        yield SMALLEST
    if not patterns and BATCH in sizes:
        yield f"{PLAIN}{call}, batch {batch}"
