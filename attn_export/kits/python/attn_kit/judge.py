"""The rule of attn-export by which an output passes.

In float64, the L2 distance from the truth, relative to the truth, must be within the errors
allowed: over the whole output, and over each row of the last axis. Rows that are 0 in the truth
must be exactly 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from attn_kit.measures import beyond_limit, fill_ignored_rows, measure, wrong_kinds

PASSED, FAILED, UNUSABLE = "ok  ", "FAIL", "unusable"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of an output.

    Attributes:
        status: `PASSED`, `FAILED` or `UNUSABLE`.
        share: The error divided by the error allowed.
        why: The reason that it did not pass, or "".
    """

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
        truth: The true output.
        allowed: The relative errors allowed, ``whole`` and ``row``; None: it must be equal.
        unusable: The reason that the output is no evidence, or None.
        ignored_rows: Batch elements that are not compared.
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
    for reason, wrong in wrong_kinds(r, t):
        if wrong.any():
            return Verdict(FAILED, why=reason)
    if allowed is None:
        return Verdict(FAILED, why="the golden vectors do not say what error is allowed")
    beyond = beyond_limit(allowed["whole"], allowed["row"], truth.dtype)
    if beyond:
        return Verdict(UNUSABLE, why=beyond)
    errors = dataclasses.asdict(measure(r, t))
    share = max(errors[name] / allowed[name] for name in errors)
    for name, error in errors.items():
        if not error <= allowed[name]:  # so that NaN fails
            why = f"relative error {error:.2e} ({name}), allowed {allowed[name]:.2e}"
            return Verdict(FAILED, share, why)
    return Verdict(PASSED, share)
