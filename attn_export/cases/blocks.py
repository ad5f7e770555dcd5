"""Sizes at the blocks in which kernels work: a block, one less and one more, along each axis.

Kernels have paths for whole blocks, for the rest after them, and for one query. So each size is
tried in each kind of call: a kind is the set of axes that are larger than their least size. Of a
layer with a cache these are runs without a past, decodes of one query, and chunks after a past.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from attn_export.cases.draw import Bounds, Sizes
from attn_export.spec.inputs import BATCH, KEYS, PAST, axes_in, size_of

BLOCKS: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
"""Block sizes of kernels."""

FAR_PASTS: tuple[int, ...] = (2047, 4096)
"""Pasts of one decode each: all keys, or the past alone, are a larger block."""

BATCHES = (1, 2, 3, 8, 16, 17)
"""Batch sizes to try in each kind of call."""

LAST = 4
"""The rank of conditions that are met last, see `BlockSizes.conditions`."""

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

        Blocks come before the sizes next to them, and calls in which one axis is larger than its
        least size before others.
        """
        ranks: dict[str, int] = {}
        for kind in self._kinds:
            late = int(len(kind - {KEYS}) > 1)
            for axis in self._axes_of(kind):
                for size, distance in near_blocks().items():
                    ranks[self._condition(axis, size, kind)] = 1 + late + distance
            if BATCH in self.axes:
                ranks |= {self._condition(BATCH, size, kind): 1 for size in BATCHES}
        return ranks

    def met(self, sizes: Sizes) -> Iterator[str]:
        """Yield the conditions that these sizes meet."""
        kind = self._kind(sizes)
        for axis in (BATCH, *self._axes_of(kind)) if kind in self._kinds else ():
            if axis in sizes:
                yield self._condition(axis, sizes[axis], kind)

    def _condition(self, axis: str, size: int, kind: Kind) -> str:
        return f"{axis} {size} where {self._shown(kind)}"

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
        for kind in self._kinds:
            axes: dict[str, list[str]] = {}
            for axis in (BATCH, *self._axes_of(kind)):
                tried = sorted({*BATCHES, *near_blocks()})
                sizes = [size for size in tried if self._condition(axis, size, kind) in missed]
                axes.setdefault(_ranges(sizes), []).append(axis)
            shown = [
                f"{' and '.join(of_sizes)} {sizes}" for sizes, of_sizes in axes.items() if sizes
            ]
            if shown:
                parts.append(f"{', '.join(shown)} where {self._shown(kind)}")
        return "; ".join(parts)

    def candidates(self) -> Iterator[dict[str, int]]:
        """Yield sizes of the free axes that together meet all conditions."""
        for kind in self._kinds:
            for sizes in self._of_kind(kind):
                if BATCH not in self.axes:
                    yield sizes
                    continue
                longest = max(sizes.values())
                for batch in BATCHES if longest <= 17 else (1, 2) if longest <= 33 else (1,):
                    yield {**sizes, BATCH: batch}

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


def _ranges(sizes: Sequence[int]) -> str:
    """Return ascending sizes as text: ``16, 31-33``."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
