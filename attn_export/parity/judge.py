"""Rule by which an output of a runtime passes; docs/parity.md defines it.

In float64, with the truth t and the runtime's output r, ‖r − t‖ / ‖t‖ must not exceed the error
that the case allows, for the whole output and for each row of its last axis. Where a row of t is 0,
that row of r must be 0.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from attn_export.errors import counted
from attn_export.parity.gate import Gate
from attn_export.parity.measures import (
    beyond_limit,
    fill_ignored_rows,
    measure,
    worst_index,
    wrong_kinds,
)
from attn_export.results import Allowed, Arrays, Golden, Verdict
from attn_export.tensorfile import is_floating

TIES = "ties"
"""The start of messages on outputs that depend on the order of equal values."""

TIES_ADVICE = "return the values instead, or rank by torch.sort(stable=True), which ONNX follows"


def judge(
    runtime: str, graph: str, golden: Golden, outputs: Arrays, gate: Gate | None = None
) -> list[Verdict]:
    """Return a verdict for each output of one case, which is compared with its truth.

    Args:
        runtime: The name of the runtime.
        graph: The name of the graph's file.
        golden: The case with its truth.
        outputs: The runtime's outputs, by name.
        gate: Tolerances of the user, checked in addition to the rule.
    """
    verdicts = []
    for name in {**golden.expected, **outputs}:
        verdict = Verdict(runtime, graph, golden.case.name, name, "passed")
        if name not in outputs:
            verdict = _failed(verdict, f"the output {name} is missing")
        elif name not in golden.expected:
            verdict = _failed(verdict, f"unexpected output {name}")
        else:
            verdict = _judge_output(verdict, golden, outputs[name], gate or Gate())
        verdicts.append(verdict)
    return verdicts


def _judge_output(verdict: Verdict, golden: Golden, got: np.ndarray, gate: Gate) -> Verdict:
    name = verdict.output
    truth, eager = golden.expected[name], golden.eager[name]
    for attribute, expected, actual in (
        ("dtype", truth.dtype, got.dtype),
        ("shape", list(truth.shape), list(got.shape)),
    ):
        if expected != actual:
            return _failed(verdict, f"{attribute} is {actual}, expected {expected}")
    got = fill_ignored_rows(got, truth, golden.case.ignored_rows)
    if not is_floating(truth.dtype):
        return _equal(verdict, got, truth, golden)
    if name in golden.unusable:
        return _unusable(verdict, golden.unusable[name])
    eager = fill_ignored_rows(eager, truth, golden.case.ignored_rows)
    r, t, e = (array.astype(np.float64) for array in (got, truth, eager))
    verdict = _with_differences(verdict, r, e)
    problem = _non_finite_or_zero_problem(r, t)
    if problem:
        nan = (np.isnan(r) != np.isnan(t)).any()
        verdict = dataclasses.replace(verdict, worst=math.nan if nan else math.inf)
        return _failed(verdict, problem)
    allowed = golden.allowed[name]
    if allowed is None:
        return _failed(verdict, "the golden vectors do not say what error is allowed")
    beyond = beyond_limit(allowed.whole, allowed.row, truth.dtype)
    if beyond:
        return _unusable(verdict, beyond)
    if t.size:
        verdict = _within(verdict, r, t, allowed)
    if verdict.status == "passed" and gate != Gate():
        verdict = _through_gate(verdict, r, e, gate)
    return verdict


def _equal(verdict: Verdict, got: np.ndarray, truth: np.ndarray, golden: Golden) -> Verdict:
    wrong = got != truth
    # Elements that ties do not decide must be equal.
    tied = golden.tied.get(verdict.output)
    if tied is not None and wrong.any() and not (wrong & ~tied).any():
        count = f"{int(wrong.sum())} of {counted(wrong.size, 'element')}"
        return _unusable(
            verdict,
            f"{TIES}: {count} differ, only where the values behind them are equal or nearer to "
            f"each other than rounding; {TIES_ADVICE}",
        )
    if wrong.any() and (tied is not None or verdict.output not in golden.unusable):
        return _failed(verdict, _where(wrong if tied is None else wrong & ~tied, got, truth))
    if verdict.output in golden.unusable:
        return _unusable(verdict, golden.unusable[verdict.output])
    return dataclasses.replace(verdict, max_abs=0.0, max_rel=0.0)


def _within(verdict: Verdict, r: np.ndarray, t: np.ndarray, allowed: Allowed) -> Verdict:
    errors = measure(r, t)
    verdict = dataclasses.replace(
        verdict,
        whole=errors.whole,
        row=errors.row,
        worst=max(errors.whole / allowed.whole, errors.row / allowed.row),
    )
    if not errors.whole <= allowed.whole:  # so that NaN fails
        error, limit, over = errors.whole, allowed.whole, "the whole output"
    elif not errors.row <= allowed.row:
        error, limit, over = errors.row, allowed.row, "one row"
    else:
        return verdict
    index = worst_index(r, t, by_row=over == "one row")
    worst = f"worst at {list(index)}: {_values(r[index], t[index])}"
    return _failed(verdict, f"relative error {error:.2e} over {over}, allowed {limit:.2e}; {worst}")


def _through_gate(verdict: Verdict, r: np.ndarray, e: np.ndarray, gate: Gate) -> Verdict:
    with np.errstate(invalid="ignore"):  # Inf - Inf, where both are infinite
        excess = np.abs(r - e) - (gate.rtol or 0.0) * np.abs(e)
    over = np.where(np.isfinite(e), excess, 0.0) > (gate.atol or 0.0)
    if not over.any():
        return verdict
    limits = f"--atol {gate.atol or 0:g} --rtol {gate.rtol or 0:g}"
    return _failed(verdict, f"outside {limits} of eager; {_where(over, r, e)}")


def _with_differences(verdict: Verdict, r: np.ndarray, e: np.ndarray) -> Verdict:
    usable = np.isfinite(e)
    if not usable.all():
        r, e = r[usable], e[usable]
    difference, scale = np.abs(r - e), np.abs(e)
    relative = np.divide(difference, scale, out=np.zeros_like(scale), where=scale > 0)
    return dataclasses.replace(
        verdict,
        max_abs=float(difference.max(initial=0.0)),
        max_rel=float(relative.max(initial=0.0)),
    )


def _non_finite_or_zero_problem(r: np.ndarray, t: np.ndarray) -> str:
    for problem, wrong in wrong_kinds(r, t):
        if wrong.any():
            return f"{problem}; {_where(wrong, r, t)}"
    return ""


def _where(wrong: np.ndarray, got: np.ndarray, expected: np.ndarray) -> str:
    """Describe the number of wrong elements, and the index and the values of the first."""
    index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    at = [int(i) for i in index]
    return (
        f"{int(wrong.sum())} of {counted(wrong.size, 'element')}, the first at {at}: "
        f"{_values(got[index], expected[index])}"
    )


def _values(actual: Any, expected: Any) -> str:
    """Format two values with as many digits as are needed to show that they differ."""
    for digits in (6, 9, 17):
        shown = f"{actual:.{digits}g}", f"{expected:.{digits}g}"
        if shown[0] != shown[1]:
            break
    return f"actual {shown[0]}, expected {shown[1]}"


def _unusable(verdict: Verdict, message: str) -> Verdict:
    return dataclasses.replace(verdict, status="unusable", message=message)


def _failed(verdict: Verdict, message: str) -> Verdict:
    return dataclasses.replace(verdict, status="failed", message=message)
