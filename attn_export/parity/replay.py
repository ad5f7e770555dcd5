"""Judgement of the runtimes' outputs, case by case, as they arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attn_export.errors import counted
from attn_export.parity.error_map import Shape, Worst
from attn_export.parity.gate import Gate
from attn_export.parity.judge import judge
from attn_export.results import Golden, RuntimeRun, Verdict
from attn_export.runtimes.pool import Pool, outputs_of
from attn_export.runtimes.process import Worker
from attn_export.tensorfile import read_outputs

Advance = Callable[[str], None]
"""Called with a few words for every case that is done."""


def judge_pool(
    pool: Pool,
    goldens: Sequence[Golden],
    axes: Mapping[str, Shape],
    out: Path,
    gate: Gate,
    advance: Advance,
) -> tuple[tuple[RuntimeRun, ...], tuple[Verdict, ...]]:
    """Wait for the runtimes, and compare each case with its truth.

    Args:
        pool: Started, on the cases of `goldens`.
        goldens: The truth.
        axes: For each output its shape, dynamic axes by name.
        out: The folder that the pool was given for outputs.
        gate: The user's own tolerances.
        advance: Called after every case.
    """
    runs = [
        RuntimeRun(a.runtime, a.graph, "not run", a.reason, a.required, {}) for a in pool.absent
    ]
    verdicts: list[Verdict] = []
    numbered = {golden.case.name: (i, golden) for i, golden in enumerate(goldens)}
    assert len(numbered) == len(goldens), "two cases of one name"
    for (name, graph), worker in pool.workers.items():
        given = pool.expected_of(graph)
        worst = Worst()
        seconds: dict[str, float] = {}
        verdicts += _judge_worker(
            worker, graph, given, numbered, out, gate, advance, worst, seconds
        )
        # What can run here has to: only an absent runtime may be forgiven.
        facts = {"version": worker.runtime.version(), **worker.facts}
        required = worker.outcome != "not run"
        place = worst.drawn(axes) if worker.outcome != "refused" else None
        runs.append(
            RuntimeRun(name, graph, worker.outcome, worker.reason, required, facts, place, seconds)
        )
    return tuple(runs), tuple(verdicts)


def _judge_worker(
    worker: Worker,
    graph: str,
    given: int,
    goldens: Mapping[str, tuple[int, Golden]],
    out: Path,
    gate: Gate,
    advance: Advance,
    worst: Worst,
    seconds: dict[str, float],
) -> list[Verdict]:
    name = worker.runtime.name
    verdicts: list[Verdict] = []
    served_count = 0
    for served in worker.served():
        served_count += 1
        if served.seconds is not None:
            seconds[served.case] = round(served.seconds, 6)
        if served.error:
            verdicts.append(Verdict(name, graph, served.case, "", "error", served.error))
        else:
            number, golden = goldens[served.case]
            outputs = read_outputs(outputs_of(out, name, graph, number), served.outputs)
            found = judge(name, graph, golden, outputs, gate)
            worst.see(found, golden, outputs)
            verdicts += found
        advance(f"{name}: {served.case}")
    if worker.outcome == "ran" and served_count < given:
        worker.outcome = "crashed"
        worker.reason = f"served {served_count} of {counted(given, 'case')}"
    if worker.outcome == "ran" and not given:
        worker.outcome, worker.reason = "not run", "no case has the sizes that it is for"
    if worker.outcome == "refused":
        # It ran, but not where it should have: none of it counts.
        return [dataclasses.replace(v, status="error", message=worker.reason) for v in verdicts]
    return verdicts
