"""The job behind `explain`: find the cause of wrong outputs by evaluation and experiments."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.bundle.golden import stored_cases
from attn_export.bundle.manifest import GOLDEN, read_bundle, shapes_of
from attn_export.errors import RuntimeFailure, UsageError, counted
from attn_export.explain.eager_values import ValueReference
from attn_export.explain.explanation import Cause, Explanation
from attn_export.report.progress import Progress
from attn_export.results import WHOLE_DECODE
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.pool import ALL
from attn_export.runtimes.protocol import Limits, Options, Runtime, known_limit
from attn_export.schema import Manifest

if TYPE_CHECKING:
    from attn_export.explain.experiments import KindedExperiment
    from attn_export.explain.graph_evaluation import EvaluatedGraph
    from attn_export.explain.graph_run import GoldenCase, GraphRun, GraphRunner
    from attn_export.explain.pattern import Pattern

SECONDS = 45.0
"""The default time after which no further mistake, experiment or smaller case is tried."""

RULE = "by the judge's rule alone: --atol, --rtol and baselines are not applied"
ONLY_SEPARATE = (
    "it fails where past and present have separate buffers, as in a plain run of a session; with "
    "shared ones the graph reads what it has just written"
)
DECODES = "whole decodes were not looked at: verify runs them"
ELSEWHERE = ("ort-cpu", "onnx-reference")
"""Other runtimes in which a failing graph is run for comparison. The first also replaces float64
for graphs that cannot be evaluated."""


def explain(
    bundle: Path | str,
    runtime_name: str,
    *,
    case: str | None = None,
    graph: Path | str | None = None,
    options: Options | None = None,
    output: Path | str | None = None,
    seconds: float = SECONDS,
    reference: ValueReference | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Return an explanation for the first graph of a bundle with which a runtime fails cases."""
    from attn_export.explain.causes import quality_sentences
    from attn_export.explain.graph_run import golden_cases
    from attn_export.explain.reproduce import check_folder

    progress = progress or Progress()
    if math.isnan(seconds):
        raise UsageError("seconds must be a number; got nan")
    target = _available_runtime(runtime_name, options or {})
    folder, replacement = Path(bundle), Path(graph) if graph else None
    if output is not None:
        check_folder(Path(output))
    manifest = read_bundle(folder)
    cases = golden_cases(folder, case, keeps_non_finite=target.keeps_non_finite)
    make_runners = functools.partial(_runners, folder, manifest, target, options or {}, limits)
    runners, bundled = list(make_runners(replacement)), list(make_runners(None))
    progress.phase(f"running {counted(len(cases), 'case')} in {runtime_name}")
    has_decodes = any(stored.kind == WHOLE_DECODE for stored in stored_cases(folder / GOLDEN)[1])
    job = _ExplainJob(
        manifest, cases, bundled, has_decodes, seconds, progress, reference or ValueReference()
    )
    explanation = job.explain_first_failure(runners, Path(output) if output else None)
    distance = quality_sentences(folder, job.runs)
    return dataclasses.replace(explanation, seconds=job.elapsed(), distance=distance)


def _available_runtime(name: str, options: Options) -> Runtime:
    if name == ALL:
        raise UsageError("explain looks at one runtime at a time; name it")
    target = runtime(name)
    if options and not target.counter_options:
        raise UsageError(f"{name} takes no options")
    reason = target.unavailable()
    if reason:
        raise RuntimeFailure(f"{name} cannot run here: {reason}")
    return target


def _runners(
    folder: Path,
    manifest: Manifest,
    target: Runtime,
    options: Options,
    limits: Limits | None,
    graph: Path | None,
) -> Iterator[GraphRunner]:
    from attn_export.explain.graph_run import GraphRunner, graph_files_to_examine
    from attn_export.graph.load import load_proto

    if graph is not None:
        load_proto(graph)  # raises an error if it cannot be read
    parent = (graph.parent if graph else folder).absolute()
    for file in graph_files_to_examine(manifest, graph):
        yield GraphRunner(parent / file.name, file, target, options, limits or Limits.default())


@dataclasses.dataclass(frozen=True)
class _ExplainJob:
    """One call of `explain`.

    `bundled` are the graphs of the bundle, `runs` the runs by the name of the graph. The bundle may
    have whole decodes, which are not examined.
    """

    manifest: Manifest
    cases: Sequence[GoldenCase]
    bundled: Sequence[GraphRunner]
    has_decodes: bool
    seconds: float
    progress: Progress
    reference: ValueReference
    started: float = dataclasses.field(default_factory=time.monotonic)
    runs: dict[str, GraphRun] = dataclasses.field(default_factory=dict)

    def elapsed(self) -> float:
        """Return the seconds since the start of the job."""
        return time.monotonic() - self.started

    def out_of_time(self) -> bool:
        """Return whether the time limit for starting experiments has passed."""
        return self.elapsed() > self.seconds

    def explain_first_failure(
        self, runners: Sequence[GraphRunner], output: Path | None
    ) -> Explanation:
        """Explain the first graph that fails, or state that none fails."""
        reasons, names, ran = [], [], 0
        for runner in runners:
            reason = known_limit(
                runner.runtime, runner.graph_file, [other.graph_file for other in runners]
            )
            if reason:
                reasons.append(reason)
                continue
            trial = self.runs[runner.graph_file.name] = runner.trial(self.cases)
            if not trial.all_passed:
                return self._explain_run(runner, trial, output)
            ran += len(trial.passed)
            names.append(runner.graph_file.name)
        target = runners[0].runtime
        if not ran:
            raise RuntimeFailure(f"{target.name} runs no graph here: {'; '.join(reasons)}")
        notes = (RULE, *((DECODES,) if self.has_decodes else ()), *reasons)
        tried = ", ".join(names)
        return Explanation(target.name, tried, runners[0].options, "none", cases=ran, notes=notes)

    def _explain_run(
        self, runner: GraphRunner, trial: GraphRun, output: Path | None
    ) -> Explanation:
        """Explain a failing run: no outputs, outputs of other names or shapes, or wrong values."""
        from attn_export.explain.causes import wrong_signature

        base = Explanation(
            runner.runtime.name, runner.graph_file.name, runner.options, "did not run",
            tuple(case.name for case in trial.failed), len(trial.failed) + len(trial.passed),
            notes=(ONLY_SEPARATE,) if trial.ran.separate else (),
        )  # fmt: skip
        if not trial.ran.outputs:
            reason = trial.ran.complaint or "no case ran"
            outcome = "refused" if trial.ran.outcome == "ran" else trial.ran.outcome
            says = f"it gives no numbers: {outcome}: {reason}"
            return dataclasses.replace(base, causes=(Cause(outcome, says),))
        signature_causes = wrong_signature(trial)
        if signature_causes:
            pattern = self._pattern(trial).lines
            base = dataclasses.replace(
                base, fault="graph", causes=tuple(signature_causes), pattern=pattern
            )
            return self._with_reproduction(base, runner, trial, None, output)
        return self._explain_values(base, runner, trial, output)

    def _explain_values(
        self, base: Explanation, runner: GraphRunner, trial: GraphRun, output: Path | None
    ) -> Explanation:
        """Explain wrong values, by evaluating the graph in float64 and by experiments."""
        from attn_export.explain import fault_attribution, graph_evaluation, node_differences
        from attn_export.explain.causes import Observations, causes

        self.progress.phase("evaluating the graphs in float64")
        cases = graph_evaluation.choose_cases(trial)
        evaluated, reason = graph_evaluation.evaluate_if_possible(runner, cases, trial)
        right = graph_evaluation.first_right_graph(self.bundled, cases)
        lossy = graph_evaluation.loses_precision(evaluated, right, cases)
        other = self._run_in_other_runtime(runner, trial) if evaluated is None else None
        fault = fault_attribution.fault_of(evaluated, other, lossy=lossy)
        self.progress.phase("looking for the first wrong value")
        lines = self._lines(runner.graph_file.name)
        if evaluated is None:
            first = node_differences.changed_node(runner, self.bundled, trial, lines)
            fault = "graph" if first is not None and fault == "unknown" else fault
        elif lossy:
            first = fault_attribution.first_lossy(evaluated, cases, lines)
        else:
            first = fault_attribution.first_deviation(
                fault, evaluated, self.bundled, trial, lines, self.reference
            )
        self.progress.phase("trying known mistakes")
        mistakes = fault_attribution.known_mistakes(
            evaluated, right, trial, cases, self.out_of_time, first
        )
        self.progress.phase("running it in other ways")
        results = dict(self._experiments(runner, trial, right, within=fault != "graph"))
        pattern = self._pattern(trial)
        not_computed = {} if evaluated is None else evaluated.not_computed
        seen = Observations(
            fault, runner.runtime.name, mistakes, first, pattern, not_computed, self.reference.name,
            lossy=lossy,
        )  # fmt: skip
        explained = dataclasses.replace(
            base,
            fault=fault,
            causes=tuple(causes(seen, results, lines)),
            first=first,
            experiments=tuple(results),
            pattern=pattern.lines,
            notes=(*base.notes, reason) if reason else base.notes,
        )
        return self._with_reproduction(explained, runner, trial, right or evaluated, output)

    def _lines(self, graph: str) -> Mapping[str, str]:
        """Return the line of the module that each node came from; this graph's entries win."""
        lines: dict[str, str] = {}
        for name, entry in self.manifest.graphs.items():
            lines = {**lines, **entry.nodes} if name == graph else {**entry.nodes, **lines}
        return lines

    def _run_in_other_runtime(self, runner: GraphRunner, trial: GraphRun) -> GraphRun | None:
        """Run a graph that cannot be evaluated in float64 in another runtime, if there is one."""
        other = runtime(ELSEWHERE[0])
        if runner.runtime.name == other.name or other.unavailable():
            return None
        return dataclasses.replace(runner, runtime=other, options={}).trial(trial.failed[:5])

    def _experiments(
        self, runner: GraphRunner, trial: GraphRun, right: EvaluatedGraph | None, *, within: bool
    ) -> Iterator[KindedExperiment]:
        from attn_export.explain.experiments import (
            rerun_in_runtime,
            run_elsewhere,
            run_scaled_inputs,
        )

        if within:
            yield from rerun_in_runtime(runner, trial, self.cases, self.out_of_time)
            if right is not None and not self.out_of_time():
                yield run_scaled_inputs(runner, trial, right)
        others = [
            other for other in self.bundled if not known_limit(other.runtime, other.graph_file)
        ]
        yield from run_elsewhere(
            runner, trial, others, [runtime(name) for name in ELSEWHERE], self.out_of_time
        )

    def _pattern(self, trial: GraphRun) -> Pattern:
        from attn_export.explain.pattern import pattern_of

        return pattern_of(trial, shapes_of(self.manifest.outputs))

    def _with_reproduction(
        self,
        explained: Explanation,
        runner: GraphRunner,
        trial: GraphRun,
        evaluated: EvaluatedGraph | None,
        output: Path | None,
    ) -> Explanation:
        """Add the smallest case that still fails, and write the reproduction to `output`."""
        from attn_export.explain.experiments import shrink_case
        from attn_export.explain.reproduce import write_folder

        self.progress.phase("looking for the smallest case")
        axes = shapes_of(self.manifest.inputs)
        right = evaluated if evaluated is not None and evaluated.right else None
        case = trial.failed[0]
        smallest = shrink_case(runner, case, right, axes, out_of_time=self.out_of_time)
        explained = dataclasses.replace(
            explained, smallest=smallest.sizes, folder=output, seconds=self.elapsed()
        )
        if output is not None:
            dtypes = {name: array.dtype.name for name, array in case.golden.expected.items()}
            write_folder(output, explained, runner, smallest, dtypes)
        return explained
