"""Counter-experiments: the same cases, run in another way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from attn_export.diagnose.explanation import Experiment, Late
from attn_export.diagnose.graph_run import GraphRun, GraphRunner, KnownCase
from attn_export.diagnose.meaning import Meaning
from attn_export.diagnose.shrink import golden_of
from attn_export.runtimes.protocol import Runtime, Tunable, known_limit
from attn_export.tensorfile import is_floating

FEW = 5
"""Number of failed cases that are run again."""

QUIETER = 16.0
"""A power of two: dividing by it rounds nothing."""


@dataclasses.dataclass(frozen=True)
class ExperimentResult:
    """A counter-experiment and its result.

    Attributes:
        within: Whether it changes how the same runtime runs the same graph: what mends it then
            is a cause, and not only a way around.
        kind: The cause if it passes.
    """

    experiment: Experiment
    within: bool
    kind: str


def within_runtime(
    runner: GraphRunner, trial: GraphRun, cases: Sequence[KnownCase], late: Late
) -> Iterator[ExperimentResult]:
    """Run the same graph in the same runtime with other options, order, process or threads.

    All cases in their order: a fault may need what was run before it.

    Args:
        runner: The graph in its runtime.
        trial: The result without changes.
        cases: All cases.
        late: Whether time is over.
    """
    if isinstance(runner.runtime, Tunable):
        for name, options in runner.runtime.counter_options.items():
            if not late():
                shown = ", ".join(f"{key}={value}" for key, value in options.items())
                yield _done(f"{name} ({shown})", runner.trial(cases, options), name)
    if not late():
        alone = runner.trial(trial.failed[:1])
        yield _done("a fresh process for the one case", alone, "what was run before")
    if not late():
        turned = runner.trial(list(reversed(cases)))
        yield _done("the cases in the reverse order", turned, "what was run before")
    if not late() and runner.limits.threads > 1:
        one = dataclasses.replace(runner, limits=dataclasses.replace(runner.limits, threads=1))
        yield _done("one thread", one.trial(cases), "threads")


def with_quiet_inputs(runner: GraphRunner, trial: GraphRun, right: Meaning) -> ExperimentResult:
    """Run inputs divided by `QUIETER`, which removes overflow and saturation.

    Args:
        runner: The graph in its runtime.
        trial: The result without changes.
        right: A graph that gives the truth.
    """
    few = [case for case in trial.failed if right.values(case) is not None][:FEW]
    quiet = {case.name: _quiet(case) for case in few}
    ran = runner.run(quiet)
    goldens = {case.name: golden_of(right, case, quiet[case.name]) for case in few}
    passed = [case for case in few if runner.passes(goldens[case.name], ran, case.name)]
    failed = tuple(case for case in few if case not in passed)
    name = f"inputs divided by {QUIETER:g}"
    return _done(name, GraphRun(ran, failed, tuple(passed)), "large numbers")


def _quiet(case: KnownCase) -> dict[str, np.ndarray]:
    # A mask is not to be scaled: 0 and -inf are all that many hold.
    return {
        name: array / np.asarray(QUIETER, array.dtype)
        if is_floating(array.dtype) and "mask" not in name
        else array
        for name, array in case.inputs.items()
    }


def elsewhere(
    runner: GraphRunner,
    trial: GraphRun,
    others: Sequence[GraphRunner],
    runtimes: Sequence[Runtime],
    late: Late,
) -> Iterator[ExperimentResult]:
    """Run other graphs of the bundle in this runtime, and the same graph in other runtimes.

    Args:
        runner: The graph in its runtime.
        trial: The result without changes.
        others: The bundle's graphs in the same runtime.
        runtimes: Runtimes for the same graph.
        late: Whether time is over.
    """
    few = trial.failed[:FEW]
    for other in others:
        if not late() and other.form.name != runner.form.name:
            found = other.trial(few)
            if found.failed or found.passed:
                yield _done(f"{other.form.name} in {runner.runtime.name}", found, "")
    for kind in runtimes:
        if late() or kind.name == runner.runtime.name or kind.unavailable():
            continue
        if known_limit(kind, runner.form, [runner.form]):
            continue
        other = dataclasses.replace(runner, runtime=kind, options={})
        yield _done(f"the same graph in {kind.name}", other.trial(few), "")


def _done(name: str, trial: GraphRun, kind: str) -> ExperimentResult:
    total = len(trial.failed) + len(trial.passed)
    if not trial.ran.outputs:
        experiment = Experiment(name, None, trial.ran.complaint or trial.ran.outcome)
    else:
        says, count = ("fails", len(trial.failed)) if trial.failed else ("passes", total)
        result = f"{says} ({count} of {total})" if total > 1 else says
        experiment = Experiment(name, not trial.failed, result)
    return ExperimentResult(experiment, bool(kind), kind)
