"""Greedy choice of cases that meet all conditions together at little cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from attn_export.parity import conditions
from attn_export.parity.contents import Content
from attn_export.parity.draw import Sizes

CASE_COST, STEP_COST = 2**19, 2**18
"""The cost in bytes that each case has besides its size, since it takes time in every runtime; and
the step to which its size is rounded down, so that the first of several small cases is chosen."""

Choice = tuple[dict[str, int], tuple[Content, ...]]
"""The sizes and the contents of a case."""


class Cover:
    """Greedy choice of cases: each time the one that meets most open conditions for its cost.

    Args:
        axes: The axes whose size is free.
        content_conditions: The conditions on contents; those on the sizes of `axes` are added.
        sizes: The sizes that a case may have; of equally good ones the first is chosen.
        costs: The size on disk in bytes of a case with each of `sizes`.
        contents: The combinations of contents that a case may have.
        bounded: Whether axes have bounds. Then conditions that no candidate meets do not count.

    Attributes:
        count: The number of conditions.
    """

    def __init__(
        self,
        axes: Sequence[str],
        content_conditions: Sequence[str],
        sizes: Sequence[dict[str, int]],
        costs: Sequence[int],
        contents: Sequence[tuple[Content, ...]],
        *,
        bounded: bool = False,
    ) -> None:
        self._names = [*conditions.size_conditions(axes), *content_conditions]
        self._columns = {name: column for column, name in enumerate(self._names)}
        self._open = np.ones(len(self._names), np.float32)
        self._sizes, self._contents = sizes, contents
        self._costs = np.array(costs)
        self._weights = CASE_COST + self._costs // STEP_COST * STEP_COST
        # Opaque contents hide faults of sizes, so there is a table for them and one for others.
        self._by_sizes = {
            is_opaque: self._table(
                conditions.met_by_sizes(each, axes, is_opaque=is_opaque) for each in sizes
            )
            for is_opaque in (False, True)
        }
        self._opaque = np.array([any(c.is_opaque for c in each) for each in contents])
        self._sizes_by_key: dict[tuple[object, ...], list[int]] = {}
        for index, each in enumerate(sizes):
            self._sizes_by_key.setdefault(_content_key(each), []).append(index)
        names = [[content.name for content in each] for each in contents]
        self._by_contents = {
            key: self._table(conditions.met_by_contents(each, sizes[first]) for each in names)
            for key, (first, *_) in self._sizes_by_key.items()
        }

        if bounded:
            tables = (*self._by_sizes.values(), *self._by_contents.values())
            self._open *= np.any([table.any(axis=0) for table in tables], axis=0)
        self.count = int(self._open.sum())

    @property
    def missed(self) -> list[str]:
        """The conditions that no chosen case meets."""
        return [name for name, is_open in zip(self._names, self._open, strict=True) if is_open]

    def choose(self, budget: int, most: int) -> list[Choice]:
        """Return cases, chosen until no affordable case meets another condition.

        Args:
            budget: The largest size in bytes of all cases together.
            most: The largest size in bytes of one case.
        """
        choices: list[Choice] = []
        while True:
            best = self._best(min(budget, most))
            if best is None:
                return choices
            size_index, content_index = best
            self._open[self._met(size_index, content_index)] = 0
            budget -= int(self._costs[size_index])
            choices.append((self._sizes[size_index], self._contents[content_index]))

    def _best(self, budget: int) -> tuple[int, int] | None:
        """Return the indices of the sizes and contents that meet most conditions for their cost."""
        best, gain = None, 0.0
        by_contents = {key: table @ self._open for key, table in self._by_contents.items()}
        for is_opaque, table in self._by_sizes.items():
            allowed = np.flatnonzero(self._opaque == is_opaque)
            by_sizes = table @ self._open
            for key, indices in self._sizes_by_key.items() if allowed.size else ():
                content_index = int(allowed[np.argmax(by_contents[key][allowed])])
                met = by_sizes[indices] + by_contents[key][content_index]
                gains = met / self._weights[indices]
                gains[self._costs[indices] > budget] = 0
                largest = int(np.argmax(gains))
                if gains[largest] > gain:
                    best, gain = (indices[largest], content_index), float(gains[largest])
        return best

    def _met(self, size_index: int, content_index: int) -> np.ndarray:
        """Return a mask of the conditions that a case meets, `[conditions]`."""
        by_sizes = self._by_sizes[bool(self._opaque[content_index])][size_index]
        key = _content_key(self._sizes[size_index])
        return np.asarray((by_sizes + self._by_contents[key][content_index]) > 0)

    def _table(self, met: Iterable[Iterable[str]]) -> np.ndarray:
        """Return 1 for each condition that is in a set, else 0: float32 `[sets, conditions]`."""
        columns = self._columns
        rows = [[columns[name] for name in names if name in columns] for names in met]
        table = np.zeros((len(rows), len(self._names)), np.float32)
        for row, ones in zip(table, rows, strict=True):
            row[ones] = 1
        return table


def _content_key(sizes: Sizes) -> tuple[object, ...]:
    """Return a key: sizes with equal keys meet the same conditions on contents."""
    return (
        conditions.call_pattern(sizes),
        sizes.get(conditions.BATCH) == 1,
        sizes.get(conditions.BATCH, 0) >= conditions.LEVELS[conditions.BATCH]["large"][0],
        conditions.have_many_keys(sizes),
        conditions.may_differ_in_length(sizes),
        conditions.are_smallest(sizes),
        sizes.get(conditions.PAST) == 0,
    )
