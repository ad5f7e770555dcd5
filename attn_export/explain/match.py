"""Search for known faults that reproduce the outputs of a runtime, or of a wrong graph."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from attn_export.explain.explanation import OutOfTime
from attn_export.explain.faults.fault import Evidence, GraphPlace, Maker, Match
from attn_export.explain.faults.known import FITTED, KNOWN, LAST, MANY, made_in
from attn_export.explain.row_conditions import Rows, where_made
from attn_export.float64.evaluate import Evaluation, NotComputedError
from attn_export.measures import element_errors, eps
from attn_export.tensorfile import Array, is_floating

KEPT = 12
"""The number of faults that are tried on all cases: those that explain the first case best."""

ROUNDINGS, HALF_ROUNDINGS = 256, 8
"""The largest root mean square difference from the actual output, relative to that of the right one
and in eps of its type, that is called rounding; the second in half precision."""

NEAR = 1e-5
"""The same for actual outputs in float64, in which constants of a graph are rounded to float32."""

_MOST_NOISE = 1e-3
"""The largest such difference at which single rows are compared: half precision hides too much."""

FAR = 10.0
"""The error of an element that is not finite and not the same in both outputs, in root mean squares
of the right output; also that of an output of another shape."""

_CONVINCING = 0.02
"""If a fault leaves a smaller share of the error unexplained, neither faults with a factor that
must be found nor those of single heads are tried."""

_MOST_FACTOR, _MOST_ROWS = 32, 0.9
"""The factor within which errors of rounding are as large as expected, and the share of rows."""

_IN_ONE_CASE = 3
"""A fault may leave this many times more of the error unexplained in one case than in all."""


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The outputs that a fault gives in one case, compared with the actual ones.

    Attributes:
        remaining: The mean squares of the error that it leaves, summed over the outputs.
        holds: Whether it explains the error of this case, or predicts none where none is.
        rows: The rows where it is made and where it is not, by output; None unless each row is one
            or the other.
        is_spread: Whether all rows are wrong, and by as much, as by rounding.
    """

    remaining: float
    total: float
    exact: bool
    holds: bool
    rows: Rows | None
    is_spread: bool = True


def matches(
    evaluation: Evaluation, evidence: Sequence[Evidence], out_of_time: OutOfTime = lambda _: False,
    *, thorough: bool = True,
) -> list[Match]:  # fmt: skip
    """Return the faults that explain the actual outputs, the best first.

    A fault must explain the error of each case, and predict none where there is none. It may be
    made in some rows alone, if the others are right.
    """
    found: list[Match] = []
    known, many, last = (
        made_in(faults, evaluation, evidence[0].values) for faults in (KNOWN, MANY, LAST)
    )
    more = (many, _fitted_faults(evaluation, evidence[:1], out_of_time), last)
    for faults in (known, *(more if thorough else ())):
        found += _matching(faults, evaluation, evidence, out_of_time)
        if found and min(match.unexplained for match in found) <= _CONVINCING:
            break
    return sorted(found, key=_order)


def _matching(
    faults: Iterable[Match],
    evaluation: Evaluation,
    evidence: Sequence[Evidence],
    out_of_time: OutOfTime,
) -> list[Match]:
    """Return the faults that hold in all cases: those that explain the first one best."""
    screened, cost = [], _cost(evidence)
    for fault in faults:
        if out_of_time(cost):
            break
        for comparison in _compared(fault, evaluation, evidence[:1]):
            better = comparison.remaining < comparison.total
            holds = comparison.is_spread if fault.is_rounding else comparison.holds
            if (better and holds) or comparison.rows is not None:
                share = comparison.remaining / (comparison.total or 1.0)
                screened.append((round(share, 3), fault))
    screened.sort(key=operator.itemgetter(0))
    found = (_match(fault, evaluation, evidence) for _, fault in screened[:KEPT])
    return sorted((match for match in found if match is not None), key=_order)


def _order(match: Match) -> tuple[bool, float]:
    # Rounded, so that noise does not decide between two faults that fit equally well.
    return bool(match.only), round(match.unexplained, 3)


def _match(fault: Match, evaluation: Evaluation, evidence: Sequence[Evidence]) -> Match | None:
    """Compare outputs with a fault to the actual ones in all cases; None if it is no cause."""
    comparisons: list[_Comparison] = []
    for comparison in _compared(fault, evaluation, evidence):
        comparisons.append(comparison)
        if fault.is_rounding:
            everywhere = all(c.is_spread for c in comparisons)
        else:
            everywhere = all(c.holds for c in comparisons)
        if not everywhere and (fault.is_rounding or any(c.rows is None for c in comparisons)):
            return None
    if len(comparisons) < len(evidence):
        return None  # the fault is impossible in a case
    total = sum(c.total for c in comparisons)
    unexplained = math.sqrt(sum(c.remaining for c in comparisons) / total) if total else math.inf
    exact = all(c.exact for c in comparisons)
    if everywhere and unexplained <= 1 - _share(fault, evidence[0]):
        return dataclasses.replace(fault, unexplained=unexplained, exact=exact)
    rows = [c.rows for c in comparisons if c.rows is not None and not fault.is_rounding]
    only = where_made(evaluation, evidence, rows) if len(rows) == len(comparisons) else ""
    if not only:
        return None
    return dataclasses.replace(fault, unexplained=0.0, exact=True, only=only)


def _share(fault: Match, case: Evidence) -> float:
    """Return the share of the error that a fault must explain, more of one without rounding."""
    is_float64 = any(array.dtype == np.float64 for array in case.actual.values())
    return 0.3 if fault.is_rounding else 0.99 if is_float64 else 0.9


def _compared(
    fault: Match, evaluation: Evaluation, evidence: Iterable[Evidence]
) -> Iterator[_Comparison]:
    """Yield a comparison for each case, up to one with which the fault is impossible."""
    for case in evidence:
        try:
            with np.errstate(all="ignore"):
                yield _compare(fault, case, fault.outputs(evaluation, case.values))
        except (NotComputedError, ValueError, IndexError, TypeError, KeyError):
            return  # the fault is impossible with these shapes


def _compare(fault: Match, case: Evidence, mistaken: Mapping[str, Array]) -> _Comparison:
    remaining = total = 0.0
    exact = holds = is_spread = True
    most = _IN_ONE_CASE * (1 - _share(fault, case))
    rows: dict[str, tuple[Array, Array]] | None = {}
    for name, right in case.right.items():
        actual = case.actual[name]
        distance, error = _distance(mistaken[name], actual, right), _distance(right, actual, right)
        remaining += distance
        total += error
        noise = _noise(actual)
        exact &= math.sqrt(distance) <= noise
        accepted = max(noise, case.allowed.get(name, 0.0), most * math.sqrt(error))
        holds &= math.sqrt(distance) <= accepted
        is_spread &= not fault.is_rounding or _is_spread(mistaken[name], actual, right)
        one = None if rows is None else _rows(mistaken[name], actual, right, noise)
        rows = None if rows is None or one is None else {**rows, name: one}
    return _Comparison(remaining, total, exact, holds, rows, is_spread)


def _is_spread(rounded: Array, actual: Array, right: Array) -> bool:
    """Return whether rows are wrong as rounding makes them: by as much, and all of them.

    `rounded`: The output that the rounding gives.
    """
    if not rounded.shape == actual.shape == right.shape:
        return False
    if not actual.size or not actual.ndim:
        return True
    expected, found = (
        np.minimum(element_errors(x.astype(np.float64), right) / _size(right), FAR).max(axis=-1)
        for x in (rounded, actual)
    )
    if found.max() <= NEAR:
        return True
    usual = expected >= np.median(expected)
    are_wrong = (found >= expected / _MOST_FACTOR)[usual]
    return bool(found.max() <= _MOST_FACTOR * expected.max() and are_wrong.mean() >= _MOST_ROWS)


def _noise(actual: Array) -> float:
    """Return the largest difference that is rounding, in root mean squares of the right output."""
    if actual.dtype == np.float64:
        return NEAR
    if not is_floating(actual.dtype):
        return 0.0
    return (HALF_ROUNDINGS if actual.dtype.itemsize < 4 else ROUNDINGS) * eps(actual.dtype)


def _rows(mistaken: Array, actual: Array, right: Array, noise: float) -> tuple[Array, Array] | None:
    """Return the rows in which a fault is made, and those that are right but would be wrong.

    Return None if a row is neither as the fault says nor right.
    """
    if mistaken.shape != actual.shape or not actual.ndim or noise > _MOST_NOISE:
        return None
    limit = noise * _size(right)
    like_fault, like_right = (
        element_errors(x.astype(np.float64), actual.astype(np.float64)).max(-1, initial=0) <= limit
        for x in (mistaken, right)
    )
    return (~like_right, ~like_fault) if (like_fault | like_right).all() else None


def _distance(x: Array, actual: Array, right: Array) -> float:
    """Compute the mean square of x - actual, divided by the mean square of the right output."""
    if x.shape != actual.shape:
        return FAR * FAR
    if not x.size:
        return 0.0
    errors = element_errors(x.astype(np.float64), actual.astype(np.float64)) / _size(right)
    return float(np.square(np.where(np.isfinite(errors), errors, FAR)).mean())


def _size(right: Array) -> float:
    """Return the root mean square of the finite elements; 1 if they are all 0."""
    finite = right[np.isfinite(right)].astype(np.float64)
    return math.sqrt(float(np.square(finite).mean())) if finite.size and finite.any() else 1.0


_FITTED_RUNS = 85
"""The number of runs by which a factor is found."""


def _cost(evidence: Sequence[Evidence]) -> float:
    """Return about how many seconds a fault takes in the first case: a run from its place on."""
    values = evidence[0].values
    return (
        len(values) * 1e-5
        + sum(x.size for x in values.values() if isinstance(x, np.ndarray)) * 2e-9
    )


def _fitted_faults(
    evaluation: Evaluation, cases: Sequence[Evidence], out_of_time: OutOfTime
) -> Iterator[Match]:
    """Yield faults that are wrong by a factor, each with its best one."""
    found = ((make, place) for at, make in FITTED for place in at(evaluation, cases[0].values))
    cost = _FITTED_RUNS * _cost(cases)
    for make, place in found:
        if out_of_time(cost):
            return

        def made(log: float, make: Maker = make, place: GraphPlace = place) -> Match:
            return Match(make(place, math.exp(log)), place)

        def unexplained(log: float, made: Callable[[float], Match] = made) -> float:
            compared = list(_compared(made(log), evaluation, cases))
            return sum(c.remaining for c in compared) if compared else math.inf

        yield made(_minimise(unexplained))


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
