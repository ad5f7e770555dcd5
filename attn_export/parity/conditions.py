"""The conditions that the cases of a subject must meet together, so that each kind of fault shows.

A fault shows only where something is large or small, one or several, padded or masked. Each such
condition is a short text; `docs/parity.md` lists them with the faults that they are for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from attn_export.parity.draw import Sizes

BATCH, QUERIES, PAST, KEYS = "batch", "query_len", "past_len", "key_len"

LEVELS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    BATCH: {"small": (1, 2), "middle": (3, 6), "large": (7, math.inf)},
    PAST: {"small": (0, 3), "middle": (4, 15), "large": (16, math.inf)},
    "": {"small": (1, 3), "middle": (4, 15), "large": (16, math.inf)},
}
"""Ranges of small, middle and large sizes by axis; "" for all other axes."""

VALUES = {
    BATCH: (1, 2, 3, 4, 5, 7, 8, 9, 17),
    PAST: (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33),
    "": (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 49),
}
"""The sizes that are tried: powers of 2, their neighbours, and primes."""

BLOCKS: Mapping[int, int] = {64: 65, 128: 127, 256: 257, 512: 513, 1024: 1026}
"""The sizes of blocks in which kernels work, and the size next to each that is tried."""

KNOWN = (BATCH, QUERIES, PAST, KEYS)

PLAIN = "random inputs"
SMALLEST = f"{PLAIN}, smallest sizes"
ONE_QUERY = "one query"
ALONE = f", {ONE_QUERY}"
A_PAST, NO_PAST = f"{ALONE}, a past", f"{ALONE}, no past"
MANY_KEYS = 16
WITH_MANY_KEYS = frozenset({
    "fully_masked_rows", "large_logits", "left_padding", "one_visible_key", "outliers",
    "right_padding", "tiny_values",
})  # fmt: skip
"""Contents that count with `MANY_KEYS` keys only: among few, no two large scores are close."""

BY_BATCH = (
    "fully_masked_rows", "large_logits", "left_padding", "lowest_float", "one_visible_key",
)  # fmt: skip
"""Contents that are tried with a batch of one row as well: graphs branch there."""

WITHOUT_PAST = ("large_logits", "one_visible_key", "outliers")
"""Contents that are tried with several queries without a past as well: graphs branch there."""

LOUD_AND_EMPTY = "large_logits in empty rows"
"""Large logits in a row that sees its own key alone: a score below any finite stand-in for -inf."""

LENGTHS = frozenset({"beyond_length", "empty_and_full"})
"""Contents that change nothing without a past of at least 2."""


def free_axes(names: Sequence[str], sums: Sequence[str]) -> list[str]:
    """Return the axes that can be chosen, those that are known first.

    Args:
        names: Names of the dynamic axes.
        sums: The axes that are sums of others.
    """
    free = [name for name in names if name not in sums]
    return [n for n in KNOWN if n in free] + sorted(n for n in free if n not in KNOWN)


def values_of(axis: str) -> tuple[int, ...]:
    """Return the sizes of an axis that are tried."""
    return VALUES.get(axis, VALUES[""])


def blocks_of(axis: str) -> Mapping[int, int]:
    """Return the blocks that are tried along an axis, and the size that is tried for each."""
    return {} if axis in (BATCH, PAST) else BLOCKS


def beside_block(axis: str, block: int) -> int:
    """Return the size of this axis in a case where another axis is next to a block size.

    There are several keys, since softmax over one key is constant. The past is empty beside the
    small block sizes.

    Args:
        axis: The name of the axis.
        block: The size of a block.
    """
    if axis == PAST:
        return 0 if block in (128, 256) else 3
    return 5 if axis == KEYS else 1


def corners(axes: Sequence[str]) -> list[dict[str, int]]:
    """Return the sizes in which each axis has its least or its largest size, without blocks.

    A fault from some size on, or up to one, of any axes at once shows there.
    """
    if not set(axes) <= set(KNOWN):
        return []
    ends = [(2 if axis == KEYS else min(values_of(axis)), max(values_of(axis))) for axis in axes]
    return [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*ends)]


# -- sizes ---------------------------------------------------------------------------------------


def size_conditions(axes: Sequence[str]) -> list[str]:
    """Return all conditions on the sizes of these axes."""
    found = [f"{axis} {value}" for axis in axes for value in values_of(axis)]
    found += [
        f"{level} {one}, {more} {other}"
        for one, other in itertools.combinations(axes, 2)
        for level, more in itertools.product(_levels(one), _levels(other))
    ]
    found += [f"{axis} near {block}" for axis in axes for block in blocks_of(axis)]
    found += [_shown(corner) for corner in corners(axes)]
    if QUERIES in axes:
        # Graphs for one query are run in no other case.
        others = [axis for axis in axes if axis != QUERIES]
        found += [f"{ONE_QUERY}, {condition}" for condition in size_conditions(others)]
        if PAST in axes:
            found += [f"{ONE_QUERY}, {block} keys" for block in BLOCKS]
    return found


def met_by_sizes(sizes: Sizes, axes: Sequence[str]) -> Iterator[str]:
    """Yield the conditions that these sizes meet.

    Args:
        sizes: Sizes of the axes, by name.
        axes: The axes that can be chosen.
    """
    for axis in axes:
        yield f"{axis} {sizes[axis]}"
        yield from (f"{axis} near {block}" for block in _blocks_near(sizes[axis]))
    for one, other in itertools.combinations(axes, 2):
        yield f"{_level(one, sizes[one])} {one}, {_level(other, sizes[other])} {other}"
    yield _shown({axis: sizes[axis] for axis in axes})
    if sizes.get(QUERIES) == 1 and QUERIES in axes:
        others = [axis for axis in axes if axis != QUERIES]
        yield from (f"{ONE_QUERY}, {condition}" for condition in met_by_sizes(sizes, others))
        keys = _blocks_near(keys_of(sizes) or 0)
        yield from (f"{ONE_QUERY}, {block} keys" for block in keys)


def met_whatever_the_contents(sizes: Sizes, axes: Sequence[str]) -> Iterator[str]:
    """Yield the conditions on sizes that opaque contents meet as well: single values.

    Args:
        sizes: Sizes of the axes, by name.
        axes: The axes that can be chosen.
    """
    for axis in axes:
        yield f"{axis} {sizes[axis]}"
        if sizes.get(QUERIES) == 1 and axis != QUERIES:
            yield f"{ONE_QUERY}, {axis} {sizes[axis]}"


def _blocks_near(size: int) -> Iterator[int]:
    return (block for block, near in BLOCKS.items() if abs(size - near) <= 2)


def _shown(sizes: Sizes) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items()) + " together"


def keys_of(sizes: Sizes) -> int | None:
    """Return the number of keys, if the axes define it."""
    if KEYS in sizes:
        return sizes[KEYS]
    if QUERIES in sizes:
        return sizes[QUERIES] + sizes.get(PAST, 0)
    return None


def have_many_keys(sizes: Sizes) -> bool:
    """Return whether there are many keys, or no axis defines their number."""
    keys = keys_of(sizes)
    return keys is None or keys >= MANY_KEYS


def are_smallest(sizes: Sizes) -> bool:
    """Return whether no size is more than 1."""
    return max(sizes.values(), default=1) == 1


def may_differ_in_length(sizes: Sizes) -> bool:
    """Return whether rows of a cache in place may have different lengths."""
    return sizes.get(PAST, 0) >= 2


def _levels(axis: str) -> Mapping[str, tuple[float, float]]:
    return LEVELS.get(axis, LEVELS[""])


def _level(axis: str, size: int) -> str:
    return next(name for name, (low, high) in _levels(axis).items() if low <= size <= high)


# -- contents ------------------------------------------------------------------------------------


def form_of(sizes: Sizes) -> str:
    """Return the form of a call: one query or several, with a past or without."""
    if QUERIES not in sizes:
        return ""
    if sizes[QUERIES] > 1:
        return ", several queries"
    if PAST not in sizes:
        return ALONE
    return A_PAST if sizes[PAST] else NO_PAST


def forms(axes: Sequence[str]) -> list[str]:
    """Return all forms of a call."""
    if QUERIES not in axes:
        return [""]
    single = (A_PAST, NO_PAST) if PAST in axes else (ALONE,)
    return [", several queries", *single]


def content_conditions(
    values: Sequence[str], masks: Sequence[str], lengths: Sequence[str], axes: Sequence[str]
) -> list[str]:
    """Return all conditions on contents.

    Args:
        values: The names of the contents that change values.
        masks: Those that change masks.
        lengths: Those that change the lengths of a cache in place.
        axes: The axes that can be chosen.
    """
    found = [f"{name}{form}" for name in (*values, *masks) for form in forms(axes)]
    found = [each for each in found if not each.startswith(f"causal_future, {ONE_QUERY}")]
    found += [f"{name}{form}" for name in lengths for form in forms(axes) if form != NO_PAST]
    found.append(SMALLEST)
    if BATCH in axes:
        found += [f"{PLAIN}{form}, batch {size}" for form in forms(axes) for size in ("1", "> 1")]
        by_batch = [name for name in (*values, *masks) if name in BY_BATCH]
        found += [
            f"{name}{form}, batch {size}"
            for name in by_batch
            for form in forms(axes)
            for size in ("1", "> 1")
            # One query without a past sees itself alone.
            if form != NO_PAST and (form != ALONE or KEYS in axes)
        ]
        found += [f"{name}, batch 1" for name in lengths if name == "empty_and_full"]
    if lengths:
        found += [f"{LOUD_AND_EMPTY}{form}" for form in forms(axes) if form != NO_PAST]
    if QUERIES in axes and PAST in axes:
        no_past = [name for name in (*values, *masks) if name in WITHOUT_PAST]
        found += [f"{name}, several queries, no past" for name in no_past]
    return found


def met_by_contents(contents: Sequence[str], sizes: Sizes) -> Iterator[str]:
    """Yield the conditions that contents meet at these sizes.

    Args:
        contents: The names of the contents.
        sizes: Sizes of the axes, by name.
    """
    form, many = form_of(sizes), have_many_keys(sizes)
    may_have_more = sizes.get(QUERIES) != 1 or bool(sizes.get(PAST)) or KEYS in sizes
    few = may_have_more and not many
    # Rows of a batch are scaled in four ways: with one query each, only a large batch is enough.
    few_rows = form == A_PAST and BATCH in sizes and _level(BATCH, sizes[BATCH]) != "large"
    if (
        {"empty_and_full", "large_logits"} <= set(contents)
        and may_differ_in_length(sizes)
        and not few_rows
    ):
        yield f"{LOUD_AND_EMPTY}{form}"
    for name in contents:
        if name in LENGTHS and not may_differ_in_length(sizes):
            continue
        if not (few and name in WITH_MANY_KEYS) and not (few_rows and name == "large_logits"):
            yield f"{name}{form}"
        batch = "1" if sizes.get(BATCH) == 1 else "> 1"
        if name in LENGTHS:
            yield f"{name}, batch {batch}"
        elif many:
            yield f"{name}{form}, batch {batch}"
        if not sizes.get(PAST):
            yield f"{name}{form}, no past"
    if not contents and are_smallest(sizes):
        yield SMALLEST
    if not contents and BATCH in sizes:
        yield f"{PLAIN}{form}, batch {'1' if sizes[BATCH] == 1 else '> 1'}"
