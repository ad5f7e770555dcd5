"""Counter-experiments: the same cases, run in another way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attn_export.diagnose.evaluate import NotComputedError
from attn_export.diagnose.explanation import Experiment, Late
from attn_export.diagnose.graph_run import GraphRun, GraphRunner, KnownCase
from attn_export.diagnose.meaning import Meaning
from attn_export.diagnose.reproduce import Smallest
from attn_export.parity.measures import eps, measure
from attn_export.results import Allowed, Arrays, Case, Golden
from attn_export.runtimes.protocol import Runtime, Tunable, known_limit
from attn_export.tensorfile import Array, is_floating

# -- the smallest part of a failing case that still fails ---------------------------------------

# -- the smaller cases that a case holds --------------------------------------------------------


Axes = Mapping[str, Sequence[object]]
Sizes = Mapping[str, int]

LENGTHS = (1, 2, 3)
ROWS = 4
MOST = 60


def smaller_cases(inputs: Arrays, axes: Axes, sizes: Sizes) -> Iterator[tuple[Sizes, Arrays]]:
    """Yield smaller cases contained in a case, the smallest first.

    They are rows of the batch, the first queries with their keys, the last keys of the past. Of a
    damaged case, whose inputs have other sizes than it says, that is the whole case.

    Args:
        inputs: Of the case.
        axes: The names of the axes of each input.
        sizes: Of every dynamic axis.
    """
    if not _have_sizes(inputs, axes, sizes):
        yield dict(sizes), dict(inputs)
        return
    found = []
    for row, L, P, S in itertools.product(
        range(min(sizes.get("batch", 1), ROWS)),
        _lengths(sizes.get("query_len")),
        _past(inputs, sizes),
        _lengths(sizes.get("key_len")),
    ):
        keep = _kept(sizes, row, L, P, S)
        part = {name: _cut(array, axes.get(name, ()), keep) for name, array in inputs.items()}
        cut = {axis: len(keep[axis]) if axis in keep else size for axis, size in sizes.items()}
        found.append((cut, part))
    found.sort(key=lambda entry: sum(array.size for array in entry[1].values()))
    yield from found[:MOST]


def _have_sizes(inputs: Arrays, axes: Axes, sizes: Sizes) -> bool:
    return all(
        sizes.get(str(name), size) == size
        for key, array in inputs.items()
        for name, size in zip(axes.get(key, ()), array.shape, strict=False)
    )


def _lengths(size: int | None) -> list[int | None]:
    if size is None:
        return [None]
    return [*(n for n in LENGTHS if n < size), size]


def _past(inputs: Arrays, sizes: Sizes) -> list[int | None]:
    # The capacity of a cache that is written in place is not how much it holds.
    if "past_len" not in sizes or "past_length" in inputs:
        return [None]
    return [0, *_lengths(sizes["past_len"])] if sizes["past_len"] else [0]


def _kept(sizes: Sizes, row: int, L: int | None, P: int | None, S: int | None) -> dict[str, Array]:
    """Return the indices to keep on each axis."""
    keep = {"batch": np.arange(row, row + 1)} if "batch" in sizes else {}
    if L is not None:
        keep["query_len"] = np.arange(L)
    if S is not None:
        keep["key_len"] = np.arange(S)
    if P is not None:
        before = sizes["past_len"]
        keep["past_len"] = np.arange(before - P, before)
        if "total_len" in sizes and L is not None:
            keep["total_len"] = np.arange(before - P, before + L)
    elif "total_len" in sizes and L is not None and "past_len" not in sizes:
        keep["total_len"] = np.arange(L)
    return keep


def _cut(array: Array, axes: Sequence[object], keep: Mapping[str, Array]) -> Array:
    for axis, name in enumerate(axes):
        # Where a mask is broadcast, its axis has no name.
        if isinstance(name, str) and name in keep and axis < array.ndim:
            array = np.take(array, keep[name], axis=axis)
    return array


def shrink_case(
    runner: GraphRunner,
    case: KnownCase,
    right: Meaning | None,
    axes: Axes,
    late: Late,
) -> Smallest:
    """Return the smallest part of a case that the runtime still fails.

    Args:
        runner: The graph in its runtime.
        case: One that fails.
        right: A graph that gives the truth of parts; None where there is none, and the case
            stays as it is.
        axes: The names of the axes of each input.
        late: Whether time is over.
    """
    whole = _whole(case)
    if right is None or late():
        return whole
    parts = {}
    for number, (sizes, inputs) in enumerate(smaller_cases(case.inputs, axes, case.sizes)):
        if runner.graph_file.takes(sizes):
            parts[f"part_{number}"] = (sizes, inputs)
    ran = runner.run({name: inputs for name, (_, inputs) in parts.items()})
    for name, (sizes, inputs) in parts.items():
        if name in ran.outputs:
            try:
                golden = make_golden(right, case, inputs)
            except NotComputedError:  # too small for the graph
                continue
            if not runner.passes(golden, ran, name):
                allowed = {n: a for n, a in golden.allowed.items() if a is not None}
                return Smallest(sizes, inputs, golden.expected, allowed, _types(case))
    return whole


def _whole(case: KnownCase) -> Smallest:
    limits = {name: a for name, a in case.golden.allowed.items() if a is not None}
    right = {name: array for name, array in case.golden.expected.items() if name in limits}
    return Smallest(case.sizes, case.inputs, right, limits, _types(case))


def _types(case: KnownCase) -> dict[str, str]:
    return {name: array.dtype.name for name, array in case.golden.expected.items()}


def make_golden(right: Meaning, case: KnownCase, inputs: Mapping[str, Array]) -> Golden:
    """Return the truth of other inputs, and the error allowed by the judge's rule.

    Args:
        right: A graph that gives the truth.
        case: The case that the inputs were made of.
        inputs: By name.

    Raises:
        NotComputedError: If a node cannot be computed from them.
    """
    expected = case.golden.expected
    fed = right.runner.to_graph_layout(inputs)
    dtypes = {name: array.dtype for name, array in expected.items() if is_floating(array.dtype)}
    narrow = next(iter(dtypes.values()), np.dtype(np.float32))
    truth = right.evaluation.outputs_of(right.evaluation.values(fed))
    noisy = right.evaluation.outputs_of(right.evaluation.noisy_values(fed, narrow))
    allowed: dict[str, Allowed | None] = {}
    for name in dtypes:
        error, least = measure(noisy[name], truth[name]), 4 * eps(dtypes[name])
        known = case.golden.allowed.get(name) or Allowed(0.0, 0.0)
        allowed[name] = Allowed(
            max(8 * error.whole, least, known.whole), max(8 * error.row, least, known.row)
        )
    rounded = {name: truth[name].astype(dtype) for name, dtype in dtypes.items()}
    part = Case("part", "shape", {}, inputs, "")
    return Golden(part, rounded, rounded, allowed, {})


# -- counter-experiments: the same cases, run in another way ------------------------------------

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


def rerun_in_runtime(
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


def run_smaller_inputs(runner: GraphRunner, trial: GraphRun, right: Meaning) -> ExperimentResult:
    """Run inputs divided by `QUIETER`, which removes overflow and saturation.

    Args:
        runner: The graph in its runtime.
        trial: The result without changes.
        right: A graph that gives the truth.
    """
    few = [case for case in trial.failed if right.values(case) is not None][:FEW]
    quiet = {case.name: _quiet(case) for case in few}
    ran = runner.run(quiet)
    goldens = {case.name: make_golden(right, case, quiet[case.name]) for case in few}
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


def run_elsewhere(
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
        if not late() and other.graph_file.name != runner.graph_file.name:
            found = other.trial(few)
            if found.failed or found.passed:
                yield _done(f"{other.graph_file.name} in {runner.runtime.name}", found, "")
    for kind in runtimes:
        if late() or kind.name == runner.runtime.name or kind.unavailable():
            continue
        if known_limit(kind, runner.graph_file, [runner.graph_file]):
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
