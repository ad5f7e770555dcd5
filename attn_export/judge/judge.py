"""Verdicts on a runtime's outputs of a case: the rule of `rule.py`, ties, and the user's gate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from attn_export.dialect_names import CUDA, STANDARD
from attn_export.errors import counted
from attn_export.measures import Measures, fill_ignored_rows
from attn_export.results import Arrays, Detail, Golden, Verdict
from attn_export.rule import (
    TIES,
    TIES_ADVICE,
    Judgement,
    describe_wrong,
    for_narrow_products,
    judge_array,
    largest_tolerance,
)
from attn_export.runtimes.run_options import Gate
from attn_export.tensorfile import is_floating

_BLOCK = 2**22
"""The number of elements whose differences are in memory at once."""


def judge(
    runtime: str,
    graph: str,
    golden: Golden,
    outputs: Arrays,
    gate: Gate | None = None,
    dialect: str = STANDARD,
) -> list[Verdict]:
    """Return a verdict for each output of one case, which is compared with its reference."""
    verdicts = []
    for name in {**golden.expected, **outputs}:
        verdict = Verdict(runtime, graph, golden.case.name, name, "passed")
        if name not in outputs:
            verdict = _failed(verdict, f"the output {name} is missing")
        elif name not in golden.expected:
            verdict = _failed(verdict, f"unexpected output {name}")
        else:
            compared = _stored_rows(golden, name, outputs[name])
            found = _judge_output(verdict, *compared, gate or Gate(), dialect)
            if found.status != "passed" and compared[0] is not golden:
                # The message says where in the whole output.
                found = _judge_output(verdict, golden, outputs[name], gate or Gate(), dialect)
            verdict = found
        verdicts.append(verdict)
    return verdicts


def _judge_output(
    verdict: Verdict, golden: Golden, got: np.ndarray, gate: Gate, dialect: str
) -> Verdict:
    name = verdict.output
    reference, eager, tolerance = golden.expected[name], golden.eager[name], golden.tolerance[name]
    uncompared, tied = golden.uncompared.get(name), golden.tied.get(name)
    comparable = (got.dtype, got.shape) == (reference.dtype, reference.shape)
    ignored = golden.case.ignored_rows, golden.determined.get(name, ())
    if comparable:
        got, eager = (fill_ignored_rows(x, reference, *ignored) for x in (got, eager))
    floating = is_floating(reference.dtype)
    if comparable and not floating and tied is not None:
        wrong = got != reference
        # Elements that ties do not decide must be equal.
        if (wrong & ~tied).any():
            got, uncompared = np.where(tied, reference, got), None
        elif wrong.any():
            return dataclasses.replace(verdict, status="unusable", message=_ties(wrong))
    limits = Measures(tolerance.whole, tolerance.row) if tolerance else None
    if limits and reference.dtype.name == "bfloat16" and dialect == CUDA:
        limits = for_narrow_products(limits, eager, reference)
    if golden.budgets:
        limits = largest_tolerance(reference.dtype) if floating else None
    found = judge_array(got, reference, limits, uncompared, has_limit=not golden.rounds_inputs)
    if golden.budgets and found.errors is not None and tolerance and math.isinf(tolerance.whole):
        found = Judgement("passed", "", found.errors)
    errors = dataclasses.asdict(found.errors) if found.errors else {}
    verdict = dataclasses.replace(
        verdict, status=found.status, message=found.message, worst=found.worst, **errors
    )
    if comparable and floating and uncompared is None:
        verdict = _with_differences(verdict, got, eager)
        return _through_gate(verdict, got, eager, gate) if verdict.status == "passed" else verdict
    if not floating and verdict.status == "passed":
        return dataclasses.replace(verdict, max_abs=0.0, max_rel=0.0)
    return verdict


def _stored_rows(golden: Golden, name: str, got: np.ndarray) -> tuple[Golden, np.ndarray]:
    """Return a case, and an output of a runtime, with the rows alone that are stored, if any."""
    rows, reference = list(golden.determined.get(name, ())), golden.expected[name]
    is_stored = rows and reference.ndim and len(golden.case.ignored_rows) == len(reference)
    if not is_stored or (got.dtype, got.shape) != (reference.dtype, reference.shape):
        return golden, got

    def some(array: np.ndarray) -> np.ndarray:
        return np.asarray(array.reshape(-1, array.shape[-1])[rows])

    reduced = dataclasses.replace(
        golden, case=dataclasses.replace(golden.case, ignored_rows=()), determined={},
        expected={name: some(reference)}, eager={name: some(golden.eager[name])},
    )  # fmt: skip
    return reduced, some(got)


def _ties(wrong: np.ndarray) -> str:
    return (
        f"{TIES}: {int(wrong.sum())} of {counted(wrong.size, 'element')} differ, only where the "
        "values behind them are equal or nearer to each other than rounding; "
        f"{TIES_ADVICE}"
    )


def _through_gate(verdict: Verdict, got: np.ndarray, eager: np.ndarray, gate: Gate) -> Verdict:
    if gate == Gate():
        return verdict
    r, e = got.astype(np.float64), eager.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Inf - Inf, where both are infinite
        excess = np.abs(r - e) - (gate.rtol or 0.0) * np.abs(e)
    over = np.where(np.isfinite(e), excess, 0.0) > (gate.atol or 0.0)
    if not over.any():
        return verdict
    limits = f"--atol {gate.atol or 0:g} --rtol {gate.rtol or 0:g}"
    return _failed(verdict, f"outside {limits} of eager; {describe_wrong(over, r, e)}")


def _with_differences(verdict: Verdict, got: np.ndarray, eager: np.ndarray) -> Verdict:
    found = [(0.0, 0.0)]
    for start in range(0, got.size, _BLOCK):
        r, e = (x.reshape(-1)[start : start + _BLOCK].astype(np.float64) for x in (got, eager))
        usable = np.isfinite(e)
        if not usable.all():
            r, e = r[usable], e[usable]
        difference, scale = np.abs(r - e), np.abs(e)
        relative = np.divide(difference, scale, out=np.zeros_like(scale), where=scale > 0)
        found.append((float(difference.max(initial=0.0)), float(relative.max(initial=0.0))))
    largest = np.max(found, axis=0)
    return dataclasses.replace(verdict, max_abs=float(largest[0]), max_rel=float(largest[1]))


def _failed(verdict: Verdict, message: str) -> Verdict:
    return dataclasses.replace(verdict, status="failed", message=message)


def undetermined_note(goldens: Sequence[Golden]) -> tuple[str, ...]:
    """Return notes on the batch elements with NaN or Inf in rows that are not compared, if any."""
    places = dict[str, list[str]]()
    for golden in goldens:
        for name, reference in golden.expected.items():
            has_rows = is_floating(reference.dtype) and reference.ndim and reference.size
            ignored = golden.case.ignored_rows if has_rows else ()
            compared, rows = golden.determined.get(name, ()), []
            for row in ignored:
                finite = np.isfinite(np.atleast_2d(reference[row])).all(-1).ravel()
                first = row * finite.size
                if any(first + int(n) not in compared for n in np.flatnonzero(~finite)):
                    rows.append(row)
            if rows:
                places.setdefault(golden.case.name, []).append(f"{name}{rows}")
    if not places:
        return ()
    cases = "; ".join(f"{', '.join(of)} in {case}" for case, of in places.items())
    count = counted(len(places), "case")
    return (
        f"not compared: NaN/Inf rows on which correct runtimes may differ, in {count}",
        Detail(f"batch elements with NaN/Inf rows that are not compared: {cases}"),
    )


def name_output_axes(shape: Sequence[int | str], count: int) -> tuple[str, ...]:
    """Return a name for each axis of an output.

    `shape`: The name of each dynamic axis and the size of each other one; empty if unknown.
    """
    if len(shape) != count:
        return tuple(f"axis {axis}" for axis in range(count))
    names = []
    for axis, size in enumerate(shape):
        if isinstance(size, str):
            names.append(size)
        elif count == 4 and axis == 1:
            names.append("head")  # [B, H, L, S] and [B, Hkv, S, D]
        else:
            names.append("element" if axis == count - 1 else f"axis {axis}")
    return tuple(names)
