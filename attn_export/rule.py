"""Rule by which an output passes; docs/parity.md defines it.

In float64, with the truth t and the output r, ‖r − t‖ / ‖t‖ must not exceed the error that the case
allows, for the whole output and for each row of its last axis. Where a row of t is 0, that row of r
must be 0. The Python kit ships this file, so it must not import anything of this package but
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

# -- the error allowed ---------------------------------------------------------------------------

EAGER = 4.0
"""The factor on eager's own error: eager may compute in narrower types than its tensors have."""

FLOOR = 2.0
"""The least allowed error, in units of eps."""

WHOLE, ROW = 2.0**17, 2.0**20
"""The largest allowed errors of an output and of a row, in units of eps of its dtype, or of float32
if that is larger."""

MOST_WHOLE, MOST_ROW = 1 / 8, 1 / 2
"""The largest allowed errors of any dtype: with larger ones, wrong outputs would pass."""

TIES = "ties"
"""The start of messages on outputs that depend on the order of equal values."""

TIES_ADVICE = "return the values instead, or rank by torch.sort(stable=True), which ONNX follows"


def largest_allowed(dtype: np.dtype) -> Measures:
    """Return the largest allowed errors of an output of a floating dtype.

    For float32 they are 1/64 of the whole output, and 1/8 of a row.
    """
    step = max(eps(dtype), EPS_FLOAT32)
    return Measures(min(WHOLE * step, MOST_WHOLE), min(ROW * step, MOST_ROW))


def for_narrow_products(limits: Measures, eager: np.ndarray, truth: np.ndarray) -> Measures:
    """Return the error allowed for a graph that computes in bfloat16, as eager does.

    `limits`: The error allowed for graphs that compute in float32 and round their outputs once.
    """
    own, least, most = measure(eager, truth), FLOOR * eps(truth.dtype), largest_allowed(truth.dtype)
    return Measures(
        min(max(limits.whole, EAGER * own.whole, least), most.whole),
        min(max(limits.row, EAGER * own.row, least), most.row),
    )


def beyond_limit(whole: float, row: float, dtype: np.dtype) -> str:
    """Return a message if an allowed error is too large for the case to be evidence, or ""."""
    limit = largest_allowed(dtype)
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
        errors: The distances from the truth, if they were measured.
        worst: The larger distance, divided by the error allowed. NaN for a wrong NaN, and infinite
            for other errors without a size. None if nothing was measured.
    """

    status: Literal["passed", "failed", "unusable"]
    message: str = ""
    errors: Measures | None = None
    worst: float | None = None


PASSED = Judgement("passed")


def judge_array(
    got: np.ndarray,
    truth: np.ndarray,
    allowed: Measures | None,
    unusable: str | None = None,
    ignored_rows: Sequence[int] = (),
    *,
    has_limit: bool = True,
) -> Judgement:
    """Compare an output with its truth.

    `got`: An output, of any shape.
    `truth`: The truth, of the type and shape that the output must have.
    `has_limit`: Whether an allowed error may be too large for the case to be evidence.

    Returns:
        The judgement, with the reason where the output did not pass.
    """
    if got.dtype != truth.dtype:
        return Judgement("failed", f"dtype is {got.dtype}, expected {truth.dtype}")
    if got.shape != truth.shape:
        return Judgement("failed", f"shape is {list(got.shape)}, expected {list(truth.shape)}")
    if unusable is not None:
        return Judgement("unusable", unusable)
    got = fill_ignored_rows(got, truth, ignored_rows)
    if truth.dtype.kind == "f" or truth.dtype.name == "bfloat16":
        limited = truth.dtype if has_limit else None
        return _judge_floats(got.astype(np.float64), truth.astype(np.float64), allowed, limited)
    wrong = got != truth
    return Judgement("failed", describe_wrong(wrong, got, truth)) if wrong.any() else PASSED


def _judge_floats(
    r: np.ndarray, t: np.ndarray, allowed: Measures | None, limited: np.dtype | None
) -> Judgement:
    for problem, wrong in wrong_kinds(r, t):
        if wrong.any():
            worst = math.nan if (np.isnan(r) != np.isnan(t)).any() else math.inf
            return Judgement("failed", f"{problem}; {describe_wrong(wrong, r, t)}", worst=worst)
    if allowed is None:
        return Judgement("failed", "the stored test cases give no tolerance")
    beyond = beyond_limit(allowed.whole, allowed.row, limited) if limited is not None else ""
    if beyond:
        return Judgement("unusable", beyond)
    if not t.size:
        return PASSED
    errors = measure(r, t)
    worst = max(errors.whole / allowed.whole, errors.row / allowed.row)
    if not errors.whole <= allowed.whole:  # so that NaN fails
        error, limit, over = errors.whole, allowed.whole, "the whole output"
    elif not errors.row <= allowed.row:
        error, limit, over = errors.row, allowed.row, "one row"
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
    `expected`: The truth, of the mask's shape.
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
