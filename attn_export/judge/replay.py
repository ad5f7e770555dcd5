"""Judgement of the runtimes' outputs, case by case, and a map of the worst error of each graph."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from attn_export.bundle.quality_vectors import Sums
from attn_export.error_maps import Cells, ErrorMap, ErrorProfile, RelativeTo
from attn_export.errors import counted
from attn_export.judge.judge import judge, name_output_axes
from attn_export.measures import (
    Index,
    fill_ignored_rows,
    row_norms,
    scaled_differences,
    worst_index,
    wrong_kinds,
)
from attn_export.quality import Budget, Quality, is_finite, is_logits
from attn_export.results import Arrays, Detail, Golden, RuntimeRun, Verdict
from attn_export.runtimes.pool import Pool
from attn_export.runtimes.process import CaseResult, Worker
from attn_export.runtimes.protocol import SEPARATE_BUFFERS
from attn_export.runtimes.run_options import Gate, RunOptions
from attn_export.schema import GraphFile, Tolerance
from attn_export.tensorfile import is_floating

if TYPE_CHECKING:
    from attn_export.interface import Shape

# -- maps of the errors in outputs, for the worst verdict ------------------------------------

CELLS = 48
"""The largest number of rows and columns of a heat map."""


class Worst:
    """Record of the worst verdict of a runtime with a graph, which gets an error map.

    The attention weights of its case get one too, where another output has them.
    """

    def __init__(self) -> None:
        self._rank = (False, -1.0)
        self._worst: list[tuple[Verdict, Golden, np.ndarray]] = []

    def update(self, verdicts: Sequence[Verdict], golden: Golden, outputs: Arrays) -> None:
        """Replace the record if a verdict of a case is worse; any failure is worse than a pass."""
        before = self._rank
        for verdict in verdicts:
            failed = verdict.status == "failed"
            if verdict.worst is None and not failed:
                continue
            worst = math.inf if verdict.worst is None else verdict.worst
            rank = (failed, math.inf if math.isnan(worst) else worst)
            if rank > self._rank and (got := _comparable(verdict, golden, outputs)) is not None:
                self._rank, self._worst = rank, [(verdict, golden, got)]
        if self._rank != before and not _are_weights(golden.expected[self._worst[0][0].output]):
            for verdict in verdicts:
                got = _comparable(verdict, golden, outputs)
                if got is not None and _are_weights(golden.expected[verdict.output]):
                    self._worst.append((verdict, golden, got))
                    return

    def error_maps(self, axes: Mapping[str, Shape]) -> tuple[ErrorMap, ...]:
        """Return the error maps, the worst verdict first, given the shapes of outputs."""
        return tuple(
            _error_map(verdict, golden, got, axes.get(verdict.output, ()))
            for verdict, golden, got in self._worst
        )


def _comparable(verdict: Verdict, golden: Golden, outputs: Arrays) -> np.ndarray | None:
    """Return the output of a verdict if it has elements, and is like the reference."""
    got, reference = outputs.get(verdict.output), golden.expected.get(verdict.output)
    if got is None or reference is None or not reference.size:
        return None
    return got if (got.shape, got.dtype) == (reference.shape, reference.dtype) else None


def _are_weights(reference: np.ndarray) -> bool:
    """Return whether rows are weights of keys, by their values: none is below 0, each sums to 1.

    The weights of a row whose keys are all masked are 0.
    """
    if reference.ndim < 3 or not is_floating(reference.dtype):
        return False
    rows = reference.reshape(-1, reference.shape[-1])
    for some in (rows[:1], rows):  # the first row rules out most other outputs
        if not (some >= 0).all():
            return False
        sums = some.sum(axis=-1, dtype=np.float64)
        if not np.all((np.abs(sums - 1) < 0.05) | (sums == 0)):
            return False
    return bool(rows.any())


def _error_map(verdict: Verdict, golden: Golden, got: np.ndarray, shape: Shape) -> ErrorMap:
    """Return a map of the errors in one output.

    `got`: The runtime's output, of the reference's shape and type, with at least one element.
    `shape`: The shape of the output; dynamic axes by name.
    """
    reference = golden.expected[verdict.output]
    compared = golden.determined.get(verdict.output, ())
    got = fill_ignored_rows(got, reference, golden.case.ignored_rows, compared)
    if is_floating(reference.dtype):
        r, t = got.astype(np.float64), reference.astype(np.float64)
        tolerance = golden.tolerance.get(verdict.output) or Tolerance(1.0, 1.0)
        by_row = _is_by_row(verdict, tolerance)
        wrong = next((mask for _, mask in wrong_kinds(r, t) if mask.any()), None)
        shares, index = _shares(r, t, tolerance, by_row=by_row), worst_index(r, t, by_row=by_row)
    else:
        r, t, by_row, wrong = got, reference, False, got != reference
        shares, index = np.zeros(reference.shape), (0,) * reference.ndim
    if wrong is not None and wrong.any():
        first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        index = tuple(int(i) for i in first)
        relative_to: RelativeTo = "kind"
    else:
        relative_to, wrong = "row" if by_row else "whole", np.zeros(reference.shape, bool)
    names = name_output_axes(shape, reference.ndim)
    values = (f"{r[index]:.9g}", f"{t[index]:.9g}")
    location = (golden.case.name, verdict.output, names, reference.shape, index)
    row, column = (0, 0, *index)[-2:]
    cell = (row // _step(r.shape[-2] if r.ndim > 1 else 1), column // _step((1, *r.shape)[-1]))
    shares = np.where(wrong, np.nan, shares)
    right, actual, difference = (_cells(_at(array, index)) for array in (t, r, shares))
    profiles = _profiles(shares, names)
    return ErrorMap(*location, *values, relative_to, cell, right, actual, difference, profiles)


def _is_by_row(verdict: Verdict, tolerance: Tolerance) -> bool:
    """Return whether the error of a row decides the verdict, as in the failure message."""
    if verdict.whole is None or verdict.row is None:
        return True
    whole = verdict.whole / tolerance.whole
    return whole <= 1 and whole <= verdict.row / tolerance.row


def _shares(r: np.ndarray, t: np.ndarray, tolerance: Tolerance, *, by_row: bool) -> np.ndarray:
    """Return each element's error as a share of the L2 tolerance of its row or the whole."""
    d, norms = scaled_differences(r, t), row_norms(np.atleast_1d(t))
    if by_row:
        limit = np.where(norms > 0, norms, np.inf)[..., None] * tolerance.row
    else:
        limit = np.asarray((float(np.linalg.norm(norms)) or np.inf) * tolerance.whole)
    return np.asarray((np.atleast_1d(d) / limit).reshape(d.shape))


def _at(array: np.ndarray, index: Index) -> np.ndarray:
    """Return the last two axes of an array at an index, in float64."""
    found = np.asarray(array[index[:-2]], np.float64)
    return found.reshape((1,) * (2 - found.ndim) + found.shape)


def _cells(values: np.ndarray) -> Cells:
    """Return a heat map: of each cell the element of the largest magnitude, with its sign."""
    for axis, size in enumerate(values.shape):
        starts = np.arange(0, size, _step(size))
        most, least = (f.reduceat(values, starts, axis=axis) for f in (np.maximum, np.minimum))
        values = np.where(-least > most, least, most)  # both are NaN where an element is
    return tuple(tuple(map(_rounded, line)) for line in values.tolist())


def _profiles(shares: np.ndarray, names: Sequence[str]) -> tuple[ErrorProfile, ...]:
    """Return the largest error of a row at each place of each axis but the last."""
    rows = np.linalg.norm(shares, axis=-1) if shares.ndim else shares
    found = []
    for axis, (name, size) in enumerate(zip(names, rows.shape, strict=False)):
        others = tuple(other for other in range(rows.ndim) if other != axis)
        if size > 1:
            (values,) = _cells(rows.max(axis=others)[None])
            found.append(ErrorProfile(name, values))
    return tuple(found)


def _step(size: int) -> int:
    return -(-size // CELLS)


def _rounded(value: float) -> float | None:
    # Two digits are more than a colour shows.
    return float(f"{value:.2g}") if math.isfinite(value) else None


# -- judgement of the runtimes' outputs as they arrive ------------------------------------------


def judge_pool(
    pool: Pool, goldens: Sequence[Golden], axes: Mapping[str, Shape], budgets: Sequence[Budget] = ()
) -> tuple[tuple[RuntimeRun, ...], tuple[Verdict, ...], Quality | None]:
    """Wait for the runtimes, and compare the outputs of each case with its reference.

    `axes`: The shape of each output, by name; dynamic axes by name.
    `budgets`: The limits of the distance from the float model, for graphs that round inputs.

    Returns:
        The runs, the verdicts on all outputs, and the distances that budgets limit, if any.
    """
    runs, distances = pool.absent(), None
    if goldens[0].budgets or any(file.exact for file in pool.files):
        distances = RuntimeDistances(pool.run.budgets or goldens[0].budgets or budgets)
    verdicts: list[Verdict] = []
    by_name = {golden.case.name: golden for golden in goldens}
    assert len(by_name) == len(goldens), "two cases of one name"
    for (name, graph), worker in pool.workers.items():
        count = pool.cases_of(graph)
        # A runtime that can run here must pass; only an absent one may be optional.
        facts: dict[str, object] = {"version": worker.runtime.version()}
        cases: Mapping[str, Golden] = by_name
        if not worker.runtime.keeps_non_finite:
            cases = {name: _without_non_finite(golden) for name, golden in by_name.items()}
            facts["NaN and Inf"] = "not compared"
        judged, worst, seconds = _judge_worker(
            worker, pool.file_of(graph), count, cases, pool.run, distances
        )
        verdicts += judged
        facts |= worker.facts
        required = worker.outcome != "not run"
        maps = worst.error_maps(axes) if worker.outcome != "refused" else ()
        runs.append(
            RuntimeRun(name, graph, worker.outcome, worker.reason, required, facts, maps, seconds)
        )
    return tuple(runs), tuple(verdicts), distances.quality() if distances else None


def _without_non_finite(golden: Golden) -> Golden:
    """Return the case without rows of batch elements that have NaN or Inf; padding is neither."""
    inputs = [array for array in golden.case.inputs.values() if is_floating(array.dtype)]
    if not golden.determined or all(np.isfinite(array).all() for array in inputs):
        return golden
    return dataclasses.replace(golden, determined={})


def buffers_note(graphs: Iterable[GraphFile]) -> tuple[str, ...]:
    """Return a note on the runs with separate buffers, if one of the graphs has them."""
    if not any(file.bound for file in graphs):
        return ()
    return (
        Detail(
            "caches in place: runtimes that let past and present share a buffer ran each case "
            "a second time, with separate ones"
        ),
    )


def _judge_worker(
    worker: Worker,
    graph: GraphFile,
    expected_count: int,
    goldens: Mapping[str, Golden],
    run: RunOptions,
    distances: RuntimeDistances | None,
) -> tuple[list[Verdict], Worst, dict[str, float]]:
    """Return the verdicts on a worker, the worst of them, and the seconds of each case.

    The worker's outcome is set if it did not serve all cases.
    """
    name = worker.runtime.name
    verdicts: list[Verdict] = []
    worst, seconds, served_count = Worst(), dict[str, float](), 0
    for served in worker.results():
        served_count += 1
        if served.seconds is not None:
            seconds[served.case] = round(served.seconds, 6)
        if served.error:
            verdicts.append(Verdict(name, graph.name, served.case, "", "error", served.error))
        else:
            golden = goldens[served.case].of_graph(graph)
            judged, outputs = _judge_case(name, graph, golden, served, run.gate)
            worst.update(judged, golden, outputs)
            if distances and (golden.budgets or (golden.rounds_inputs and golden.floats)):
                distances.add(judged, golden, outputs)
            verdicts += judged
        run.progress.advance(f"{name}: {served.case}")
    if worker.outcome == "ran" and served_count < expected_count:
        worker.outcome = "crashed"
        worker.reason = f"served {served_count} of {counted(expected_count, 'case')}"
    if worker.outcome == "ran" and not expected_count:
        worker.outcome, worker.reason = "not run", "no case has the sizes that it is for"
    if worker.outcome == "refused":
        # It ran, but not on the device that was named: none of its outputs count.
        reason = worker.reason
        verdicts = [dataclasses.replace(v, status="error", message=reason) for v in verdicts]
    return verdicts, worst, seconds


def _judge_case(
    runtime: str, graph: GraphFile, golden: Golden, result: CaseResult, gate: Gate
) -> tuple[list[Verdict], Arrays]:
    """Return the verdicts on a case, and the outputs that they are about.

    They are those of the run with separate buffers if it alone fails.
    """
    outputs = result.read_outputs()
    judged = judge(runtime, graph.name, golden, outputs, gate, graph.dialect)
    if not result.separate or _any_failed(judged):
        return judged, outputs
    separate = result.read_separate()
    judged_separate = judge(runtime, graph.name, golden, separate, gate, graph.dialect)
    if not _any_failed(judged_separate):
        return judged, outputs
    says = [
        dataclasses.replace(v, message=f"{SEPARATE_BUFFERS}: {v.message}") if v.message else v
        for v in judged_separate
    ]
    return says, separate


def _any_failed(verdicts: Sequence[Verdict]) -> bool:
    return any(verdict.status == "failed" for verdict in verdicts)


class RuntimeDistances:
    """Sums over the cases that budgets judge, by runtime and output. No output is kept."""

    def __init__(self, budgets: Sequence[Budget]) -> None:
        self._budgets = tuple(budgets)
        self._sums: dict[tuple[str, str], Sums] = {}

    def add(self, verdicts: Sequence[Verdict], golden: Golden, outputs: Arrays) -> None:
        """Add the floating outputs of a case, in the rows that are compared.

        Those with a wrong shape, type, NaN or infinity failed already.
        """
        for verdict in verdicts:
            if verdict.whole is not None:
                name = verdict.output
                reference = (golden.floats if golden.rounds_inputs else golden.expected)[name]
                compared = golden.case.ignored_rows, golden.determined.get(name, ())
                got = fill_ignored_rows(outputs[name], reference, *compared)
                sums = self._sums.setdefault((name, verdict.runtime), Sums())
                sums.add(reference, got, as_logits=is_logits(name))

    def quality(self) -> Quality | None:
        """Return the distances; None if no output could be measured."""
        if not self._sums:
            return None
        named = [(n, f"{n} in {runtime}", sums) for (n, runtime), sums in self._sums.items()]
        outputs = [sums.distance(part) for _, part, sums in named]
        logits = [sums.logits(part) for name, part, sums in named if is_logits(name)]
        kept = tuple(filter(is_finite, outputs))
        return Quality(kept, self._budgets, tuple(logits))
