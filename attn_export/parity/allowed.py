"""The error allowed for an output, from eager's error and that of runs that round at random."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attn_export.parity.measures import Measures, eps, measure
from attn_export.results import Allowed

SAFETY = {np.dtype(np.float16): 5.0}
"""By an output's dtype: the factor on the error of random rounding. Processors may keep sums of
float16 products in float16, which the random rounding does not do."""

USUAL_SAFETY = 2.5
"""`SAFETY` of all other types."""

SPREAD = 4.0
"""The number of standard deviations that are added to the mean error of random rounding."""

EAGER = 4.0
"""The factor on eager's own error: it may compute in less than its types say."""

FLOOR = 2.0
"""The error allowed in any case, in units of eps."""


def allowed_error(
    t: np.ndarray,
    e: np.ndarray,
    expected: np.ndarray,
    runs: Sequence[np.ndarray],
    *,
    in_float32: bool,
) -> Allowed:
    """Return the error allowed for one output.

    Args:
        t: The truth.
        e: Eager's output.
        expected: The truth in the type of `e`.
        runs: Its values under random rounding.
        in_float32: Whether the graph computes in float32, and rounds what comes out only. Not so in
            a decode, which reads the keys that it has rounded before.
    """
    own = Measures(0.0, 0.0)
    if in_float32 and eps(e.dtype) > eps(np.dtype(np.float32)):
        # Most elements are the truth rounded, and a few the number next to it.
        found = _expected_error([_measured(narrowed(run, e.dtype), expected) for run in runs])
        least = _one_step(expected)
    else:
        found = _expected_error([_measured(run, t) for run in runs])
        least, own = Measures(eps(e.dtype), eps(e.dtype)), measure(e, t)
    safety = SAFETY.get(e.dtype, USUAL_SAFETY)
    return Allowed(
        max(safety * found.whole, EAGER * own.whole, FLOOR * least.whole),
        max(safety * found.row, EAGER * own.row, FLOOR * least.row),
    )


def _measured(run: np.ndarray, truth: np.ndarray) -> Measures:
    """Return the measures of a run; infinite ones where it is not finite and the truth is."""
    if bool((np.isfinite(truth) & ~np.isfinite(run)).any()):
        return Measures(math.inf, math.inf)
    return measure(run, truth)


def _expected_error(runs: Sequence[Measures]) -> Measures:
    """Return the mean of each measure, and `SPREAD` standard deviations more."""
    if any(run.whole == math.inf for run in runs):
        return Measures(math.inf, math.inf)
    found = np.array([(run.whole, run.row) for run in runs])
    # The worst of a thousand rows varies little: one run is enough.
    spread = found.std(axis=0, ddof=1) if len(runs) > 1 else 0.0
    whole, row = found.mean(axis=0) + SPREAD * spread
    return Measures(float(whole), float(row))


def narrowed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return an array in another type; values beyond its range become infinite.

    Args:
        array: Of any shape.
        dtype: The type to convert to.
    """
    with np.errstate(over="ignore"):
        return np.asarray(array.astype(dtype))


def _one_step(expected: np.ndarray) -> Measures:
    """Return the measures of an error of one unit in the last place, where it is largest."""
    values = np.atleast_1d(expected.astype(np.float64))
    values = np.abs(np.where(np.isfinite(values), values, 0.0))
    step = eps(expected.dtype)
    norms, largest = np.linalg.norm(values, axis=-1), values.max(axis=-1, initial=0.0)
    rows = largest[norms > 0] / norms[norms > 0]
    whole = float(np.linalg.norm(values))
    return Measures(
        step * float(values.max(initial=0.0)) / whole if whole else step,
        step * float(rows.max(initial=0.0)) if rows.size else step,
    )
