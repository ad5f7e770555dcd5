"""Search for known mistakes that reproduce the outputs of a runtime, or of a wrong graph."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from attn_export.diagnose.evaluate import Evaluation, NotComputedError, Values
from attn_export.diagnose.explanation import OutOfTime
from attn_export.diagnose.in_activations import activation_mistakes
from attn_export.diagnose.in_attention import (
    attention_mistakes,
    fitted_scales_and_softcaps,
    head_swaps,
    rotary_mistakes,
)
from attn_export.diagnose.in_block_cache import block_mistakes
from attn_export.diagnose.in_float16_cache import float16_cache_mistakes
from attn_export.diagnose.in_graph import (
    input_mistakes,
    mask_mistakes,
    precision_mistakes,
    value_mistakes,
)
from attn_export.diagnose.in_integer_cache import cache_mistakes, fitted_cache_scales
from attn_export.diagnose.in_integer_products import fitted_input_scales, product_mistakes
from attn_export.diagnose.in_integers import fitted_weight_mistakes, weight_mistakes
from attn_export.diagnose.mistake import Mistake
from attn_export.parity.measures import element_errors, eps
from attn_export.tensorfile import Array, is_floating

KEPT = 12
"""The number of mistakes that are tried on all cases: those that explain the first case best.

The cause must explain every case that fails.
"""

ROUNDINGS = 256
"""The largest root mean square difference from the actual output, relative to that of the right one
and in eps of its type, that is called rounding."""

FAR = 10.0
"""The error of an element that is not finite and not the same in both outputs, in root mean squares
of the right output; also that of an output of another shape."""

CONVINCING = 0.02
"""If a mistake leaves a smaller share of the error unexplained, neither swaps of heads nor mistakes
with fitted parameters are tried."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Right and actual outputs of one case.

    Attributes:
        values: All values of the graph without a mistake, in float64.
        right: The outputs of the graph without a mistake, in float64.
        actual: The outputs to explain.
    """

    values: Values
    right: Mapping[str, Array]
    actual: Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Match:
    """A mistake that explains at least some of the error.

    Attributes:
        unexplained: The share of the error that it does not explain; 0 if it explains all.
        exact: Whether the unexplained error is only rounding.
    """

    mistake: Mistake
    unexplained: float
    exact: bool


def matches(
    evaluation: Evaluation, evidence: Sequence[Evidence], out_of_time: OutOfTime = lambda: False
) -> list[Match]:
    """Return the mistakes that explain the actual outputs, the best first.

    Args:
        evaluation: The graph to make mistakes in.
        evidence: Failed cases, then some that passed. Mistakes are selected on the first.
        out_of_time: Returns whether the time limit has passed.
    """
    first = evidence[:1]
    screened = list(_try(_all_mistakes(evaluation, evidence[0]), evaluation, first, out_of_time))
    screened.sort(key=_order)
    if not screened or screened[0].unexplained > CONVINCING:
        further = itertools.chain(
            head_swaps(evaluation),
            fitted_weight_mistakes(evaluation),
            _fitted_mistakes(evaluation, first, out_of_time),
        )
        screened += _try(further, evaluation, first, out_of_time)
        screened.sort(key=_order)
    best = (match.mistake for match in screened[:KEPT])
    refined = sorted(_try(best, evaluation, evidence, out_of_time), key=_order)
    return [match for match in refined if match.unexplained <= 1 - match.mistake.share]


def _order(match: Match) -> float:
    # Rounded, so that noise does not decide between two mistakes that fit equally well.
    return round(match.unexplained, 3)


def _match(mistake: Mistake, evaluation: Evaluation, evidence: Sequence[Evidence]) -> Match:
    """Compare the outputs of a graph with a mistake to the actual outputs."""
    remaining = total = 0.0
    is_rounding = True
    for case in evidence:
        mistaken = mistake.outputs(evaluation, case.values)
        for name, right in case.right.items():
            actual = case.actual[name]
            distance = _distance(mistaken[name], actual, right)
            remaining += distance
            total += _distance(right, actual, right)
            if is_floating(actual.dtype):
                is_rounding &= math.sqrt(distance) <= ROUNDINGS * eps(actual.dtype)
    unexplained = math.sqrt(remaining / total) if total else math.inf
    return Match(mistake, unexplained, is_rounding)


def _all_mistakes(evaluation: Evaluation, case: Evidence) -> Iterator[Mistake]:
    # Of two mistakes with the same outputs, the first wins: simpler ones come first.
    return itertools.chain(
        input_mistakes(evaluation, case.values),
        value_mistakes(evaluation),
        weight_mistakes(evaluation),
        activation_mistakes(evaluation),
        product_mistakes(evaluation),
        cache_mistakes(evaluation),
        block_mistakes(evaluation),
        float16_cache_mistakes(evaluation),
        mask_mistakes(evaluation, case.values),
        rotary_mistakes(evaluation),
        attention_mistakes(evaluation),
        precision_mistakes(evaluation),
    )


def _try(
    mistakes: Iterable[Mistake],
    evaluation: Evaluation,
    evidence: Sequence[Evidence],
    out_of_time: OutOfTime,
) -> Iterator[Match]:
    for mistake in mistakes:
        if out_of_time():
            return
        try:
            with np.errstate(all="ignore"):
                match = _match(mistake, evaluation, evidence)
        except (NotComputedError, ValueError, IndexError, TypeError, KeyError):
            continue  # the mistake is impossible with these shapes
        if match.unexplained < 1:
            yield match


def _distance(x: Array, actual: Array, right: Array) -> float:
    """Compute the mean square of x - actual, divided by the mean square of the right output."""
    if x.shape != actual.shape:
        return FAR * FAR
    if not x.size:
        return 0.0
    finite = right[np.isfinite(right)].astype(np.float64)
    scale = math.sqrt(float(np.square(finite).mean())) if finite.size else 0.0
    errors = element_errors(x.astype(np.float64), actual.astype(np.float64)) / (scale or 1.0)
    return float(np.square(np.where(np.isfinite(errors), errors, FAR)).mean())


def _fitted_mistakes(
    evaluation: Evaluation, cases: Sequence[Evidence], out_of_time: OutOfTime
) -> Iterator[Mistake]:
    """Yield mistakes in scales and softcaps that are wrong by a factor, each with its best one."""
    for make in (
        *fitted_scales_and_softcaps(evaluation),
        *fitted_cache_scales(evaluation),
        *fitted_input_scales(evaluation),
    ):
        if out_of_time():
            return

        def unexplained(log: float, make: Callable[[float], Mistake] = make) -> float:
            return _match(make(math.exp(log)), evaluation, cases).unexplained

        yield make(math.exp(_minimise(unexplained)))


def _minimise(function: Callable[[float], float]) -> float:
    """Return the best argument from -log 8 to log 8, by a grid and then a golden-section search."""
    grid = np.linspace(-math.log(8), math.log(8), 25)
    values = [function(float(x)) for x in grid]
    middle = int(np.argmin(values))
    low, high = float(grid[max(middle - 1, 0)]), float(grid[min(middle + 1, len(grid) - 1)])
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(30):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if function(a) < function(b) else (a, high)
    return (low + high) / 2
