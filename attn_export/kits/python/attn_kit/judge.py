"""Distance of an output from the truth: attn-export's rule.

With everything widened to float64, the distance relative to the truth is taken over the whole
output and over each row of the last axis. Rows that are 0 must be exactly 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from attn_kit.measures import beyond_limit, fill_ignored_rows, measure, wrong_kinds

PASSED, FAILED, UNUSABLE = "ok  ", "FAIL", "unusable"


@dataclasses.dataclass(frozen=True)
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
    got = fill_ignored_rows(got, truth, ignored_rows)
    if unusable is not None:
        return Verdict(UNUSABLE, why=unusable)
    if truth.dtype.kind != "f":
        wrong = int(np.sum(got != truth))
        return Verdict(FAILED, why=f"{wrong} elements differ") if wrong else Verdict(PASSED)
    return _judge_numbers(got, truth, allowed)


def _judge_numbers(
    got: np.ndarray, truth: np.ndarray, allowed: Mapping[str, float] | None
) -> Verdict:
    r, t = got.astype(np.float64), truth.astype(np.float64)
    for what, wrong in wrong_kinds(r, t):
        if wrong.any():
            return Verdict(FAILED, why=what)
    if allowed is None:
        return Verdict(FAILED, why="the golden vectors do not say what error is allowed")
    beyond = beyond_limit(allowed["whole"], allowed["row"], truth.dtype)
    if beyond:
        return Verdict(UNUSABLE, why=beyond)
    found = dataclasses.asdict(measure(r, t))
    share = max(found[name] / allowed[name] for name in found)
    for name, error in found.items():
        if not error <= allowed[name]:  # so that NaN fails
            why = f"relative error {error:.2e} ({name}), allowed {allowed[name]:.2e}"
            return Verdict(FAILED, share, why)
    return Verdict(PASSED, share)
