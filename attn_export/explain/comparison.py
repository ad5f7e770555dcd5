"""Comparison of the outputs that a fault gives in one case with the actual ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from attn_export.float64.evaluate import Values
from attn_export.measures import element_errors, eps
from attn_export.tensorfile import Array, is_floating

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

_MOST_FACTOR, _MOST_ROWS = 32, 0.9
"""The factor within which errors of rounding are as large as expected, and the share of rows."""

_IN_ONE_CASE = 3
"""A fault may leave this many times more of the error unexplained in one case than in all."""

_MOVED = 2e-6
"""The least difference of an output, relative to its size, that is no rounding."""

Rows = Mapping[str, tuple[Array, Array]]
"""The rows in which a fault is made, and those that it would change but are right: two bool
arrays without the last axis of the output, by the name of the output."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Right and actual outputs of one case.

    Attributes:
        values: All values of the graph without a fault, in float64; none of a model.
        right: The outputs of the reference without a fault, in float64.
        tolerance: The relative error of each output that the judge allows, by name, if it passes
            the actual outputs. A cause must not predict a larger one.
    """

    values: Values
    right: Mapping[str, Array]
    actual: Mapping[str, Array]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tolerance: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def least_share(self, *, rounding: bool) -> float:
        """Return the share of the error that a fault must explain, less of one of rounding."""
        is_float64 = any(array.dtype == np.float64 for array in self.actual.values())
        return 0.3 if rounding else 0.99 if is_float64 else 0.9


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The outputs that a fault gives in one case, compared with the actual ones.

    Attributes:
        remaining: The mean squares of the error that it leaves, summed over the outputs.
        total: Those of the error.
        holds: Whether it explains the error of this case, or predicts none where none is; of
            rounding, whether all rows are wrong, and by as much.
        rows: The rows where it is made and where it is not, by output; None unless each row is one
            or the other, and of rounding.
        cosine: That of its error and the error to explain.
        ratio: The length of the latter in its direction, in lengths of its error.
        moved: Which outputs it changes.
    """

    remaining: float
    total: float
    exact: bool
    holds: bool
    rows: Rows | None
    cosine: float
    ratio: float
    moved: Sequence[bool]

    @property
    def unexplained(self) -> float:
        """The share of the error that it leaves."""
        return math.sqrt(self.remaining / self.total) if self.total else math.inf


def compare(
    case: Evidence, mistaken: Mapping[str, Array], *, rounding: bool = False
) -> Comparison:  # fmt: skip
    """Compare the outputs that a fault gives, maybe one of rounding, with the actual ones."""
    remaining = total = along = length = 0.0
    exact = holds = True
    most, moved = _IN_ONE_CASE * (1 - case.least_share(rounding=rounding)), []
    rows: dict[str, tuple[Array, Array]] | None = None if rounding else {}
    for name, right in case.right.items():
        actual, wrong = case.actual[name], mistaken[name]
        distance, error = _distance(wrong, actual, right), _distance(right, actual, right)
        remaining += distance
        total += error
        noise = _noise(actual)
        exact &= math.sqrt(distance) <= noise
        accepted = max(noise, case.tolerance.get(name, 0.0), most * math.sqrt(error))
        is_close = math.sqrt(distance) <= accepted
        holds &= _is_spread(wrong, actual, right) if rounding else is_close
        one = None if rows is None else _rows(wrong, actual, right, noise)
        rows = None if rows is None or one is None else {**rows, name: one}
        step, wanted = _difference(wrong, right), _difference(actual, right)
        along += float(step @ wanted)
        length += float(step @ step)
        moved.append(math.sqrt(float(step @ step)) > _MOVED)
    cosine = along / math.sqrt(length * total) if length and total else 0.0
    ratio = along / length if length else math.inf
    return Comparison(remaining, total, exact, holds, rows, cosine, ratio, moved)


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


def _difference(x: Array, right: Array) -> Array:
    """Return x - right; its square is the mean square, divided by that of the right output."""
    if x.shape != right.shape:
        return np.full(1, FAR)
    difference = (x.astype(np.float64) - right).ravel() / (_size(right) * math.sqrt(x.size or 1))
    far = FAR / math.sqrt(x.size or 1)
    return np.nan_to_num(difference, nan=far, posinf=far, neginf=-far)


def _size(right: Array) -> float:
    """Return the root mean square of the finite elements; 1 if they are all 0."""
    finite = right[np.isfinite(right)].astype(np.float64)
    return math.sqrt(float(np.square(finite).mean())) if finite.size and finite.any() else 1.0
