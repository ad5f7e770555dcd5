"""What the cases that fail have in common, and where in an output the error sits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

Array = np.ndarray
Sizes = Mapping[str, int]

LARGE = 0.1
"""Of the largest error of an output: what counts as wrong too."""

TELLING: tuple[tuple[str, Callable[[Sizes], bool]], ...] = (
    ("with a batch of more than 1", lambda s: s.get("batch", 1) > 1),
    ("with a batch of 1", lambda s: s.get("batch", 1) == 1),
    ("with a past", lambda s: s.get("past_len", 0) > 0),
    ("without a past", lambda s: s.get("past_len", 0) == 0),
    ("with one query", lambda s: s.get("query_len", 0) == 1),
    ("with several queries", lambda s: s.get("query_len", 0) > 1),
    (
        "with a past and several queries",
        lambda s: s.get("past_len", 0) > 0 and s.get("query_len", 0) > 1,
    ),
)
"""Conditions on the sizes of a case that faults depend on."""


def in_common(failed: Mapping[str, Sizes], passed: Mapping[str, Sizes]) -> Iterator[str]:
    """Sentences on which cases fail, from the sizes of those that do and those that do not."""
    total = len(failed) + len(passed)
    yield (
        f"{len(failed)} of {total} cases fail"
        if passed or total == 1
        else f"all {total} cases fail"
    )
    for says, holds in TELLING:
        if passed and failed and all(map(holds, failed.values())):
            others = sum(map(holds, passed.values()))
            if not others:
                yield f"the cases that fail are those {says}"
            elif others < len(passed):
                yield f"all cases that fail are {says}; {others} of these pass"


def where_in(
    case: str,
    right: Mapping[str, Array],
    actual: Mapping[str, Array],
    axes: Mapping[str, Sequence[object]],
    wrong: Collection[str],
) -> Iterator[str]:
    """Sentences on where the error sits in the outputs of one case.

    Args:
        case: Its name.
        right: Outputs, by name.
        actual: What came out.
        axes: The names of each output's axes.
        wrong: The outputs to look at.
    """
    for name, truth in right.items():
        got = actual.get(name)
        if name not in wrong or got is None or got.shape != truth.shape or not truth.size:
            continue
        with np.errstate(invalid="ignore"):
            distance = np.abs(got.astype(np.float64) - truth)
        distance = np.nan_to_num(distance, nan=np.inf)
        found = distance >= LARGE * distance.max()
        nan = int((np.isnan(got) & ~np.isnan(truth)).sum()) if got.dtype.kind == "f" else 0
        said = f"; {nan} are NaN" if nan else ""
        yield f"{name} in {case}: {_places(found, axes.get(name, ()))}{said}"


def _places(wrong: Array, axes: Sequence[object]) -> str:
    """Which part of each axis is concerned."""
    parts = []
    for axis, size in enumerate(wrong.shape):
        others = tuple(i for i in range(wrong.ndim) if i != axis)
        at = np.flatnonzero(wrong.any(axis=others))
        name = axes[axis] if axis < len(axes) else axis
        if isinstance(name, int) and axis == wrong.ndim - 1:
            continue  # elements of a head mean nothing to a reader
        if size > 1 and len(at) < size:
            label = name if isinstance(name, str) else f"axis {axis}:"
            parts.append(f"{label} {_ranges(at)} of {size}")
    share = f"{int(wrong.sum())} of {wrong.size} elements"
    return f"{share}; {', '.join(parts)}" if parts else f"{share}, all over it"


def _ranges(indices: Array) -> str:
    """``0, 2-5`` for 0, 2, 3, 4, 5."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    shown = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:4]]
    return ", ".join(shown) + (", …" if len(runs) > 4 else "")
