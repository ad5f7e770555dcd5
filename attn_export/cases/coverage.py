"""Greedy choice of cases that meet all conditions together at little cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from attn_export.cases import conditions
from attn_export.cases.blocks import LAST, BlockSizes
from attn_export.cases.draw import Sizes
from attn_export.cases.input_patterns import InputPattern
from attn_export.interface import BATCH, PAST

CASE_COST, LEAST_COST = 2**20, 2**17
"""The cost in bytes that each case has besides its size, since it takes time in every runtime; and
a lower one for when all conditions may be met."""

STEPS = 16
"""The number of steps in such a cost. Sizes are rounded down to steps, so that the first of several
small cases is chosen."""

_LATER = 1 / 32
"""The weight of a condition whose rank is not reached yet: no case meets 32 of them."""

Choice = tuple[dict[str, int], tuple[InputPattern, ...]]
"""The sizes and the patterns of a case."""

Fits = Callable[[Sizes], bool]
"""A function that returns whether the module accepts sizes; axes may be left out, whose sizes are
those of the example."""


class Cover:
    """Greedy choice of cases: each time the one that meets most open conditions for its cost.

    `costs`: The size on disk in bytes of a case with each of `sizes`.
    """

    def __init__(
        self,
        axes: Sequence[str],
        blocks: BlockSizes | None,
        pattern_conditions: Sequence[str],
        sizes: Sequence[dict[str, int]],
        costs: Sequence[int],
        patterns: Sequence[tuple[InputPattern, ...]],
        *,
        bounded: bool = False,
    ) -> None:
        at_blocks = blocks.conditions() if blocks else {}
        ranks = {
            **conditions.size_conditions(axes), **dict.fromkeys(pattern_conditions, 0), **at_blocks,
        }  # fmt: skip
        self._names, self._ranks = list(ranks), np.array(list(ranks.values()))
        self._columns = {name: column for column, name in enumerate(self._names)}
        self._open = np.ones(len(self._names), np.float32)
        self._axes, self._sizes, self._patterns = axes, sizes, patterns
        self._at_blocks = [self._columns[name] for name in at_blocks]
        self._costs, self._accepted = np.array(costs), np.ones(len(costs), np.bool_)
        # Opaque patterns hide faults of sizes, so there is a table for them and one for others.
        self._by_sizes = {
            is_opaque: self._table(
                [
                    *conditions.met_by_sizes(each, axes, is_opaque=is_opaque),
                    *(blocks.met(each) if blocks and not is_opaque else ()),
                ]
                for each in sizes
            )
            for is_opaque in (False, True)
        }
        self._opaque = np.array([any(c.is_opaque for c in each) for each in patterns])
        keys = [_pattern_key(each) for each in sizes]
        firsts = {key: keys.index(key) for key in keys}
        self._keys = np.array([list(firsts).index(key) for key in keys])
        names = [[pattern.name for pattern in each] for each in patterns]
        self._by_patterns = np.stack(
            [
                self._table(conditions.met_by_patterns(each, sizes[first]) for each in names)
                for first in firsts.values()
            ]
        )  # [keys, patterns, conditions]
        self._totals = {
            is_opaque: (_Totals(table), _Totals(self._by_patterns[:, self._opaque == is_opaque]))
            for is_opaque, table in self._by_sizes.items()
        }

        if bounded:
            self._open *= self._possible()
        self.count = int(self._open.sum())

    def _possible(self) -> np.ndarray:
        """Return a mask of the conditions that cases meet whose sizes the module accepts."""
        by_sizes = [table[self._accepted].any(axis=0) for table in self._by_sizes.values()]
        return np.asarray(np.any([*by_sizes, self._by_patterns.any(axis=(0, 1))], axis=0))

    def missed(self, rank: float = math.inf) -> list[str]:
        """Return the conditions up to a rank that no chosen case meets, though some case could."""
        missed = (self._open > 0) & self._possible() & (self._ranks <= rank)
        return [self._names[column] for column in np.flatnonzero(missed)]

    def refused(self) -> list[str]:
        """Return the conditions that no case meets whose sizes the module accepts."""
        return [self._names[i] for i in np.flatnonzero((self._open > 0) & ~self._possible())]

    def choose(
        self, budget: int, most: int, fits: Fits = lambda _: True, *, reserve: int = 0
    ) -> list[Choice]:
        """Return cases, chosen until no affordable case meets another condition.

        `budget`: The largest size in bytes of all cases together.
        `most`: The largest size in bytes of one case.
        `reserve`: The bytes of the budget that are not spent on conditions of the last ranks.
        """
        ranks, before = self._ranks, self._open.copy()
        # Fewer cases meet all conditions without an order of ranks, if they fit.
        if self._least_cost() <= budget:
            unordered = np.where(ranks < LAST, 0, ranks)
            chosen = self._cover(budget, most, fits, unordered, LEAST_COST, reserve)
            if not self.missed(LAST - 1):
                return chosen
            self._open = before
        return self._cover(budget, most, fits, ranks, CASE_COST, reserve)

    def _least_cost(self) -> float:
        """Return a lower bound of the size of all cases that meet the conditions at blocks."""
        table = self._by_sizes[False][:, self._at_blocks]
        cheapest = np.where(table > 0, self._costs[:, None], np.inf).min(axis=0, initial=np.inf)
        return float(cheapest[np.isfinite(cheapest)].sum() / table.sum(axis=1).max(initial=1))

    def _cover(
        self, budget: int, most: int, fits: Fits, ranks: np.ndarray, case_cost: int, reserve: int
    ) -> list[Choice]:
        """Choose cases for one rank after the other, until no case can be added or left out."""
        step = case_cost // STEPS
        weights = case_cost + self._costs // step * step
        chosen: list[tuple[int, int]] = []
        while True:
            before = len(chosen)
            for rank in sorted(set(ranks)):
                while True:
                    wanted = self._open * np.where(ranks <= rank, 1, _LATER).astype(np.float32)
                    left = budget - reserve if rank >= LAST else budget
                    best = self._best(min(left, most), wanted, weights)
                    if best is None:
                        break
                    if self._is_accepted(best[0], fits):
                        self._open[self._met(*best)] = 0
                        budget -= int(self._costs[best[0]])
                        chosen.append(best)
            if len(chosen) == before:
                return [(self._sizes[sizes], self._patterns[each]) for sizes, each in chosen]
            budget += self._drop_needless(chosen)

    def _drop_needless(self, chosen: list[tuple[int, int]]) -> int:
        """Drop cases whose conditions others meet, large ones first; return their cost."""
        counts = np.zeros(len(self._names), int)
        for each in chosen:
            counts += self._met(*each)
        freed = 0
        for each in sorted(chosen, key=lambda each: -self._costs[each[0]]):
            met = self._met(*each)
            if (counts[met] > 1).all():
                counts -= met
                chosen.remove(each)
                freed += int(self._costs[each[0]])
        return freed

    def _is_accepted(self, size_index: int, fits: Fits) -> bool:
        """Return whether the module accepts sizes; if not, drop them and all larger ones."""
        sizes = {axis: self._sizes[size_index][axis] for axis in self._axes}
        usual = all(size <= max(conditions.tried_sizes(axis)) for axis, size in sizes.items())
        if usual or fits(sizes):
            return True
        for index, other in enumerate(self._sizes):
            if all(other[axis] >= size for axis, size in sizes.items()):
                self._accepted[index] = False
        return False

    def _best(self, budget: int, wanted: np.ndarray, weights: np.ndarray) -> tuple[int, int] | None:
        """Return the indices of the sizes and patterns that meet most conditions for their cost.

        `wanted` has the weight of each condition. There are none if no case meets conditions of
        a total weight of 1.
        """
        best, gain = None, 0.0
        for is_opaque, (of_sizes, of_patterns) in self._totals.items():
            allowed = np.flatnonzero(self._opaque == is_opaque)
            if not allowed.size:
                continue
            by_patterns = of_patterns.weighted(wanted)  # [keys, allowed]
            met = of_sizes.weighted(wanted) + by_patterns.max(axis=1)[self._keys]  # [sizes]
            usable = (met >= 1) & self._accepted & (self._costs <= budget)
            gains = np.where(usable, met / weights, 0)
            index = int(np.argmax(gains))
            if gains[index] > gain:
                of_key = by_patterns[self._keys[index]]
                best, gain = (index, int(allowed[np.argmax(of_key)])), float(gains[index])
        return best

    def _met(self, size_index: int, pattern_index: int) -> np.ndarray:
        """Return a mask of the conditions that a case meets, `[conditions]`."""
        by_sizes = self._by_sizes[bool(self._opaque[pattern_index])][size_index]
        by_patterns = self._by_patterns[self._keys[size_index], pattern_index]
        return np.asarray((by_sizes + by_patterns) > 0)

    def _table(self, met: Iterable[Iterable[str]]) -> np.ndarray:
        """Return 1 for each condition that is in a set, else 0: float32 `[sets, conditions]`."""
        columns = self._columns
        rows = [[columns[name] for name in names if name in columns] for names in met]
        table = np.zeros((len(rows), len(self._names)), np.float32)
        for row, ones in zip(table, rows, strict=True):
            row[ones] = 1
        return table


class _Totals:
    """The total weight of the conditions that each entry of a table meets.

    Few weights change from one choice to the next, and all are multiples of `_LATER`: sums of
    their changes are exact.
    """

    def __init__(self, table: np.ndarray) -> None:
        *shape, count = table.shape
        self._columns = np.ascontiguousarray(table.reshape(-1, count).T)
        self._weights = np.zeros(count, np.float32)
        self._totals = np.zeros(shape, np.float32)

    def weighted(self, weights: np.ndarray) -> np.ndarray:
        """Return `table @ weights`."""
        changes = weights - self._weights
        changed = np.flatnonzero(changes)
        self._totals += (changes[changed] @ self._columns[changed]).reshape(self._totals.shape)
        self._weights = weights
        return self._totals


def _pattern_key(sizes: Sizes) -> tuple[object, ...]:
    """Return a key: sizes with equal keys meet the same conditions on patterns."""
    return (
        conditions.kind_of_call(sizes),
        sizes.get(BATCH) == 1,
        sizes.get(BATCH, 0) >= conditions.LEVELS[BATCH]["large"][0],
        conditions.have_many_keys(sizes),
        conditions.have_block_keys(sizes),
        conditions.may_differ_in_length(sizes),
        conditions.are_smallest(sizes),
        sizes.get(PAST) == 0,
    )
