"""A greedy cover: the cases that meet all conditions together, at little cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from attn_export.parity import conditions
from attn_export.parity.contents import Content
from attn_export.parity.draw import Sizes

CASE_COST, STEP_COST = 2**19, 2**18
"""The cost of a case besides its bytes, in bytes, and the step to which its bytes are rounded
down: each takes time in every runtime, and of small ones, which cost the same, the first wins."""

Choice = tuple[dict[str, int], tuple[Content, ...]]
"""The sizes and the contents of a case."""


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The cases that may be chosen: any sizes with any contents.

    Attributes:
        sizes: The sizes that a case may have; the first of equals is chosen.
        costs: The bytes of each on disk.
        contents: The contents that a case may have together.
    """

    sizes: Sequence[dict[str, int]]
    costs: Sequence[int]
    contents: Sequence[tuple[Content, ...]]


class Cover:
    """Greedy choice of cases: each time the one that meets most unmet conditions.

    Args:
        axes: The axes that can be chosen.
        wanted: The conditions on contents; those on the sizes of `axes` are added.
        candidates: The cases that may be chosen.
        bounded: Whether axes have bounds: what no candidate meets is no condition then.
    """

    def __init__(
        self,
        axes: Sequence[str],
        wanted: Sequence[str],
        candidates: Candidates,
        *,
        bounded: bool = False,
    ) -> None:
        self._names = [*conditions.size_conditions(axes), *wanted]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._open = np.ones(len(self._names), np.float32)
        self._candidates = candidates
        sizes, contents = candidates.sizes, candidates.contents
        self._costs = np.array(candidates.costs)
        self._weights = CASE_COST + self._costs // STEP_COST * STEP_COST
        # Opaque contents hide faults of sizes: the tables are for plain ones and for opaque ones.
        self._by_sizes = {
            False: self._table(conditions.met_by_sizes(each, axes) for each in sizes),
            True: self._table(conditions.met_whatever_the_contents(each, axes) for each in sizes),
        }
        opaque = np.array([any(c.is_opaque for c in each) for each in contents])
        self._numbers = {which: np.flatnonzero(opaque == which) for which in (False, True)}
        self._opaque = opaque
        self._kinds: dict[tuple[object, ...], list[int]] = {}
        for index, each in enumerate(sizes):
            self._kinds.setdefault(_content_key(each), []).append(index)
        names = [[content.name for content in each] for each in contents]
        self._by_contents = {
            kind: self._table(conditions.met_by_contents(each, sizes[first]) for each in names)
            for kind, (first, *_) in self._kinds.items()
        }

        if bounded:
            tables = (*self._by_sizes.values(), *self._by_contents.values())
            self._open *= np.any([table.any(axis=0) for table in tables], axis=0)
        self._wanted = int(self._open.sum())

    @property
    def wanted(self) -> int:
        """The number of conditions."""
        return self._wanted

    @property
    def missed(self) -> list[str]:
        """The conditions that no chosen case meets."""
        return [name for name, left in zip(self._names, self._open, strict=True) if left]

    def chosen(self, budget: int, most: int) -> list[Choice]:
        """Return the sizes and contents of each case.

        Args:
            budget: The bytes that they may take together.
            most: The bytes that one may take.
        """
        found: list[Choice] = []
        while True:
            best = self._best(min(budget, most))
            if best is None:
                return found
            index, number = best
            self._open[self._met(index, number)] = 0
            budget -= int(self._costs[index])
            found.append((self._candidates.sizes[index], self._candidates.contents[number]))

    def _best(self, budget: int) -> tuple[int, int] | None:
        """Return the sizes and contents that meet most open conditions for their cost."""
        best, gain = None, 0.0
        more = {kind: table @ self._open for kind, table in self._by_contents.items()}
        for which, table in self._by_sizes.items():
            numbers = self._numbers[which]
            met = table @ self._open
            for kind, indices in self._kinds.items() if numbers.size else ():
                number = int(numbers[np.argmax(more[kind][numbers])])
                total = (met[indices] + more[kind][number]) / self._weights[indices]
                total[self._costs[indices] > budget] = 0
                place = int(np.argmax(total))
                if total[place] > gain:
                    best, gain = (indices[place], number), float(total[place])
        return best

    def _met(self, index: int, number: int) -> np.ndarray:
        by_sizes = self._by_sizes[bool(self._opaque[number])][index]
        kind = _content_key(self._candidates.sizes[index])
        return np.asarray((by_sizes + self._by_contents[kind][number]) > 0)

    def _table(self, rows: Iterable[Iterable[str]]) -> np.ndarray:
        """Return for each row which conditions it meets: 1 or 0."""
        places: Mapping[str, int] = self._places
        found = [[places[name] for name in row if name in places] for row in rows]
        table = np.zeros((len(found), len(self._names)), np.float32)
        for row, met in zip(table, found, strict=True):
            row[met] = 1
        return table


def _content_key(sizes: Sizes) -> tuple[object, ...]:
    """Return a key: sizes with equal keys meet the same conditions on contents."""
    return (
        conditions.form_of(sizes),
        sizes.get(conditions.BATCH) == 1,
        sizes.get(conditions.BATCH, 0) >= conditions.LEVELS[conditions.BATCH]["large"][0],
        conditions.have_many_keys(sizes),
        conditions.may_differ_in_length(sizes),
        conditions.are_smallest(sizes),
        sizes.get(conditions.PAST) == 0,
    )
