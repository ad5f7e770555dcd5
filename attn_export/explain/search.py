"""The search for causes: faults are made in a reference until its outputs are the wrong ones.

A fault is a row of a table: a kind, an effect and an edit, and where it applies. What finds its
sites in a reference, a graph or a model, makes hypotheses of it. They are tried in the order of the
tables, in the whole reference first; then wrong numbers are sought. Each trial counts as work,
which ends the search.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from attn_export.explain.comparison import Comparison, Evidence, Rows, compare
from attn_export.explain.explanation import OutOfTime
from attn_export.tensorfile import Array

EQUAL = 1e-3
"""A fault that leaves a smaller share of the error unexplained ends the search: others of another
table could only be as good."""

SURE = 0.01
"""If a fault leaves a smaller share unexplained, no number is sought, and no part is tried."""

FITS = 0.5
"""The least cosine between the error and that of a wrong number, of either sign, for which a better
one is sought."""

STEPS = 6
"""The number of numbers that are tried then."""

AT_ONCE = 3
"""The number of faults whose number is sought, and beside which others are tried."""

KEPT = 12
"""The number of faults that are tried on all cases: those that explain the first case best."""

_NEAR = 0.02
"""The largest distance of a round number from a sought one, relative to it."""


@dataclasses.dataclass(frozen=True)
class Number:
    """A number that is wrong.

    Attributes:
        other: Returns the hypothesis with another wrong number.
        shown: The form of such a number in the effect, and the number from it.
    """

    right: float
    wrong: float
    other: Callable[[float], Any]
    shown: tuple[Callable[[float], float], Callable[[float], float]] = (float, float)

    def round_ones(self) -> Iterator[Any]:
        """Yield hypotheses with near numbers whose shown form is round, the roundest first."""
        to_shown, from_shown = self.shown
        number = to_shown(self.wrong)
        near = dict.fromkeys(float(f"{number:.{digits}e}") for digits in range(3))
        yield from (
            self.other(from_shown(x)) for x in near if abs(x - number) <= _NEAR * abs(number)
        )


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A fault that is made at one place of a reference: a graph, or a model.

    Attributes:
        kind: The kind of the fault, in a word or two. One that ends in ``"precision"`` is a fault
            of rounding, which is not repeated bit by bit.
        effect: What is wrong, as a clause.
        number: The number that is wrong, if it is one.
        is_weak: Whether it fits many errors somewhat.
    """

    kind: str
    effect: str
    number: Number | None = dataclasses.field(default=None, kw_only=True)
    is_weak: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def is_rounding(self) -> bool:
        """Whether it is a fault of rounding."""
        return self.kind.endswith("precision")

    @property
    def subject(self) -> str:
        """What is wrong, without how: the field of a config."""
        return self.effect.split(" is ")[0]


H = TypeVar("H", bound=Hypothesis)


@dataclasses.dataclass(frozen=True)
class Tried(Generic[H]):
    """A fault that was tried.

    Attributes:
        first: Its outputs in the first case, compared with the actual ones.
        unexplained: The share of the error that it leaves; 0 if it explains all.
        is_fit: Whether its number was sought; not that of a round one that explains all.
        only: The rows in which it is made, as the end of a sentence; "" if in all.
    """

    fault: H
    first: Comparison
    unexplained: float
    is_fit: bool = False
    exact: bool = False
    only: str = ""


def least(tried: Iterable[Tried[H]]) -> float:
    """Return the least share of the error that a fault leaves unexplained; 1 without any."""
    return min((one.unexplained for one in tried), default=1.0)


def rank(tried: Tried[H]) -> float:
    """Return what to sort faults by, the best first."""
    # Noise must not decide between faults that fit alike, nor a fit go before another fault.
    left = round(tried.unexplained, 4) + (EQUAL if tried.is_fit else 0)
    return max(left, EQUAL) if tried.fault.is_weak else left


def first_of_each(tried: Iterable[Tried[H]]) -> list[Tried[H]]:
    """Return the first of faults, one of each subject."""
    first: dict[str, Tried[H]] = {}
    for one in tried:
        first.setdefault(one.fault.subject, one)
    return list(first.values())[:AT_ONCE]


class Search(Generic[H]):
    """A search for the faults that give a reference the wrong outputs of some cases.

    `outputs`: Returns the outputs of a case with a fault; raises an error if it is impossible.
    `cost`: About how many seconds a trial takes.
    """

    def __init__(
        self, outputs: Callable[[H, Evidence], Mapping[str, Array]], cases: Sequence[Evidence],
        cost: float, out_of_time: OutOfTime,
    ) -> None:  # fmt: skip
        self.cases, self.out_of_time = cases, out_of_time
        self._outputs, self._cost = outputs, cost
        self.size = math.sqrt(compare(cases[0], cases[0].right).total)

    def everywhere(self, groups: Iterable[Iterable[H]]) -> list[Tried[H]]:
        """Try groups of faults in the whole reference, the most likely first; the best first."""
        tried: list[Tried[H]] = []
        for group in groups if self.size else ():
            tried += self.each(group)
            if least(tried) < EQUAL:
                break
        if least(tried) >= SURE:
            tried += self.sought(tried)
        return sorted(tried, key=rank)

    def each(self, faults: Iterable[H]) -> Iterator[Tried[H]]:
        """Try faults in the first case, and yield those that change its outputs."""
        for fault in faults:
            if self.out_of_time(self._cost):
                return
            for compared in self._compared(fault, self.cases[:1]):
                if math.isfinite(compared.ratio):
                    yield Tried(fault, compared, compared.unexplained)

    def _compared(self, fault: H, cases: Iterable[Evidence]) -> Iterator[Comparison]:
        """Yield a comparison for each case, up to one in which the fault is impossible."""
        for case in cases:
            try:
                with np.errstate(all="ignore"):
                    outputs = self._outputs(fault, case)
                    compared = compare(case, outputs, rounding=fault.is_rounding)
            except Exception:  # impossible, in as many ways as there are references
                return
            yield compared

    def sought(self, tried: Iterable[Tried[H]]) -> list[Tried[H]]:
        """Try other numbers in place of the wrong ones that fit best."""
        numbers = [one for one in tried if one.fault.number and abs(one.first.cosine) > FITS]
        # A number of the config says more than the scale of a weight.
        numbers.sort(key=lambda one: (-round(abs(one.first.cosine), 2), one.fault.is_weak))
        return [found for one in first_of_each(numbers) for found in self.fitted(one)]

    def fitted(self, tried: Tried[H]) -> list[Tried[H]]:
        """Try other wrong numbers, each as far from the right one as the error suggests.

        Returns:
            Those tried, with round numbers near the last one first.
        """
        found: list[Tried[H]] = []
        last = 0.0, 0.0
        for _ in range(STEPS):
            number = tried.fault.number
            if number is None or tried.unexplained < EQUAL:
                break
            if found and abs(tried.first.ratio - 1) < EQUAL:
                break  # no other number explains more
            # A secant through the two last numbers, the first of which is the right one.
            before, reached = last if found else (number.right, 0.0)
            last = number.wrong, 1 / tried.first.ratio
            apart = number.wrong - before
            slope = (last[1] - reached) / apart if apart else 0.0
            new = max(number.wrong + (1 - last[1]) / slope, number.wrong / 4) if slope else 0.0
            after = list(self.each([number.other(new)])) if new > 0 else []
            if not after:
                break
            tried = dataclasses.replace(after[0], is_fit=True)
            found.append(tried)
        if not found or tried.fault.number is None:
            return found
        near = self.each(tried.fault.number.round_ones())
        return [*(dataclasses.replace(x, is_fit=x.unexplained >= EQUAL) for x in near), *found]

    def confirmed(
        self, tried: Iterable[Tried[H]], where: Callable[[Sequence[Rows]], str]
    ) -> list[Tried[H]]:
        """Return the faults that hold in all cases, of those that explain the first one best.

        A fault must explain the error of each case, and predict none where there is none. It may
        be made in some rows alone, if the others are right.

        `where`: Returns what such rows have in common; "" if it is not known.
        """
        screened = []
        for one in tried:
            better = one.first.remaining < one.first.total
            if (better and one.first.holds) or one.first.rows is not None:
                share = one.first.remaining / (one.first.total or 1.0)
                screened.append((round(share, 3), one))
        screened.sort(key=operator.itemgetter(0))
        found = (self._confirmed(one, where) for _, one in screened[:KEPT])
        return [one for one in found if one is not None]

    def _confirmed(
        self, one: Tried[H], where: Callable[[Sequence[Rows]], str]
    ) -> Tried[H] | None:  # fmt: skip
        comparisons: list[Comparison] = []
        for comparison in self._compared(one.fault, self.cases):
            comparisons.append(comparison)
            everywhere = all(c.holds for c in comparisons)
            if not everywhere and any(c.rows is None for c in comparisons):
                return None
        if len(comparisons) < len(self.cases):
            return None  # the fault is impossible in a case
        total = sum(c.total for c in comparisons)
        remaining = sum(c.remaining for c in comparisons)
        unexplained = math.sqrt(remaining / total) if total else math.inf
        share = self.cases[0].least_share(rounding=one.fault.is_rounding)
        if everywhere and unexplained <= 1 - share:
            exact = all(c.exact for c in comparisons)
            return dataclasses.replace(one, unexplained=unexplained, exact=exact)
        rows = [c.rows for c in comparisons if c.rows is not None]
        only = where(rows) if len(rows) == len(comparisons) else ""
        return dataclasses.replace(one, unexplained=0.0, exact=True, only=only) if only else None
