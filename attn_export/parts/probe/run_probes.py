"""Comparison of a runtime, the ONNX reference evaluator and PyTorch on the same probes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from attn_export.dialect_names import PORTABLE, STANDARD
from attn_export.errors import RuntimeFailure, UsageError
from attn_export.parts.probe.findings import (
    NO_OPERATOR,
    RAN,
    SOMETHING_ELSE,
    Fingerprint,
    Probe,
    ProbeFinding,
    ProbeRow,
)
from attn_export.parts.probe.linear_probes import linear_probes
from attn_export.parts.probe.mask_probes import mask_probes, odd_input_probes, visible_key_probes
from attn_export.parts.probe.precision import precision_probes
from attn_export.parts.probe.probe_graphs import write_graph
from attn_export.results import Outcome, StoredCase
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.pool import Pool
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Limits, Runtime
from attn_export.runtimes.run_options import Progress, RunOptions
from attn_export.schema import GraphFile
from attn_export.system_info import environment
from attn_export.temp_folders import scratch
from attn_export.tensorfile import write_tensors

HUNG_AFTER = 60.0
"""The time limit of a graph or case in seconds. All are tiny; compiling one takes longest."""

REFERENCE = "onnx-reference"
_PYTORCH = "pytorch"


def probes() -> tuple[Probe, ...]:
    """Return all probes, in the order of the report."""
    return (
        *visible_key_probes(), *mask_probes(), *precision_probes(), *linear_probes(),
        *odd_input_probes(),
    )  # fmt: skip


def probe(name: str, *, progress: Progress | None = None) -> Fingerprint:
    """Return what all probes find in a runtime; crashes, hangs and refusals are results, too."""
    progress = progress or Progress()
    try:
        target = runtime(name)
    except UsageError as error:
        # "all" is no choice here.
        raise UsageError(str(error).removesuffix(", all")) from error
    reason = target.unavailable()
    if reason:
        raise RuntimeFailure(f"{name} cannot run here: {reason}")
    limits = dataclasses.replace(Limits.default(), seconds=HUNG_AFTER)
    with scratch() as folder:
        rows = _probe_rows(target, probes(), folder, limits, progress)
    return Fingerprint(name, target.version() or "", rows, environment())


# -- runs of cases in the pool, with a fresh process after each crash ---------------------------

_CaseOutcome = tuple[Outcome, str, dict[str, np.ndarray]]
"""The outcome of one case, the reason that it is not ``"ran"``, and the outputs by name."""


def run_cases(
    run: RunOptions,
    graph: Path,
    file: GraphFile,
    cases: Sequence[StoredCase],
    inputs: Sequence[str],
) -> dict[tuple[str, str], _CaseOutcome]:
    """Return the outcome of each case by the names of runtime and case.

    If a process crashes or hangs within a case, that is the outcome of the case, and the remaining
    cases run in a fresh process. If it ends before the graph is loaded, that is the outcome of all
    its cases.
    """
    found: dict[tuple[str, str], _CaseOutcome] = {}
    remaining: list[tuple[Runtime, list[StoredCase]]] = []
    with Pool(run, [file]) as pool:
        pool.start(graph.parent, inputs, {}, cases)
        for (name, _), worker in pool.workers.items():
            outcomes = _outcomes(worker, cases, run.progress)
            found |= {(name, case): outcome for case, outcome in outcomes.items()}
            left = [case for case in cases if case.name not in outcomes]
            remaining += [(worker.runtime, left)] if left else []
    for stopped, left in remaining:
        again = dataclasses.replace(run, runtimes=(stopped,))
        found |= run_cases(again, graph, file, left, inputs)
    return found


def _outcomes(
    worker: Worker, cases: Sequence[StoredCase], progress: Progress
) -> dict[str, _CaseOutcome]:
    """Return the outcomes that a process decided: all, if it ended before its graph was loaded."""
    found: dict[str, _CaseOutcome] = {}
    for answer in worker.results():
        outputs = {} if answer.error else answer.read_outputs()
        found[answer.case] = ("refused" if answer.error else RAN, answer.error, outputs)
        progress.advance(answer.case)
    if worker.outcome == RAN:
        return found
    failure: _CaseOutcome = (worker.outcome, worker.reason, {})
    left = [case.name for case in cases if case.name not in found]
    if not left:  # it refused its results at the end, or crashed after all of them
        return dict.fromkeys(found, failure) if worker.outcome == "refused" else found
    for name in left[:1] if worker.loaded else left:
        found[name] = failure
        progress.advance(name)
    return found


# -- probes and their rows ----------------------------------------------------------------------

_Findings = dict[tuple[str, str, str], ProbeFinding]
"""Findings by the names of runtime, dialect and probe."""


def _probe_rows(
    target: Runtime, probes: Sequence[Probe], folder: Path, limits: Limits, progress: Progress
) -> tuple[ProbeRow, ...]:
    """Run all probes, and return a row for each, in their order."""
    cases = {p.name: _stored(p, folder / "inputs" / str(n)) for n, p in enumerate(probes)}

    def run(runtimes: Iterable[Runtime], dialect: str, chosen: Sequence[Probe]) -> _Findings:
        """Run probes of one graph."""
        graph = write_graph(chosen[0].graph, dialect, folder)
        if graph is None:
            return {}
        fitting = [each for each in {r.name: r for r in runtimes}.values()
                   if dialect in each.dialects and not each.unavailable()]  # fmt: skip
        progress.expect(len(fitting) * len(chosen))
        found = run_cases(
            RunOptions(tuple(fitting), frozenset(), limits=limits, progress=progress), graph,
            GraphFile(graph.name, dialect), [cases[p.name] for p in chosen], list(chosen[0].inputs),
        )  # fmt: skip
        by_name = {p.name: p for p in chosen}
        return {
            (name, dialect, case): _finding(by_name[case], dialect, folder, *outcome)
            for (name, case), outcome in found.items()
        }

    groups: dict[str, list[Probe]] = {}
    for each in probes:
        groups.setdefault(each.graph.name, []).append(each)
    found: _Findings = {}
    for group in groups.values():
        others = [REFERENCE, *([] if group[0].not_in_pytorch else [_PYTORCH])]
        compared = map(runtime, others if group[0].graph.dialect == STANDARD else [])
        found |= run([target, *compared], group[0].graph.dialect, group)
    if PORTABLE in target.dialects:
        for group in groups.values():
            unclear = [probe for probe in group if _unclear(_here(probe, target, found), probe)]
            found |= run([target], PORTABLE, unclear) if unclear else {}
    missing = runtime(_PYTORCH).unavailable()
    return tuple(
        ProbeRow(
            probe, _here(probe, target, found), found.get((REFERENCE, STANDARD, probe.name)),
            found.get((_PYTORCH, STANDARD, probe.name))
            or ProbeFinding(probe.not_in_pytorch or missing, outcome="not run"),
        )
        for probe in probes
    )  # fmt: skip


def _stored(probe: Probe, folder: Path) -> StoredCase:
    """Write the inputs of a probe."""
    folder.mkdir(parents=True)
    write_tensors(folder, "input", probe.inputs)
    return StoredCase(probe.name, folder, {}, "probe")


def _here(probe: Probe, target: Runtime, found: _Findings) -> tuple[ProbeFinding, ...]:
    """Return the findings of the runtime."""
    keys = [(target.name, dialect, probe.name) for dialect in (probe.graph.dialect, PORTABLE)]
    here = tuple(found[key] for key in keys if key in found)
    return here or (ProbeFinding(NO_OPERATOR, outcome="not run"),)


def _unclear(here: Iterable[ProbeFinding], probe: Probe) -> bool:
    """Return whether the portable dialect must run: no output, or not the specified one."""
    return any(
        finding.outcome != RAN or (probe.specified and finding.reading != probe.specified)
        for finding in here
    )


def _finding(
    probe: Probe, dialect: str, folder: Path, outcome: Outcome, reason: str,
    outputs: dict[str, np.ndarray],
) -> ProbeFinding:  # fmt: skip
    if outcome != RAN:
        return ProbeFinding(outcome, reason.replace(f"{folder}/", ""), dialect, outcome)
    if "output" not in outputs:
        return ProbeFinding(SOMETHING_ELSE, f"its outputs are {', '.join(outputs)}", dialect)
    found = probe.read(outputs["output"])
    return ProbeFinding(found.reading, found.detail, dialect)
