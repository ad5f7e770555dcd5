"""The error allowed for an output, from eager's error and that of runs that round at random."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from attn_export.parity.draw import redraw_signs, scale_case
from attn_export.parity.measures import (
    Measures,
    beyond_limit,
    eps,
    measure,
    without_rows,
    zero_rows,
)
from attn_export.results import Allowed, Arrays, Case, Golden
from attn_export.spec import Shape
from attn_export.tensorfile import is_floating

RUNS = ((64, 8), (250, 4), (1000, 2), (math.inf, 1))
"""The number of random runs for outputs of at most so many rows: the worst of few rows is a small
sample, and the worst of many is not."""

SAFETY = {np.dtype(np.float16): 5.0}
"""Factor on the error of random rounding, by the dtype of an output. Processors may keep sums of
float16 products in float16, which the random rounding does not do."""

USUAL_SAFETY = 2.5
"""`SAFETY` of all other types."""

SPREAD = 4.0
"""The number of standard deviations that are added to the mean error of random rounding."""

EAGER = 4.0
"""The factor on eager's own error: it may compute in less than its types say."""

FLOOR = 2.0
"""The error allowed in any case, in units of eps."""


def run_count(outputs: Arrays) -> tuple[int, int]:
    """Return the least number of rows of some outputs, and the number of random runs for them."""
    rows = min(math.prod(a.shape[:-1]) for a in outputs.values())
    # Of short rows the worst is one that nearly vanishes, which varies however many there are.
    if short_rows({name: a.shape for name, a in outputs.items() if is_floating(a.dtype)}):
        return rows, RUNS[0][1]
    return rows, next(runs for most, runs in RUNS if rows <= most)


def judged_by(
    case: Case, eager: Arrays, truth: Arrays, runs: Sequence[Arrays], *, in_float32: bool,
    exactly: Collection[str] = (),
) -> Golden:  # fmt: skip
    """Return a case with its truth and the error allowed for each output.

    Args:
        case: The case.
        eager: The outputs in their own types.
        truth: The same in float64.
        runs: The same from float64 runs that round at random.
        in_float32: See `allowed_error`.
        exactly: Outputs in less than float32 that are the truth, rounded, but where the runs say
            otherwise: they have no error of their type's size.
    """
    expected = {name: narrowed(t, eager[name].dtype) for name, t in truth.items()}
    allowed: dict[str, Allowed | None] = {}
    unusable: dict[str, str] = {}
    for name, t in truth.items():
        # Rows that are not compared say nothing of the error that is allowed.
        e = without_rows(eager[name], expected[name], case.ignored_rows)
        if not is_floating(e.dtype):
            allowed[name] = None
            continue
        # What vanishes in the output's type has to be 0, and has no relative error.
        t = np.where(zero_rows(expected[name])[..., None], 0.0, t) if t.ndim else t
        rounded = [without_rows(run[name], t, case.ignored_rows) for run in runs]
        least = eps(np.dtype(np.float32) if name in exactly else e.dtype)
        found = allowed_error(t, e, expected[name], rounded, in_float32=in_float32, least=least)
        if bool((np.isfinite(t) & ~np.isfinite(e.astype(np.float64))).any()):
            reason = "eager is not finite where the float64 truth is: no evidence"
        else:
            reason = beyond_limit(found.whole, found.row, e.dtype)
        allowed[name] = found
        if reason:
            unusable[name] = reason
    return Golden(case, expected, eager, allowed, unusable)


def allowed_error(
    t: np.ndarray,
    e: np.ndarray,
    expected: np.ndarray,
    runs: Sequence[np.ndarray],
    *,
    in_float32: bool,
    least: float,
) -> Allowed:
    """Return the error allowed for one output.

    Args:
        t: The truth.
        e: Eager's output.
        expected: The truth in the type of `e`.
        runs: Its values under random rounding.
        in_float32: Whether the graph computes in float32, and rounds what comes out only. Not so in
            a decode, which reads the keys that it has rounded before.
        least: The least relative error, of outputs that are not rounded at the end.
    """
    own = Measures(0.0, 0.0)
    if in_float32 and eps(e.dtype) > eps(np.dtype(np.float32)):
        # Most elements are the truth rounded, and a few the number next to it.
        found = _expected_error([_measured(narrowed(run, e.dtype), expected) for run in runs])
        floor = _one_step(expected)
    else:
        found = _expected_error([_measured(run, t) for run in runs])
        floor, own = Measures(least, least), measure(e, t)
    safety = SAFETY.get(e.dtype, USUAL_SAFETY)
    return Allowed(
        max(safety * found.whole, EAGER * own.whole, FLOOR * floor.whole),
        max(safety * found.row, EAGER * own.row, FLOOR * floor.row),
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


# -- cases whose inputs are changed until they are evidence -------------------------------------


QUIETER = 4
"""The number of times that inputs are divided by 4 to make a case usable as evidence."""

SHORT = (1, 2, 3)
"""Numbers of elements that may all be near 0 at once."""


def short_rows(output_shapes: Mapping[str, Shape]) -> bool:
    """Return whether an output has rows so short that all their elements may nearly vanish."""
    return any(shape[-1] in SHORT for shape in output_shapes.values() if shape)


def usable_golden(case: Case, golden_of: Callable[[Case], Golden], *, short_rows: bool) -> Golden:
    """Return a case with its truth, its inputs changed as far as evidence requires.

    Loud inputs of one module overflow in another, or amplify rounding until nothing can fail:
    they are scaled down. Where a row of few elements happens to vanish, or values are ranked that
    differ by less than rounding, other signs help.

    Args:
        case: The case.
        golden_of: Computes the truth of a case.
        short_rows: Whether `short_rows` holds for the outputs.
    """
    golden = golden_of(case)
    for power in range(1, QUIETER + 1):
        if not (golden.unusable or golden.tied) or golden.tied.keys() & golden.unusable.keys():
            break  # equal values stay equal
        if golden.tied or (short_rows and not case.contents):
            golden = golden_of(redraw_signs(case, power))
        else:
            golden = golden_of(scale_case(case, 0.25**power))
    return golden
