"""How far an output may be from the truth: attn-export's rule.

With everything widened to float64, the distance relative to the truth is taken over the whole
output and over each row of the last axis. Rows that are 0 have to be exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def judge(
    got: np.ndarray, truth: np.ndarray, allowed: Mapping[str, float] | None
) -> tuple[str, float]:
    """Compare an output with its truth.

    Args:
        got: What the engine gave.
        truth: What it should be.
        allowed: Relative errors: ``whole`` and ``row``; None where it has to be equal.

    Returns:
        What is wrong, "" where nothing is, and the error as a share of what is allowed.
    """
    if got.dtype != truth.dtype:
        return f"dtype is {got.dtype}, expected {truth.dtype}", np.inf
    if got.shape != truth.shape:
        return f"shape is {list(got.shape)}, expected {list(truth.shape)}", np.inf
    if truth.dtype.kind != "f":
        same = np.array_equal(got, truth)
        return ("", 0.0) if same else (f"{np.sum(got != truth)} elements differ", np.inf)
    r, t = np.atleast_1d(got.astype(np.float64)), np.atleast_1d(truth.astype(np.float64))
    for what, of in (("NaN", np.isnan), ("+Inf", np.isposinf), ("-Inf", np.isneginf)):
        if np.any(of(r) != of(t)):
            return f"{what} in other places than the truth has them", np.inf
    usable = np.isfinite(t)
    r, t = np.where(usable, r, 0.0), np.where(usable, t, 0.0)
    if np.any(r[(t == 0).all(axis=-1)]):
        return "a row that has to be 0 is not", np.inf
    largest = np.abs(t).max(initial=0.0)
    if not largest or allowed is None:
        return "", 0.0
    return _within(r / largest, t / largest, allowed)


def _within(r: np.ndarray, t: np.ndarray, allowed: Mapping[str, float]) -> tuple[str, float]:
    of_truth, off = (np.square(x).sum(axis=-1) for x in (t, r - t))
    rows = of_truth > 0
    found = {
        "whole": float(np.sqrt(off.sum() / of_truth.sum())),
        "row": float(np.sqrt((off[rows] / of_truth[rows]).max())),
    }
    share = max(found[name] / allowed[name] for name in found)
    for name, error in found.items():
        if not error <= allowed[name]:
            return f"relative error {error:.2e} ({name}), allowed {allowed[name]:.2e}", share
    return "", share
