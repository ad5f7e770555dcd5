"""Explanation of numeric differences: runs the counter-experiments and names the cause."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import GOLDEN, read_bundle
from attn_export.diagnose.eager_values import Witness
from attn_export.diagnose.explanation import Cause, Explanation
from attn_export.errors import GraphError, RuntimeFailure, UsageError, counted
from attn_export.parity.golden import case_folders
from attn_export.report.progress import Progress
from attn_export.results import DECODE
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.pool import ALL
from attn_export.runtimes.protocol import Limits, Options, Runtime, Tunable, known_limit

if TYPE_CHECKING:
    from attn_export.diagnose.experiments import ExperimentResult
    from attn_export.diagnose.graph_run import GraphRun, GraphRunner, KnownCase
    from attn_export.diagnose.meaning import Meaning
    from attn_export.diagnose.pattern import Pattern

SECONDS = 45.0
"""After which no further experiment is begun."""

RULE = "by the judge's rule alone: --atol, --rtol and baselines are not applied"
DECODES = "whole decodes were not looked at: verify runs them"
ELSEWHERE = ("ort-cpu", "onnx-reference")


def explain(
    bundle: Path | str,
    runtime_name: str,
    *,
    case: str | None = None,
    graph: Path | str | None = None,
    options: Options | None = None,
    output: Path | str | None = None,
    seconds: float = SECONDS,
    witness: Witness | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Explain why a runtime fails cases of a bundle.

    Args:
        bundle: The bundle's folder, or the `.failed` one that a build left.
        runtime_name: The runtime.
        case: The only case to look at. Default: all, whole decodes apart.
        graph: An ONNX file that replaces the bundle's own.
        options: Options of the engine, as set by the program that shows the fault.
        output: The folder of the reproduction. None writes none.
        seconds: After which no further experiment is begun.
        witness: What the values of a wrong graph are compared with, where the bundle has no right
            graph.
        limits: The limits of each process.
        progress: Receiver of progress.

    Raises:
        UsageError: If there is no such runtime, option or case, `seconds` is NaN, or `output`
            cannot be written.
        RuntimeFailure: If the runtime is not here, or can run none of the graphs.
        GraphError: If `graph` is no file.
        BundleError: If a file of the bundle is missing or was changed.
    """
    from attn_export.diagnose.graph_run import known_cases
    from attn_export.diagnose.quality_lines import quality_lines
    from attn_export.diagnose.reproduce import check_folder
    from attn_export.graph.load import load_proto

    progress = progress or Progress()
    if math.isnan(seconds):
        raise UsageError("seconds has to be a number; got nan")
    kind = _usable(runtime_name, options or {})
    folder, other = Path(bundle), Path(graph) if graph else None
    if other is not None:
        if not other.is_file():
            raise GraphError(f"cannot read {other}: no such file")
        load_proto(other)
    if output is not None:
        check_folder(Path(output))
    manifest = read_bundle(folder).manifest
    cases = known_cases(folder, case)
    progress.phase(f"running {counted(len(cases), 'case')} in {runtime_name}")
    runners = list(_settings(folder, manifest, other, kind, options or {}, limits))
    own = _settings(folder, manifest, None, kind, options or {}, limits)
    kinds = {stored.kind for stored in case_folders(folder / GOLDEN)[1]}
    job = _ExplainJob(manifest, cases, list(own), kinds, seconds, progress, witness or Witness())
    found = job.explanation(runners, Path(output) if output else None)
    distance = quality_lines(folder, job.runs)
    return dataclasses.replace(found, seconds=job.elapsed(), distance=distance)


def _usable(name: str, options: Options) -> Runtime:
    if name == ALL:
        raise UsageError("explain looks at one runtime at a time; name it")
    kind = runtime(name)
    if options and not isinstance(kind, Tunable):
        raise UsageError(f"{name} takes no options")
    reason = kind.unavailable()
    if reason:
        raise RuntimeFailure(f"{name} cannot run here: {reason}")
    return kind


def _settings(
    folder: Path,
    manifest: Mapping[str, Any],
    graph: Path | None,
    kind: Runtime,
    options: Options,
    limits: Limits | None,
) -> Iterator[GraphRunner]:
    from attn_export.diagnose.graph_run import GraphRunner, graph_files_to_examine

    place = (graph.parent if graph else folder).absolute()
    for form in graph_files_to_examine(manifest, graph):
        yield GraphRunner(place / form.name, form, kind, options, limits or Limits.default())


@dataclasses.dataclass(frozen=True)
class _ExplainJob:
    manifest: Mapping[str, Any]
    cases: Sequence[KnownCase]
    own: Sequence[GraphRunner]
    kinds: Collection[str]
    seconds: float
    progress: Progress
    witness: Witness
    started: float = dataclasses.field(default_factory=time.monotonic)
    runs: dict[str, GraphRun] = dataclasses.field(default_factory=dict)

    def elapsed(self) -> float:
        """Return the seconds since the inquiry began."""
        return time.monotonic() - self.started

    def late(self) -> bool:
        """Return whether the time for further experiments is over."""
        return self.elapsed() > self.seconds

    def explanation(self, runners: Sequence[GraphRunner], output: Path | None) -> Explanation:
        """Return the explanation of the first graph that fails."""
        reasons, names, ran = [], [], 0
        for runner in runners:
            reason = known_limit(runner.runtime, runner.graph_file, [s.graph_file for s in runners])
            if reason:
                reasons.append(reason)
                continue
            trial = self.runs[runner.graph_file.name] = runner.trial(self.cases)
            if not trial.all_passed:
                return self._explained(runner, trial, output)
            ran += len(trial.passed)
            names.append(runner.graph_file.name)
        kind = runners[0].runtime
        if not ran:
            raise RuntimeFailure(f"{kind.name} runs no graph here: {'; '.join(reasons)}")
        notes = (RULE, *((DECODES,) if DECODE in self.kinds else ()), *reasons)
        tried = ", ".join(names)
        return Explanation(kind.name, tried, runners[0].options, "none", cases=ran, notes=notes)

    def _explained(self, runner: GraphRunner, trial: GraphRun, output: Path | None) -> Explanation:
        from attn_export.diagnose.causes import wrong_signature

        base = Explanation(
            runner.runtime.name, runner.graph_file.name, runner.options, "did not run",
            tuple(case.name for case in trial.failed), len(trial.failed) + len(trial.passed),
        )  # fmt: skip
        if not trial.ran.outputs:
            reason = trial.ran.complaint or "no case ran"
            outcome = "refused" if trial.ran.outcome == "ran" else trial.ran.outcome
            says = f"it gives no numbers: {outcome}: {reason}"
            return dataclasses.replace(base, causes=(Cause(outcome, says),))
        other_outputs = wrong_signature(trial)
        if other_outputs:
            pattern = self._pattern(trial).lines
            base = dataclasses.replace(
                base, fault="graph", causes=tuple(other_outputs), pattern=pattern
            )
            return self._reproduced(base, runner, trial, None, output)
        return self._compared(base, runner, trial, output)

    def _compared(
        self, base: Explanation, runner: GraphRunner, trial: GraphRun, output: Path | None
    ) -> Explanation:
        """Determine the fault from the graph's float64 meaning and the runtime's outputs."""
        from attn_export.diagnose import fault_attribution, meaning
        from attn_export.diagnose.causes import Observations, causes

        self.progress.phase("evaluating the graphs in float64")
        cases = meaning.choose_cases(trial)
        own, reason = meaning.evaluable_meaning(runner, cases, trial)
        right = meaning.right_meaning(self.own, cases)
        lossy = meaning.loses_precision(own, right, cases)
        other = self._foreign(runner, trial) if own is None else None
        fault = fault_attribution.fault_of(own, other, lossy=lossy)
        self.progress.phase("trying known mistakes")
        lines = self._lines(runner.graph_file.name)
        found = fault_attribution.known_mistakes(own, right, trial, cases, self.late)
        if own is not None and lossy:
            first = fault_attribution.first_lossy(own, cases, lines)
        else:
            first = fault_attribution.first_deviation(
                fault, own, self.own, trial, lines, self.witness
            )
        self.progress.phase("running it in other ways")
        done = list(self._experiments(runner, trial, right, within=fault != "graph"))
        pattern = self._pattern(trial)
        stuck = {} if own is None else own.stuck
        seen = Observations(
            fault,
            runner.runtime.name,
            found,
            first,
            pattern,
            stuck,
            self.witness.name,
            lossy=lossy,
        )
        explained = dataclasses.replace(
            base,
            fault=fault,
            causes=tuple(causes(seen, done, lines)),
            first=first,
            experiments=tuple(d.experiment for d in done),
            pattern=pattern.lines,
            notes=(reason,) if reason else (),
        )
        return self._reproduced(explained, runner, trial, right or own, output)

    def _lines(self, graph: str) -> Mapping[str, str]:
        """Return the origins of nodes in the module, from this graph and from the others."""
        known: dict[str, str] = {}
        for name, entry in self.manifest["graphs"].items():
            known = {**known, **entry["nodes"]} if name == graph else {**entry["nodes"], **known}
        return known

    def _foreign(self, runner: GraphRunner, trial: GraphRun) -> GraphRun | None:
        """Return another runtime's result for a graph whose meaning float64 cannot determine."""
        other = runtime(ELSEWHERE[0])
        if runner.runtime.name == other.name or other.unavailable():
            return None
        return dataclasses.replace(runner, runtime=other, options={}).trial(trial.failed[:5])

    def _experiments(
        self, runner: GraphRunner, trial: GraphRun, right: Meaning | None, *, within: bool
    ) -> Iterator[ExperimentResult]:
        from attn_export.diagnose.experiments import (
            rerun_in_runtime,
            run_elsewhere,
            run_smaller_inputs,
        )

        if within:
            yield from rerun_in_runtime(runner, trial, self.cases, self.late)
            if right is not None and not self.late():
                yield run_smaller_inputs(runner, trial, right)
        others = [other for other in self.own if not known_limit(other.runtime, other.graph_file)]
        yield from run_elsewhere(runner, trial, others, [runtime(n) for n in ELSEWHERE], self.late)

    def _pattern(self, trial: GraphRun) -> Pattern:
        from attn_export.diagnose.pattern import pattern_of

        axes = {name: entry["shape"] for name, entry in self.manifest["outputs"].items()}
        return pattern_of(trial, axes)

    def _reproduced(
        self,
        explained: Explanation,
        runner: GraphRunner,
        trial: GraphRun,
        base: Meaning | None,
        output: Path | None,
    ) -> Explanation:
        """Add the smallest case that still fails, and write its folder."""
        from attn_export.diagnose.experiments import shrink_case
        from attn_export.diagnose.reproduce import write_folder

        self.progress.phase("looking for the smallest case")
        axes = {name: entry["shape"] for name, entry in self.manifest["inputs"].items()}
        right = base if base is not None and base.right else None
        smallest = shrink_case(runner, trial.failed[0], right, axes, late=self.late)
        explained = dataclasses.replace(
            explained, smallest=smallest.sizes, folder=output, seconds=self.elapsed()
        )
        if output is not None:
            write_folder(output, explained, runner, smallest)
        return explained
