"""Distance of an output from the truth: attn-export's rule.

With everything widened to float64, the distance relative to the truth is taken over the whole
output and over each row of the last axis. Rows that are 0 must be exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

PASSED, FAILED, UNUSABLE = "ok  ", "FAIL", "unusable"

WHOLE, ROW = 2.0**17, 2.0**20
"""The largest allowed errors of an output and of a row, in units of eps of its dtype."""

MOST_WHOLE, MOST_ROW = 1 / 8, 1 / 2
"""The same as shares of the output."""


@dataclass(frozen=True)
class Verdict:
    """Result of an output: the error as a share of the allowed error, and the reason of failure."""

    status: str
    share: float = 0.0
    why: str = ""


def judge(
    got: np.ndarray,
    truth: np.ndarray,
    allowed: Mapping[str, float] | None,
    unusable: str | None = None,
    ignored_rows: Sequence[int] = (),
) -> Verdict:
    """Compare an output with its truth.

    Args:
        got: The output of the engine.
        truth: The right output.
        allowed: Relative errors: ``whole`` and ``row``; None where it must be equal.
        unusable: Why the output is no evidence, if it is none.
        ignored_rows: Rows of the batch that are not compared.
    """
    if got.dtype != truth.dtype:
        return Verdict(FAILED, why=f"dtype is {got.dtype}, expected {truth.dtype}")
    if got.shape != truth.shape:
        return Verdict(FAILED, why=f"shape is {list(got.shape)}, expected {list(truth.shape)}")
    if ignored_rows and got.ndim:
        got = got.copy()
        got[list(ignored_rows)] = truth[list(ignored_rows)]
    if unusable is not None:
        return Verdict(UNUSABLE, why=unusable)
    if truth.dtype.kind != "f":
        wrong = int(np.sum(got != truth))
        return Verdict(FAILED, why=f"{wrong} elements differ") if wrong else Verdict(PASSED)
    return _judge_numbers(got, truth, allowed)


def beyond_limit(allowed: Mapping[str, float], dtype: np.dtype) -> str:
    """Return why an allowed error is too large for evidence, or "" where it is not."""
    step = max(float(np.finfo(dtype).eps), float(np.finfo(np.float32).eps))
    limit = {"whole": min(WHOLE * step, MOST_WHOLE), "row": min(ROW * step, MOST_ROW)}
    for name, most in limit.items():
        if not allowed[name] <= most:  # so that NaN is too large
            return (
                f"no evidence: an error of {allowed[name]:.2g} ({name}) would be allowed, and "
                f"{most:.2g} is the most for {dtype.name}"
            )
    return ""


def _judge_numbers(
    got: np.ndarray, truth: np.ndarray, allowed: Mapping[str, float] | None
) -> Verdict:
    r, t = np.atleast_1d(got.astype(np.float64)), np.atleast_1d(truth.astype(np.float64))
    for what, of in (("NaN", np.isnan), ("+Inf", np.isposinf), ("-Inf", np.isneginf)):
        if np.any(of(r) != of(t)):
            return Verdict(FAILED, why=f"{what} in other places than the truth has them")
    usable = np.isfinite(t)
    r, t = np.where(usable, r, 0.0), np.where(usable, t, 0.0)
    if np.any(r[(t == 0).all(axis=-1)]):
        return Verdict(FAILED, why="a row that has to be 0 is not")
    if allowed is None:
        return Verdict(FAILED, why="the golden vectors do not say what error is allowed")
    beyond = beyond_limit(allowed, truth.dtype)
    if beyond:
        return Verdict(UNUSABLE, why=beyond)
    largest = np.abs(t).max(initial=0.0)
    return _within(r / largest, t / largest, allowed) if largest else Verdict(PASSED)


def _within(r: np.ndarray, t: np.ndarray, allowed: Mapping[str, float]) -> Verdict:
    of_truth, off = (np.square(x).sum(axis=-1) for x in (t, r - t))
    rows = of_truth > 0
    found = {
        "whole": float(np.sqrt(off.sum() / of_truth.sum())),
        "row": float(np.sqrt((off[rows] / of_truth[rows]).max())),
    }
    share = max(found[name] / allowed[name] for name in found)
    for name, error in found.items():
        if not error <= allowed[name]:
            why = f"relative error {error:.2e} ({name}), allowed {allowed[name]:.2e}"
            return Verdict(FAILED, share, why)
    return Verdict(PASSED, share)
