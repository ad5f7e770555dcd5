"""Axes of a foreign graph that must be equal, or be sums of others, for the graph to run.

A file does not state, for example, that the last axis of the mask is past plus new keys. Exporters
may also give each axis a name of its own, although several must be equal.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Misfit:
    """Shapes of which some sizes do not fit each other.

    Attributes:
        reached: The number of nodes that were computed before.
        shapes: The shapes.
    """

    reached: int
    shapes: Sequence[Sequence[int]]


Attempt = Callable[[Mapping[str, int]], Misfit | None]
"""Function that runs a graph at the sizes of all axes; None if it runs."""

MOST_ATTEMPTS = 150
"""The largest number of runs of a graph."""


def find_relations(
    axes: Sequence[str], known: Mapping[str, str], fixed: Collection[int], attempt: Attempt
) -> dict[str, str] | None:
    """Return the axes that equal others or sums of them; None if the graph runs with none.

    The graph runs at sizes of which each tells its axis or sum. Where a node does not take its
    operands, two of their sizes must be equal.
    """
    relations, attempts = dict(known), 1
    misfit = attempt(_sizes(axes, relations, fixed))
    while misfit is not None:
        for more in _combined(_equalities(misfit, axes, relations, fixed)):
            changed, attempts = _joined(relations, more), attempts + 1
            if attempts > MOST_ATTEMPTS:
                return None
            after = attempt(_sizes(axes, changed, fixed))
            if after is None or after.reached > misfit.reached:
                relations, misfit = changed, after
                break
        else:
            return None
    return relations


def _free(axes: Sequence[str], relations: Mapping[str, str]) -> dict[str, int]:
    return {axis: number for number, axis in enumerate(axes) if axis not in relations}


def _distinct(free: Collection[str], fixed: Collection[int]) -> dict[str, int]:
    """Return sizes of which no two sums of up to two, or a size plus 1, are equal."""
    sizes: dict[str, int] = {}
    seen: set[int] = {0, 1, 2, *fixed}
    size = 3
    for axis in free:
        while True:
            new = [size, size + 1, *(size + other for other in sizes.values())]
            if not seen & {*new} and len({*new}) == len(new):
                break
            size += 1
        seen |= {*new, 2 * size}
        sizes[axis] = size
        size += 1
    return sizes


def _sizes(
    axes: Sequence[str], relations: Mapping[str, str], fixed: Collection[int]
) -> dict[str, int]:
    sizes = _distinct(_free(axes, relations), fixed)
    of_relations = {
        axis: sum(int(term) if term.isdigit() else sizes.get(term, 1) for term in terms_of(text))
        for axis, text in relations.items()
    }
    return {**sizes, **of_relations}


def terms_of(text: str) -> list[str]:
    """Return the terms of a sum of axes and whole numbers."""
    return [term.strip() for term in text.split("+")]


def _equalities(
    misfit: Misfit, axes: Sequence[str], relations: Mapping[str, str], fixed: Collection[int]
) -> list[dict[str, str]]:
    """Return the relations that make a size of one shape equal to one of another shape."""
    order = _free(axes, relations)
    sizes = _distinct(order, fixed)
    sums = {size + 1: [axis, "1"] for axis, size in sizes.items()} | {
        a + b: [one, other]
        for (one, a), (other, b) in itertools.combinations_with_replacement(sizes.items(), 2)
    }
    sums |= {size: [axis] for axis, size in sizes.items()}
    found: dict[tuple[str, str], None] = {}
    for one, other in itertools.permutations(misfit.shapes, 2):
        for size, equal in itertools.product(one, other):
            if size == equal or size not in sums or equal not in sums:
                continue
            # Of past + new = other + new, it is the past that equals the other.
            left, right = list(sums[size]), list(sums[equal])
            for term in sums[size]:
                if term in right:
                    left.remove(term)
                    right.remove(term)
            is_first = len(right) == 1 and order.get(right[0], -1) > order.get("".join(left), -1)
            if len(left) == 1 and left[0] in order and right and not is_first:
                found[left[0], " + ".join(right)] = None
    return [{axis: text} for axis, text in found]


def _combined(equalities: Sequence[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield each relation alone, then each two: operands may differ in two axes."""
    yield from equalities
    for one, other in itertools.combinations(equalities, 2):
        terms = {term for text in (*one.values(), *other.values()) for term in terms_of(text)}
        if one.keys() != other.keys() and not terms & (one.keys() | other.keys()):
            yield {**one, **other}


def _joined(relations: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return all relations, with the terms that are relations now replaced by theirs."""
    return {
        axis: " + ".join(more.get(term, term) for term in terms_of(text))
        for axis, text in relations.items()
    } | dict(more)
