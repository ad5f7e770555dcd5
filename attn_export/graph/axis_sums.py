"""Axes of a graph that are sums of others, found by trying."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

Runs = Callable[[Mapping[str, int]], bool]

MOST_TRIES = 150


def find_sums(axes: Sequence[str], known: Mapping[str, str], runs: Runs) -> dict[str, str] | None:
    """Return the axes that have to be sums of others for a graph to run; None if none are found.

    A file names its axes and does not say that the mask has one for each key, past included.

    Args:
        axes: The names of all dynamic axes.
        known: The sums that are known.
        runs: Whether the graph runs at some sizes of all axes.
    """
    for more in itertools.islice(_candidates([a for a in axes if a not in known]), MOST_TRIES):
        sums = {**known, **more}
        if runs(_sizes(axes, sums)):
            return sums
    return None


def _sizes(axes: Sequence[str], sums: Mapping[str, str]) -> dict[str, int]:
    # Sizes of which no two have a third as their sum.
    sizes = {axis: 3 + 7 * number for number, axis in enumerate(a for a in axes if a not in sums)}
    for axis, terms in sums.items():
        sizes[axis] = sum(int(t) if t.isdigit() else sizes.get(t, 1) for t in terms.split(" + "))
    return sizes


def _candidates(axes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield no sum, then every single one, then every two."""
    single = [
        {axis: terms}
        for axis in reversed(axes)
        for terms in _terms([other for other in axes if other != axis])
    ]
    yield {}
    yield from single
    for one, other in itertools.combinations(single, 2):
        used = " + ".join((*one.values(), *other.values())).split(" + ")
        if one.keys() != other.keys() and not set(used) & (one.keys() | other.keys()):
            yield {**one, **other}


def _terms(axes: Sequence[str]) -> Iterator[str]:
    yield from axes
    yield from (" + ".join(pair) for pair in itertools.combinations(axes, 2))
    yield from (f"{axis} + 1" for axis in axes)
