"""Sizes at the blocks in which kernels work: a block, one less and one more, along each axis.

Kernels have paths for whole blocks, for the rest after them, and for one query. So each size is
tried in each kind of call: a kind is the set of axes that are larger than their least size. Of a
layer with a cache these are runs without a past, decodes of one query, and chunks after a past.
Each is tried with several sequences, since graphs mix up batch elements at some lengths only, and
blocks with one, which graphs branch on. From the third on, elements may be wrong alone, so there
are three, and two where three sequences of many queries would take too long.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from attn_export.cases.draw import Bounds, Sizes
from attn_export.interface import BATCH, KEYS, PAST, QUERIES, axes_in, size_of

BLOCKS: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
"""Block sizes of kernels."""

BATCHES = (1, 2, 3, 8, 16, 17)
"""Batch sizes to try in each kind of call."""

_LARGE_BATCHES = (32, 33, 64)
"""Batch sizes to try in one kind of call, with the least sizes that it has."""

_FEW_QUERIES, _MANY_QUERIES, _MOST_QUERIES = 33, 256, 512
"""The largest number of queries to try always after a past, with one sequence alone, and with
three."""

FAR_CALLS: tuple[tuple[int, int], ...] = ((1040, 3), (2047, 1), (2047, 3), (4096, 1), (4096, 3))
"""Long pasts, each with a number of queries. All keys, or the past alone, are a larger block."""

Sequences = Literal["one sequence", "several sequences", "three sequences"]

LAST = 4
"""The lowest of the ranks of conditions that are met last, see `BlockSizes.conditions`."""

Kind = frozenset[str]
"""The axes that are larger than their least size in a call."""


def near_blocks() -> dict[int, int]:
    """Return the sizes to try, with their distance from a block: 0 or 1."""
    return {block + step: abs(step) for block in BLOCKS for step in (0, -1, 1)}


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Conditions on sizes at blocks, and sizes that meet them.

    Attributes:
        sums: The axes that are sums of others, with their terms.
    """

    axes: Sequence[str]
    sums: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bounds: Bounds = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def _least(self) -> dict[str, int]:
        """The least size of each axis but the batch. Softmax over one key is constant."""
        least = {axis: int(axis != PAST) for axis in self.axes if axis != BATCH}
        return {
            axis: self.bounds[axis][0] if axis in self.bounds and axis != KEYS else size
            for axis, size in least.items()
        }

    @functools.cached_property
    def _kinds(self) -> list[Kind]:
        """The kinds of calls to try: one axis is larger than its least size, or all are."""
        always = {KEYS} & self._least.keys()
        kinds = [frozenset({axis, *always}) for axis in self._least]
        return list(dict.fromkeys([*kinds, frozenset(self._least)]))

    def _kind(self, sizes: Sizes) -> Kind:
        return frozenset(axis for axis, least in self._least.items() if sizes[axis] > least)

    def _axes_of(self, kind: Kind) -> list[str]:
        """Return the axes to try at blocks in a kind of call."""
        return [*(axis for axis in self._least if axis in kind), *self.sums]

    def conditions(self) -> dict[str, int]:
        """Return all conditions, each with its rank: those of a lower rank are met first.

        Blocks come before the sizes next to them, several sequences before one, and calls in which
        one axis is larger than its least size before others.
        """
        ranks: dict[str, int] = {}
        for kind in self._kinds:
            late = int(len(kind - {KEYS}) > 1)
            for axis in self._axes_of(kind):
                for size, distance in near_blocks().items():
                    for sequences in self._sequences(axis, size, kind):
                        rank = 1 + late + (distance or sequences == "one sequence")
                        if self._is_costly(axis, size, kind):
                            rank = LAST
                        if sequences == "three sequences" and (
                            rank == LAST or size > _MOST_QUERIES
                        ):
                            rank = LAST + 1
                        ranks[self._condition(axis, size, kind, sequences)] = rank
            if BATCH in self.axes:
                ranks |= {self._condition(BATCH, size, kind): 1 for size in BATCHES}
        if BATCH in self.axes:
            kind = self._kinds[0]
            ranks |= {self._condition(BATCH, size, kind): LAST - 1 for size in _LARGE_BATCHES}
        return ranks

    def _is_costly(self, axis: str, size: int, kind: Kind) -> bool:
        """Return whether many queries are needed: after a past, or next to a large block."""
        if len(kind - {KEYS}) > 1:
            return axis == QUERIES and size > _FEW_QUERIES
        many = self._counts_queries(axis, kind) and size > _MANY_QUERIES + 1
        return many and size not in BLOCKS

    def _counts_queries(self, axis: str, kind: Kind) -> bool:
        """Return whether an axis counts the queries of a call, since it has no past."""
        return QUERIES in kind and axis in (QUERIES, *self.sums)

    def _sequences(self, axis: str, size: int, kind: Kind) -> list[Sequences | None]:
        """Return the numbers of sequences to try a size with; None stands for any."""
        if BATCH not in self.axes:
            return [None]
        is_single = (
            size in BLOCKS
            and len(kind - {KEYS}) <= 1
            and (QUERIES not in kind or size <= _MANY_QUERIES)
        )
        if is_single:
            return ["several sequences", "one sequence"]
        is_long = size > _MANY_QUERIES + 1 and self._counts_queries(axis, kind)
        return ["several sequences", "three sequences"] if is_long else ["several sequences"]

    def met(self, sizes: Sizes) -> Iterator[str]:
        """Yield the conditions that these sizes meet."""
        kind = self._kind(sizes)
        if kind not in self._kinds:
            return
        batch = sizes.get(BATCH)
        if batch is not None:
            yield self._condition(BATCH, batch, kind)
        sequences: list[Sequences | None] = [None]
        if batch is not None:
            sequences = ["one sequence"] if batch == 1 else ["several sequences"]
            sequences += ["three sequences"] if batch >= 3 else []
        for axis, number in itertools.product(self._axes_of(kind), sequences):
            yield self._condition(axis, sizes[axis], kind, number)

    def _condition(
        self, axis: str, size: int, kind: Kind, sequences: Sequences | None = None
    ) -> str:
        name = f"{axis} {size} where {self._shown(kind)}"
        return f"{name}, {sequences}" if sequences else name

    def _shown(self, kind: Kind) -> str:
        compared = (
            f"{axis} {'>' if axis in kind else '='} {least}"
            for axis, least in self._least.items()
            if axis != KEYS
        )
        return ", ".join(compared) or "there are keys"

    def summary(self, missed: Collection[str]) -> str:
        """Return the sizes of all conditions that are missed, by kind of call."""
        parts = []
        tried = sorted({*BATCHES, *_LARGE_BATCHES, *near_blocks()})
        numbers: tuple[Sequences | None, ...] = (
            None, "several sequences", "three sequences", "one sequence",
        )  # fmt: skip
        for kind, sequences in itertools.product(self._kinds, numbers):
            axes: dict[str, list[str]] = {}
            for axis in (BATCH, *self._axes_of(kind)):
                sizes = [n for n in tried if self._condition(axis, n, kind, sequences) in missed]
                axes.setdefault(_ranges(sizes), []).append(axis)
            shown = [
                f"{' and '.join(of_sizes)} {sizes}" for sizes, of_sizes in axes.items() if sizes
            ]
            if shown:
                where = f"{self._shown(kind)}, {sequences}" if sequences else self._shown(kind)
                parts.append(f"{', '.join(shown)} where {where}")
        return "; ".join(parts)

    def candidates(self) -> Iterator[dict[str, int]]:
        """Yield sizes of the free axes that together meet all conditions."""
        for kind in self._kinds:
            for sizes in self._of_kind(kind):
                for batch in _batches(sizes) if BATCH in self.axes else ():
                    yield {**sizes, BATCH: batch}
                if BATCH not in self.axes:
                    yield sizes
        if BATCH in self.axes:
            least = {axis: size + (axis in self._kinds[0]) for axis, size in self._least.items()}
            yield from ({**least, BATCH: batch} for batch in _LARGE_BATCHES)

    def _of_kind(self, kind: Kind) -> Iterator[dict[str, int]]:
        least, near = self._least, list(near_blocks())
        small = {
            axis: size + (5 if axis == KEYS else 2) * (axis in kind) for axis, size in least.items()
        }
        for axis in kind:
            # Sums are at blocks, too.
            of_sums = (
                size_of(terms, {BATCH: 1, **small, axis: 0})
                for terms in self.sums.values()
                if axis in axes_in(terms)
            )
            for size in {size - rest for rest in (0, *of_sums) for size in near}:
                if size > least[axis]:
                    yield {**small, axis: size}
        # Two axes at blocks take one case for both, and their sum is at the next block.
        for one, other in itertools.combinations(sorted(kind), 2):
            for size in {*near, *(BLOCKS[0] // 2 + step for step in (-1, 0, 1))}:
                for step in (-2, -1, 0, 1, 2):
                    if min(size - least[one], size + step - least[other]) > 0:
                        yield {**small, one: size, other: size + step}


def _batches(sizes: Sizes) -> tuple[int, ...]:
    """Return the batch sizes to try with other sizes: many with small ones."""
    if max(sizes.values()) <= 17:
        return BATCHES
    queries = sizes.get(QUERIES, 1)
    several = (3,) if queries <= _MANY_QUERIES + 1 else (2, 3)
    return (1, *several) if queries in (1, *BLOCKS[:5]) else several


def _ranges(sizes: Sequence[int]) -> str:
    """Return ascending sizes as text: ``16, 31-33``."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
