"""Explanation of a bundle's first graph with which a runtime fails cases."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from attn_export.bundle.golden import stored_cases
from attn_export.bundle.manifest import GOLDEN, read_bundle, shapes_of
from attn_export.dialect_names import MODEL
from attn_export.errors import GraphError, RuntimeFailure, UsageError, counted
from attn_export.explain import fault_attribution, graph_evaluation, localise
from attn_export.explain.causes import Observations, causes, quality_sentences, wrong_signature
from attn_export.explain.eager_values import ValueReference
from attn_export.explain.experiments import (
    KindedExperiment,
    rerun_in_runtime,
    run_elsewhere,
    run_scaled_inputs,
    shrink_case,
)
from attn_export.explain.explanation import Cause, Deviation, Explanation, Lines, SearchWork
from attn_export.explain.graph_evaluation import EvaluatedGraph
from attn_export.explain.graph_run import (
    GoldenCase,
    GraphRun,
    GraphRunner,
    golden_cases,
    graph_files_to_examine,
)
from attn_export.explain.node_repairs import node_repair
from attn_export.explain.pattern import Pattern, pattern_of
from attn_export.explain.reproduce import check_folder, write_folder
from attn_export.graph.load import load_proto
from attn_export.results import BASE, WHOLE_DECODE
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.protocol import Limits, Options, Runtime, known_limit, size_beside
from attn_export.runtimes.run_options import Progress, RunOptions
from attn_export.schema import Manifest

SECONDS = 45.0
"""The default work after which no further fault, experiment or smaller case is tried."""

RULE = "by the judge's rule alone: --atol, --rtol and baselines are not applied"
_DECODES = "whole decodes were not looked at: verify runs them"
ONLY_SEPARATE = (
    "it fails where past and present have separate buffers, as in a plain run of a session; with "
    "shared ones the graph reads what it has just written"
)
_CERTAIN = 0.01
"""The largest unexplained share of a second cause."""

ELSEWHERE = ("ort-cpu", "onnx-reference")
"""Other runtimes in which a failing graph is run for comparison. The first also replaces float64
for graphs that cannot be evaluated."""


@dataclasses.dataclass(frozen=True)
class _FailingRun:
    """A run of a graph in which cases fail, and what is known beside it.

    Attributes:
        cases: All cases of the bundle.
        bundled: The graphs of the bundle.
        reference: The source of right values.
    """

    runner: GraphRunner
    trial: GraphRun
    manifest: Manifest
    cases: Sequence[GoldenCase]
    bundled: Sequence[GraphRunner]
    reference: ValueReference
    progress: Progress
    work: SearchWork

    def explanation(self, output: Path | None) -> Explanation:
        """Explain a failing run: no outputs, outputs of other names or shapes, or wrong values.

        `output`: The folder to write, which reproduces the failure.
        """
        runner, trial = self.runner, self.trial
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
        if found := wrong_signature(trial):
            lines = self._pattern().lines
            base = dataclasses.replace(base, fault="graph", causes=tuple(found), pattern=lines)
            return self._reproduced(base, None, output)
        return self._reproduced(*self._of_values(base), output)

    def _of_values(self, base: Explanation) -> tuple[Explanation, EvaluatedGraph | None]:
        """Explain wrong values, by evaluating the graph in float64 and by experiments."""
        runner, trial, phase = self.runner, self.trial, self.progress.phase
        phase("evaluating the graphs in float64")
        cases = graph_evaluation.choose_cases(trial)
        evaluated, reason = graph_evaluation.evaluate_if_possible(runner, cases, trial)
        right = graph_evaluation.first_right_graph(self.bundled, cases)
        others = [other for other in self.bundled if other.path != runner.path]
        other_right = graph_evaluation.first_right_graph(others, cases) if evaluated else None
        lossy = graph_evaluation.loses_precision(evaluated, other_right, cases)
        other = self._in_other_runtime() if evaluated is None else None
        fault = fault_attribution.fault_of(evaluated, other, lossy=lossy)
        phase("looking for the first wrong value")
        lines = self._lines()
        if evaluated is None:
            first = localise.changed_node(runner, self.bundled, trial, lines)
            fault = "graph" if first is not None and fault == "unknown" else fault
        elif lossy:
            first = fault_attribution.first_lossy(evaluated, cases, lines)
        else:
            first = fault_attribution.first_deviation(
                fault, evaluated, self.bundled, trial, lines, self.reference
            )
        phase("trying known faults")
        faults = fault_attribution.known_faults(
            evaluated, right, trial, cases, self.work.is_over, first
        )
        phase("running it in other ways")
        results = dict(self._experiments(right, within=fault != "graph"))
        pattern, ended = self._pattern(), self.work.note()
        not_computed = {} if evaluated is None else evaluated.not_computed
        seen = Observations(
            fault, runner.runtime.name, *faults, first, pattern, not_computed,
            self.reference.name, lossy=lossy,
        )  # fmt: skip
        found = causes(seen, results, lines)
        explained = dataclasses.replace(
            base,
            fault=fault,
            causes=(
                *(self._within(evaluated, first, lines) if fault != "runtime" else ()),
                *found,
            ),
            first=first,
            experiments=tuple(results),
            pattern=pattern.lines,
            notes=(*base.notes, *filter(None, [reason]), *ended),
        )
        return explained, right or evaluated

    def _within(
        self, evaluated: EvaluatedGraph | None, first: Deviation | None, lines: Lines
    ) -> Iterator[Cause]:
        """Yield the change of the reference, and of one node where the former explains less."""
        changes = list(self._changes(first))
        is_sure = any(
            (cause.unexplained or 0) <= _CERTAIN and not cause.is_fit for cause in changes
        )
        repair = None
        if not is_sure and self.reference.cause and evaluated is not None and first is not None:
            some = graph_evaluation.sample_cases(self.trial.failed, 2 * fault_attribution.ALIKE)
            some = [*some, *graph_evaluation.sample_cases(self.trial.passed, 2)]
            ran = self.trial.ran.outputs
            some = [
                case for case in some if (values := evaluated.values(case)) is not None
                and fault_attribution.is_as_run(evaluated, values, ran.get(case.name, {}))
            ]  # fmt: skip
            repair = node_repair(evaluated, first, some, lines, self.work.is_over) if some else None
        yield from (*filter(None, [repair]), *changes)

    def _changes(self, first: Deviation | None) -> Iterator[Cause]:
        """Yield the change of the reference behind the failing cases, of large errors first.

        Those of small errors are said in the same sentence, if they have another cause.
        """
        groups = self.trial.groups() if self.reference.cause is not None else []
        found = [cause for group in groups for cause in self._change(group)]
        if not found:
            return
        largest, *others = found
        text = largest.sentence
        for other in others:
            # A weak match may be of the same cause.
            if other.kind != largest.kind and (other.unexplained or 0) <= _CERTAIN:
                text += f"; where errors are smaller: {other.sentence}"
        at = f"; first wrong value: {first.location}" if first is not None else ""
        yield dataclasses.replace(largest, sentence=f"the graph is wrong: {text}{at}")

    def _change(self, group: Sequence[GoldenCase]) -> Iterator[Cause]:
        """Yield the change of the reference that gives the outputs of one of some failing cases.

        It is the smallest, in which some queries may see nothing; then the base case.
        """
        smallest, *others = group
        for case in (smallest, *(case for case in others if case.name == BASE)):
            if self.reference.cause is None:
                return
            golden = dataclasses.replace(
                case.golden, case=dataclasses.replace(case.golden.case, inputs=case.inputs)
            )
            outputs = self.trial.ran.outputs[case.name]
            found = self.reference.cause(golden, outputs, self.work.is_over)
            if found is not None:
                yield found
                return

    def _lines(self) -> dict[str, str]:
        """Return the line of the module that each node came from; this graph's entries win."""
        graphs = dict(self.manifest.graphs)
        here = graphs.pop(self.runner.graph_file.name, None)
        found = [*graphs.values(), *([here] if here else [])]
        return {name: line for entry in found for name, line in entry.nodes.items()}

    def _in_other_runtime(self) -> GraphRun | None:
        """Run a graph that cannot be evaluated in float64 in another runtime, if there is one."""
        other = runtime(ELSEWHERE[0])
        if self.runner.runtime.name == other.name or other.unavailable():
            return None
        runner = dataclasses.replace(self.runner, runtime=other, options={})
        return runner.trial(self.trial.failed[:5])

    def _experiments(
        self, right: EvaluatedGraph | None, *, within: bool
    ) -> Iterator[KindedExperiment]:
        runner, trial, is_over = self.runner, self.trial, self.work.is_over
        if within:
            yield from rerun_in_runtime(runner, trial, self.cases, is_over)
            if right is not None and not is_over():
                yield run_scaled_inputs(runner, trial, right)
        others = [
            other for other in self.bundled if not known_limit(other.runtime, other.graph_file)
        ]
        elsewhere = [runtime(name) for name in ELSEWHERE]
        yield from run_elsewhere(runner, trial, others, elsewhere, is_over)

    def _pattern(self) -> Pattern:
        return pattern_of(self.trial, shapes_of(self.manifest.outputs))

    def _reproduced(
        self, explained: Explanation, evaluated: EvaluatedGraph | None, output: Path | None
    ) -> Explanation:
        """Add the smallest case that still fails, and write the reproduction to `output`."""
        self.progress.phase("looking for the smallest case")
        right = evaluated if evaluated is not None and evaluated.right else None
        case, axes = self.trial.failed[0], shapes_of(self.manifest.inputs)
        smallest = shrink_case(self.runner, case, right, axes, out_of_time=self.work.is_over)
        explained = dataclasses.replace(explained, smallest=smallest.sizes, folder=output)
        if output is not None:
            dtypes = {name: array.dtype.name for name, array in case.golden.expected.items()}
            write_folder(output, explained, self.runner, smallest, dtypes)
        return explained


def _refuse_too_large(graph: Path) -> None:
    """Raise GraphError if a graph in float64 would take more memory than there is."""
    size, memory = size_beside(graph), Limits.default().memory_mib
    needed = _TIMES_LARGER * size >> 20
    if memory is not None and needed > memory:
        raise GraphError(
            f"{graph}: {size / 2**30:.1f} GiB of weights need about {needed / 1024:.0f} GiB in "
            f"float64, and at most {memory / 1024:.0f} GiB are used here; compare --model names "
            "the layers and the node that are wrong"
        )


_TIMES_LARGER = 6
"""The memory that an evaluation in float64 takes, over the size of a graph's files."""


def explain(
    bundle: Path | str,
    run: RunOptions,
    *,
    graph: Path | str | None = None,
    case: str | None = None,
    options: Options | None = None,
    output: Path | str | None = None,
    seconds: float | SearchWork = SECONDS,
    reference: ValueReference | None = None,
) -> Explanation:
    """Return an explanation for the first graph of a bundle with which a runtime fails cases."""
    work = seconds if isinstance(seconds, SearchWork) else SearchWork(seconds)
    if not isinstance(seconds, SearchWork) and math.isnan(seconds):
        raise UsageError("seconds must be a number; got nan")
    target = _available_runtime(run, options or {})
    folder, replacement = Path(bundle), Path(graph) if graph else None
    if output is not None:
        check_folder(Path(output))
    manifest = read_bundle(folder)
    cases = golden_cases(folder, case, keeps_non_finite=target.keeps_non_finite)
    make_runners = functools.partial(_runners, folder, manifest, run, options or {})
    runners, bundled = list(make_runners(replacement)), list(make_runners(None))
    _refuse_too_large(replacement or folder / MODEL)
    run.progress.phase(f"running {counted(len(cases), 'case')} in {target.name}")
    started, found, runs = time.monotonic(), None, {}
    place = Path(output) if output else None
    reasons: list[str] = []
    for runner in runners:
        name = runner.graph_file.name
        if reason := known_limit(target, runner.graph_file, [r.graph_file for r in runners]):
            reasons.append(reason)
            continue
        trial = runs[name] = runner.trial(cases)
        if not trial.all_passed:
            failing = _FailingRun(
                runner, trial, manifest, cases, bundled, reference or ValueReference(),
                run.progress, work,
            )  # fmt: skip
            found = failing.explanation(place)
            break
    if found is None:
        ran = sum(len(trial.passed) for trial in runs.values())
        if not ran:
            raise RuntimeFailure(f"{target.name} runs no graph here: {'; '.join(reasons)}")
        kinds = {stored.kind for stored in stored_cases(folder / GOLDEN)[1]}
        notes = (RULE, *((_DECODES,) if WHOLE_DECODE in kinds else ()), *reasons)
        found = Explanation(
            target.name, ", ".join(runs), runners[0].options, "none", cases=ran, notes=notes
        )
    distance = quality_sentences(folder, runs)
    return dataclasses.replace(found, seconds=time.monotonic() - started, distance=distance)


def _available_runtime(run: RunOptions, options: Options) -> Runtime:
    if len(run.runtimes) != 1:
        raise UsageError("explain looks at one runtime at a time; name it")
    (target,) = run.runtimes
    if options and not target.counter_options:
        raise UsageError(f"{target.name} takes no options")
    reason = target.unavailable()
    if reason:
        raise RuntimeFailure(f"{target.name} cannot run here: {reason}")
    return target


def _runners(
    folder: Path,
    manifest: Manifest,
    run: RunOptions,
    options: Options,
    graph: Path | None,
) -> Iterator[GraphRunner]:

    if graph is not None:
        load_proto(graph)  # raises an error if it cannot be read
    parent = (graph.parent if graph else folder).absolute()
    for file in graph_files_to_examine(manifest, graph):
        yield GraphRunner(parent / file.name, file, run.runtimes[0], options, run.limits)
