"""Rule by which an output passes; docs/parity.md defines it.

In float64, with the reference t and the output r, ‖r − t‖ / ‖t‖ must not exceed the error that the
case allows, for the whole output and for each row of its last axis. Where a row of t is 0, that row
of r must be 0. The Python kit ships this file, so it must not import anything of this package but
`measures`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .measures import (
    EPS_FLOAT32,
    Measures,
    eps,
    fill_ignored_rows,
    measure,
    worst_index,
    wrong_kinds,
)

# -- the tolerance ---------------------------------------------------------------------------

EAGER = 4.0
"""The factor on eager's own error: eager may compute in narrower types than its tensors have."""

FLOOR = 2.0
"""The least tolerance, in units of eps."""

WHOLE, ROW = 2.0**17, 2.0**20
"""The largest tolerances of an output and of a row, in units of eps of its dtype, or of float32
if that is larger."""

MOST_WHOLE, MOST_ROW = 1 / 8, 1 / 2
"""The largest tolerances of any dtype: with larger ones, wrong outputs would pass."""

TIES = "ties"
"""The start of messages on outputs that depend on the order of equal values."""

TIES_ADVICE = "return the values instead, or rank by torch.sort(stable=True), which ONNX follows"


def largest_tolerance(dtype: np.dtype) -> Measures:
    """Return the largest tolerances of an output of a floating dtype.

    For float32 they are 1/64 of the whole output, and 1/8 of a row.
    """
    step = max(eps(dtype), EPS_FLOAT32)
    return Measures(min(WHOLE * step, MOST_WHOLE), min(ROW * step, MOST_ROW))


def for_narrow_products(limits: Measures, eager: np.ndarray, reference: np.ndarray) -> Measures:
    """Return the tolerance for a graph that computes in bfloat16, as eager does.

    `limits`: The tolerance for graphs that compute in float32 and round their outputs once.
    """
    own, least = measure(eager, reference), FLOOR * eps(reference.dtype)
    most = largest_tolerance(reference.dtype)
    return Measures(
        min(max(limits.whole, EAGER * own.whole, least), most.whole),
        min(max(limits.row, EAGER * own.row, least), most.row),
    )


def beyond_limit(whole: float, row: float, dtype: np.dtype) -> str:
    """Return a message if a tolerance is too large for the case to be compared, or ""."""
    limit = largest_tolerance(dtype)
    for over, error, most in (
        ("the whole output", whole, limit.whole),
        ("one row", row, limit.row),
    ):
        if not error <= most:  # so that NaN is too large
            return (
                f"the tolerance over {over} would be {error:.2g}, and "
                f"{most:.2g} is the most for {dtype.name}"
            )
    return ""


# -- the judgement of one output ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Result of the rule for one output.

    Attributes:
        message: The reason if the status is not `passed`, else "".
        errors: The distances from the reference, if they were measured.
        worst: The larger distance, divided by the tolerance. NaN for a wrong NaN, and infinite
            for other errors without a size. None if nothing was measured.
    """

    status: Literal["passed", "failed", "unusable"]
    message: str = ""
    errors: Measures | None = None
    worst: float | None = None


PASSED = Judgement("passed")


def judge_array(
    got: np.ndarray,
    reference: np.ndarray,
    tolerance: Measures | None,
    uncompared: str | None = None,
    ignored_rows: Sequence[int] = (),
    *,
    has_limit: bool = True,
) -> Judgement:
    """Compare an output with its reference.

    `got`: An output, of any shape.
    `reference`: The reference, of the type and shape that the output must have.
    `has_limit`: Whether a tolerance may be too large for the case to be compared.

    Returns:
        The judgement, with the reason where the output did not pass.
    """
    if got.dtype != reference.dtype:
        return Judgement("failed", f"dtype is {got.dtype}, expected {reference.dtype}")
    if got.shape != reference.shape:
        return Judgement("failed", f"shape is {list(got.shape)}, expected {list(reference.shape)}")
    if uncompared is not None:
        return Judgement("unusable", uncompared)
    got = fill_ignored_rows(got, reference, ignored_rows)
    if reference.dtype.kind == "f" or reference.dtype.name == "bfloat16":
        limited = reference.dtype if has_limit else None
        got, reference = got.astype(np.float64), reference.astype(np.float64)
        return _judge_floats(got, reference, tolerance, limited)
    wrong = got != reference
    return Judgement("failed", describe_wrong(wrong, got, reference)) if wrong.any() else PASSED


def _judge_floats(
    r: np.ndarray, t: np.ndarray, tolerance: Measures | None, limited: np.dtype | None
) -> Judgement:
    for problem, wrong in wrong_kinds(r, t):
        if wrong.any():
            worst = math.nan if (np.isnan(r) != np.isnan(t)).any() else math.inf
            return Judgement("failed", f"{problem}; {describe_wrong(wrong, r, t)}", worst=worst)
    if tolerance is None:
        return Judgement("failed", "the stored test cases give no tolerance")
    beyond = beyond_limit(tolerance.whole, tolerance.row, limited) if limited is not None else ""
    if beyond:
        return Judgement("unusable", beyond)
    if not t.size:
        return PASSED
    errors = measure(r, t)
    worst = max(errors.whole / tolerance.whole, errors.row / tolerance.row)
    if not errors.whole <= tolerance.whole:  # so that NaN fails
        error, limit, over = errors.whole, tolerance.whole, "the whole output"
    elif not errors.row <= tolerance.row:
        error, limit, over = errors.row, tolerance.row, "one row"
    else:
        return Judgement("passed", "", errors, worst)
    index = worst_index(r, t, by_row=over == "one row")
    message = (
        f"relative error {error:.2e} over {over}, tolerance {limit:.2e}; worst at {list(index)}: "
        f"{_format_values(r[index], t[index])}"
    )
    return Judgement("failed", message, errors, worst)


def describe_wrong(wrong: np.ndarray, got: np.ndarray, expected: np.ndarray) -> str:
    """Return the number of wrong elements, and the index and the values of the first, as text.

    `got`: The output, of the mask's shape.
    `expected`: The reference, of the mask's shape.
    """
    index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    elements = "1 element" if wrong.size == 1 else f"{wrong.size} elements"
    return (
        f"{int(wrong.sum())} of {elements}, the first at {[int(i) for i in index]}: "
        f"{_format_values(got[index], expected[index])}"
    )


def _format_values(actual: Any, expected: Any) -> str:
    """Format two values with as many digits as are needed to show that they differ."""
    for digits in (6, 9, 17):
        shown = f"{actual:.{digits}g}", f"{expected:.{digits}g}"
        if shown[0] != shown[1]:
            break
    return f"actual {shown[0]}, expected {shown[1]}"
