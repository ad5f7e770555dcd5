"""The rule by which a graph in a narrow format passes.

Its outputs may be several times as far from float64 as with the digits of the format and any
exponent: what is further is an effect of the limits. Budgets of the user replace this.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.bundle.quality_vectors import distance, logit_distance
from attn_export.measures import Measures, measure, wrong_kinds
from attn_export.parts.value_ranges.float_formats import FloatFormat
from attn_export.quality import OF_LOGITS, Budget
from attn_export.tensorfile import Array

FACTOR = 4.0
"""The error that passes, as a multiple of that of rounding with any exponent."""

_MOST_ROUNDING = 32
"""The error of this rounding, as a multiple of eps, from which on it is too large itself."""

MOST_OF_ONE = 8
"""The error that the rounding of one value may make, as a multiple of eps."""

GraphOutputs = Mapping[str, Any]
WRONG = Measures(math.inf, math.inf)


@dataclasses.dataclass(frozen=True)
class ExpectedOutputs:
    """What is expected of the outputs for one set of inputs.

    Attributes:
        reference: The outputs in float64.
        free: The outputs with all values rounded to the digits of the format.
        format: The format.
        budgets: Those of the user.
    """

    reference: GraphOutputs
    free: GraphOutputs
    format: FloatFormat
    budgets: Sequence[Budget] = ()

    @functools.cached_property
    def best(self) -> Measures:
        """The error of rounding with any exponent."""
        return self.error(self.free)

    @property
    def is_rough(self) -> bool:
        """Whether the digits of the format are too few, whatever the exponents."""
        return not self.best.whole <= _MOST_ROUNDING * self.format.eps

    @property
    def tolerance(self) -> Measures:
        """The error that passes."""
        best, eps = self.best, self.format.eps
        if self.is_rough:
            return Measures(MOST_OF_ONE * eps, _MOST_ROUNDING * eps)
        return Measures(FACTOR * max(best.whole, eps), FACTOR * max(best.row, eps))

    def error(self, outputs: GraphOutputs) -> Measures:
        """Return the largest error of an output: infinite if it has no relative size.

        That is where an output is not finite and should be, or integers differ though those of
        `free` do not.
        """
        errors = [_error(outputs[name], t, self.free[name]) for name, t in self._arrays()]
        return largest(errors)

    def passes(self, outputs: GraphOutputs, error: Measures | None = None) -> bool:
        """Return whether outputs are near enough to the reference.

        `error`: Their error, if it is known.
        """
        error = error or self.error(outputs)
        if not self.budgets:
            return is_within(error, self.tolerance)
        return math.isfinite(error.whole) and all(self._is_met(b, outputs) for b in self.budgets)

    def _is_met(self, budget: Budget, outputs: GraphOutputs) -> bool:
        pairs = {n: [(t, outputs[n])] for n, t in self._arrays() if t.dtype.kind == "f" and t.ndim}
        if budget.measure in OF_LOGITS:
            return all(map(budget.is_met, logit_distance(pairs, [budget])))
        return all(budget.is_met(distance(name, pair)) for name, pair in pairs.items())

    def _arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield the outputs that are arrays, and no sequences."""
        return ((name, t) for name, t in self.reference.items() if isinstance(t, np.ndarray))


def is_within(error: Measures, tolerance: Measures) -> bool:
    """Return whether both distances are at most those allowed."""
    return error.whole <= tolerance.whole and error.row <= tolerance.row


def largest(errors: Sequence[Measures]) -> Measures:
    """Return the largest of each distance."""
    zero = Measures(0.0, 0.0)
    return Measures(max(e.whole for e in (zero, *errors)), max(e.row for e in (zero, *errors)))


def _error(found: Any, reference: Array, free: Any) -> Measures:
    if found.shape != reference.shape:
        return WRONG
    if reference.dtype.kind != "f":
        return Measures(0.0, 0.0) if np.array_equal(found, free) else WRONG
    # What rounding alone does is no effect of the limits.
    known = dict(wrong_kinds(free, reference))
    for name, mask in wrong_kinds(found, reference):
        if (mask & ~known[name] if name in known else mask).any():
            return WRONG
    return measure(found, reference)
