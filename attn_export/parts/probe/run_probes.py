"""Comparison of a runtime, the ONNX reference evaluator and PyTorch on the same probes."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from attn_export.dialect_names import ORT, PORTABLE, STANDARD
from attn_export.parts.probe.findings import (
    NO_OPERATOR,
    RAN,
    SOMETHING_ELSE,
    Probe,
    ProbeFinding,
    ProbeRow,
)
from attn_export.parts.probe.mask_probes import mask_probes, odd_input_probes, visible_key_probes
from attn_export.parts.probe.precision import precision_probes
from attn_export.parts.probe.probe_graphs import write_graph
from attn_export.results import Outcome
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.process import CaseFiles, Worker
from attn_export.runtimes.protocol import Limits, Runtime
from attn_export.tensorfile import write_tensors

# -- distribution of cases to processes, with a fresh one after each crash ----------------------

AT_ONCE = 2
"""The number of processes at once: one computes while another starts."""


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """Result of one case.

    Attributes:
        outcome: ``"ran"``, or the way in which it failed.
    """

    outcome: Outcome
    reason: str = ""
    outputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ProbeBatch:
    """Cases of one graph, which run in one process, or in several if it crashes."""

    start: Callable[[Sequence[CaseFiles]], Worker]
    cases: Sequence[CaseFiles]


def _start_worker(
    runtime: Runtime, limits: Limits, graph: Path, inputs: Sequence[str], cases: Sequence[CaseFiles]
) -> Worker:
    """Return a runtime's process, started on the cases of a graph."""
    worker = Worker(runtime, limits)
    worker.send_job(graph, inputs, cases)
    return worker


def run_batches(
    batches: Iterable[ProbeBatch], advance: Callable[[str], None] = lambda _: None
) -> dict[Path, ProbeResult]:
    """Return the results of batches of cases, by the output folders of the cases.

    If a process crashes or hangs within a case, that is the result of the case, and the remaining
    cases run in a fresh process. If it ends before the graph is loaded, that is the result of all
    its cases.
    """
    results: dict[Path, ProbeResult] = {}
    waiting = deque(batches)
    running: deque[tuple[ProbeBatch, Worker]] = deque()
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                batch = waiting.popleft()
                worker = batch.start(batch.cases)
                stack.callback(worker.close)
                running.append((batch, worker))
            batch, worker = running.popleft()
            batch_results = _collect(batch, worker, advance)
            worker.close()
            results |= batch_results
            remaining = [case for case in batch.cases if case[2] not in batch_results]
            if remaining:
                waiting.appendleft(dataclasses.replace(batch, cases=remaining))
    return results


def _collect(
    batch: ProbeBatch, worker: Worker, advance: Callable[[str], None]
) -> dict[Path, ProbeResult]:
    """Return the results that this process decided: all, if it ended before it loaded its graph."""
    results: dict[Path, ProbeResult] = {}
    cases = iter(batch.cases)
    for answer in worker.results():
        name, _, folder = next(cases)
        assert name == answer.case
        results[folder] = (
            ProbeResult("refused", answer.error)
            if answer.error
            else ProbeResult(RAN, outputs=answer.read_outputs())
        )
        advance(name)
    if worker.outcome == RAN:
        return results
    failure = ProbeResult(worker.outcome, worker.reason)
    remaining = list(cases)
    if not remaining:  # it refused its results at the end, or crashed after all of them
        return dict.fromkeys(results, failure) if worker.outcome == "refused" else results
    for name, _, folder in remaining[:1] if worker.loaded else remaining:
        results[folder] = failure
        advance(name)
    return results


# -- probes and their rows ----------------------------------------------------------------------

REFERENCE = "onnx-reference"
PYTORCH = "pytorch"


def probes() -> tuple[Probe, ...]:
    """Return all probes, in the order of the report."""
    return (*visible_key_probes(), *mask_probes(), *precision_probes(), *odd_input_probes())


class ProbeRunner:
    """Run of probes in a runtime, the ONNX reference evaluator and PyTorch."""

    def __init__(
        self,
        runtime: Runtime,
        probes: Sequence[Probe],
        folder: Path,
        limits: Limits,
        expect: Callable[[int], None],
        advance: Callable[[str], None],
    ) -> None:
        self._runtime, self._probes = runtime, {probe.name: probe for probe in probes}
        self._folder, self._limits = folder, limits
        self._expect, self._advance = expect, advance
        self._numbers = {name: str(number) for number, name in enumerate(self._probes)}
        self._results: dict[Path, ProbeResult] = {}
        for probe in probes:
            self._inputs_of(probe).mkdir(parents=True)
            write_tensors(self._inputs_of(probe), "input", probe.inputs)

    def rows(self) -> tuple[ProbeRow, ...]:
        """Run all probes, and return a row for each, in their order."""
        self._run(self._first_round())
        unclear = [probe for probe in self._probes.values() if self._unclear(probe)]
        if PORTABLE in self._runtime.dialects:
            self._run(self._batches_of(self._runtime, PORTABLE, unclear))
        return tuple(self._row(probe) for probe in self._probes.values())

    # -- running ---------------------------------------------------------------------

    def _run(self, batches: Iterable[ProbeBatch]) -> None:
        listed = list(batches)
        self._expect(sum(len(batch.cases) for batch in listed))
        self._results |= run_batches(listed, self._advance)

    def _first_round(self) -> Iterator[ProbeBatch]:
        everything = list(self._probes.values())
        if not runtime(PYTORCH).unavailable():
            supported = [probe for probe in everything if not probe.not_in_pytorch]
            yield from self._batches_of(runtime(PYTORCH), STANDARD, supported)
        for dialect in (STANDARD, ORT):
            if dialect in self._runtime.dialects:
                yield from self._batches_of(self._runtime, dialect, everything)
        if self._runtime.name != REFERENCE:
            yield from self._batches_of(runtime(REFERENCE), STANDARD, everything)

    def _batches_of(
        self, runtime: Runtime, dialect: str, probes: Sequence[Probe]
    ) -> Iterator[ProbeBatch]:
        """Yield one batch for each graph."""
        for graph in {probe.graph.name: probe.graph for probe in probes}.values():
            if dialect not in (graph.dialect, PORTABLE):
                continue
            path = write_graph(graph, dialect, self._folder)
            supported = [probe for probe in probes if probe.graph.name == graph.name]
            if path is not None:
                names = list(supported[0].inputs)
                start = functools.partial(_start_worker, runtime, self._limits, path, names)
                cases = [
                    (p.name, self._inputs_of(p), self._outputs_of(runtime.name, dialect, p))
                    for p in supported
                ]
                yield ProbeBatch(start, cases)

    def _inputs_of(self, probe: Probe) -> Path:
        return self._folder / "inputs" / self._numbers[probe.name]

    def _outputs_of(self, runtime_name: str, dialect: str, probe: Probe) -> Path:
        return self._folder / runtime_name / dialect / self._numbers[probe.name]

    # -- reading ---------------------------------------------------------------------

    def _unclear(self, probe: Probe) -> bool:
        """Return whether the portable dialect must run: no output, or not the specified one."""
        return any(
            finding.outcome != RAN or (probe.specified and finding.reading != probe.specified)
            for finding in self._findings(probe)
        )

    def _findings(self, probe: Probe) -> tuple[ProbeFinding, ...]:
        dialects = (probe.graph.dialect, PORTABLE)
        results = (self._finding(self._runtime.name, dialect, probe) for dialect in dialects)
        findings = tuple(finding for finding in results if finding is not None)
        return findings or (ProbeFinding(NO_OPERATOR, outcome="not run"),)

    def _finding(self, runtime_name: str, dialect: str, probe: Probe) -> ProbeFinding | None:
        result = self._results.get(self._outputs_of(runtime_name, dialect, probe))
        if result is None:
            return None
        if result.outcome != RAN:
            reason = result.reason.replace(f"{self._folder}/", "")
            return ProbeFinding(result.outcome, reason, dialect, result.outcome)
        if "output" not in result.outputs:
            names = ", ".join(result.outputs)
            return ProbeFinding(SOMETHING_ELSE, f"its outputs are {names}", dialect)
        return dataclasses.replace(probe.read(result.outputs["output"]), dialect=dialect)

    def _row(self, probe: Probe) -> ProbeRow:
        reason = probe.not_in_pytorch or runtime(PYTORCH).unavailable()
        pytorch = self._finding(PYTORCH, STANDARD, probe)
        return ProbeRow(
            probe.name, probe.about, self._findings(probe), probe.specified,
            self._finding(REFERENCE, STANDARD, probe),
            pytorch or ProbeFinding(reason, outcome="not run"),
        )  # fmt: skip
