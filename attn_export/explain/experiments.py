"""Control experiments: failing cases reduced in size, or run in another way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attn_export.cases.draw import Sizes
from attn_export.explain.explanation import Experiment, OutOfTime
from attn_export.explain.graph_evaluation import EvaluatedGraph, dtype_of
from attn_export.explain.graph_run import GoldenCase, GraphRun, GraphRunner, passes
from attn_export.explain.input_roles import input_roles
from attn_export.float64.evaluate import NotComputedError
from attn_export.measures import eps, measure
from attn_export.results import Arrays, Case, Golden
from attn_export.runtimes.protocol import Runtime, known_limit
from attn_export.schema import Tolerance
from attn_export.tensorfile import Array, is_floating

# -- the smallest part of a failing case that still fails ---------------------------------------

LENGTHS = (1, 2, 3)
"""Numbers of queries, keys and past keys to keep. All of them are tried too, and no past keys."""

_MOST_BATCH_ELEMENTS = 4
"""The largest number of batch elements of which each is tried alone."""

_MOST_SMALLER = 60
"""The largest number of smaller cases that are run."""


def smaller_cases(
    inputs: Arrays, axes: Mapping[str, Sequence[object]], sizes: Sizes
) -> Iterator[tuple[Sizes, Arrays]]:
    """Yield smaller cases that a case contains, the smallest first, with their sizes.

    They have one batch element, the first queries with their keys, and the last keys of the past.
    If the inputs do not have the stated sizes, only the whole case is yielded.
    """
    if not _have_sizes(inputs, axes, sizes):
        yield dict(sizes), dict(inputs)
        return
    kept = _kept_indices(inputs, sizes)
    has_all_keys = "past_len" in kept or "past_len" not in sizes
    has_total = {"total_len", "query_len"} <= sizes.keys() and has_all_keys
    cases = []
    for indices in itertools.product(*kept.values()):
        keep = dict(zip(kept, indices, strict=True))
        if has_total:
            past = sizes.get("past_len", 0)
            first = past - len(keep.get("past_len", ()))
            keep["total_len"] = np.arange(first, past + len(keep["query_len"]))
        cut_inputs = {name: _cut(array, axes.get(name, ()), keep) for name, array in inputs.items()}
        cut_sizes = {
            axis: len(keep[axis]) if axis in keep else size for axis, size in sizes.items()
        }
        cases.append((cut_sizes, cut_inputs))
    cases.sort(key=lambda entry: sum(array.size for array in entry[1].values()))
    yield from cases[:_MOST_SMALLER]


def _have_sizes(inputs: Arrays, axes: Mapping[str, Sequence[object]], sizes: Sizes) -> bool:
    return all(
        sizes.get(str(name), size) == size
        for key, array in inputs.items()
        for name, size in zip(axes.get(key, ()), array.shape, strict=False)
    )


def _kept_indices(inputs: Arrays, sizes: Sizes) -> dict[str, list[Array]]:
    """Return the choices of indices to keep on each axis: the first ones, or the last past keys."""
    kept = {}
    if "batch" in sizes:
        elements = range(min(sizes["batch"], _MOST_BATCH_ELEMENTS))
        kept["batch"] = [np.arange(element, element + 1) for element in elements]
    if "query_len" in sizes:
        kept["query_len"] = [np.arange(n) for n in _lengths(sizes["query_len"])]
    # A cache in place has a capacity, which is not the number of its keys.
    if "past_len" in sizes and "past_length" not in inputs:
        past = sizes["past_len"]
        counts = [0, *_lengths(past)] if past else [0]
        kept["past_len"] = [np.arange(past - n, past) for n in counts]
    if "key_len" in sizes:
        kept["key_len"] = [np.arange(n) for n in _lengths(sizes["key_len"])]
    return kept


def _lengths(size: int) -> list[int]:
    return [*(n for n in LENGTHS if n < size), size]


def _cut(array: Array, axes: Sequence[object], keep: Mapping[str, Array]) -> Array:
    for axis, name in enumerate(axes):
        # An axis of 1 that is broadcast has no name.
        if isinstance(name, str) and name in keep and axis < array.ndim:
            array = np.take(array, keep[name], axis=axis)
    return array


def shrink_case(
    runner: GraphRunner,
    case: GoldenCase,
    right: EvaluatedGraph | None,
    axes: Mapping[str, Sequence[object]],
    out_of_time: OutOfTime,
) -> GoldenCase:
    """Return the smallest part of a case that still fails, or the case itself."""
    if right is None or out_of_time():
        return case
    smaller = {}
    for number, (sizes, inputs) in enumerate(smaller_cases(case.inputs, axes, case.sizes)):
        if runner.graph_file.takes(sizes):
            smaller[f"part_{number}"] = (sizes, inputs)
    ran = runner.run({name: inputs for name, (_, inputs) in smaller.items()})
    for name, (sizes, inputs) in smaller.items():
        if name not in ran.outputs:
            continue
        try:
            golden = _make_golden(right, case, inputs)
        except NotComputedError:  # too small for the graph
            continue
        runs = (ran.outputs[name], ran.separate.get(name, ran.outputs[name]))
        if not all(passes(golden, outputs) for outputs in runs):
            return dataclasses.replace(case, sizes=sizes, inputs=inputs, golden=golden)
    return case


def _make_golden(right: EvaluatedGraph, case: GoldenCase, inputs: Mapping[str, Array]) -> Golden:
    """Return a case of changed inputs with its reference and a tolerance.

    The tolerance is the largest of 8 times the error of a run that rounds each value to the
    module's type, 4 eps, and the error that the original case allows.
    """
    dtype = dtype_of(case.golden)
    graph_inputs = right.runner.to_graph_layout(inputs)
    reference, rounded = (
        right.runner.to_case_layout(right.evaluation.outputs_of(values))
        for values in (
            right.evaluation.values(graph_inputs),
            right.evaluation.rounded_values(graph_inputs, dtype),
        )
    )
    outputs = {name: reference[name].astype(a.dtype) for name, a in case.golden.expected.items()}
    tolerance: dict[str, Tolerance | None] = {}
    for name, array in outputs.items():
        original = case.golden.tolerance[name]
        if original is None:  # integers, which must be equal
            tolerance[name] = None
            continue
        error, least = measure(rounded[name], reference[name]), 4 * eps(array.dtype)
        tolerance[name] = Tolerance(
            max(8 * error.whole, least, original.whole), max(8 * error.row, least, original.row)
        )
    part = Case("part", "shape", {}, inputs, "")
    return Golden(part, outputs, outputs, tolerance, {})


# -- control experiments: the same cases, run in another way ------------------------------------

MOST_CASES = 5
"""The largest number of failed cases that are run again."""

_DIVISOR = 16.0
"""The divisor of inputs. It is a power of two, so the division is exact."""


KindedExperiment = tuple[Experiment, str]
"""An experiment, and the kind of the cause if it passes; "" if it ran another graph or runtime,
which is a workaround and no cause."""


def rerun_in_runtime(
    runner: GraphRunner, original: GraphRun, cases: Sequence[GoldenCase], out_of_time: OutOfTime
) -> Iterator[KindedExperiment]:
    """Yield results of the graph in the same runtime with other options, order, process or threads.

    Most experiments run all cases, because a fault may depend on the cases before it.
    """
    for name, options in runner.runtime.counter_options.items():
        if not out_of_time():
            shown = ", ".join(f"{key}={value}" for key, value in options.items())
            yield _result(f"{name} ({shown})", runner.trial(cases, options), name)
    reruns: list[tuple[str, GraphRunner, Sequence[GoldenCase], str]] = [
        ("a fresh process for the one case", runner, original.failed[:1], "what was run before"),
        ("the cases in the reverse order", runner, cases[::-1], "what was run before"),
    ]
    if runner.limits.threads > 1:
        limits = dataclasses.replace(runner.limits, threads=1)
        reruns.append(("one thread", dataclasses.replace(runner, limits=limits), cases, "threads"))
    for name, changed_runner, chosen, kind in reruns:
        if not out_of_time():
            yield _result(name, changed_runner.trial(chosen), kind)


def run_scaled_inputs(
    runner: GraphRunner, original: GraphRun, right: EvaluatedGraph
) -> KindedExperiment:
    """Return the result for inputs divided by `_DIVISOR`, which removes overflow and saturation."""
    cases = [case for case in original.failed if right.values(case) is not None][:MOST_CASES]
    scaled = {case.name: _scale_down(case, right) for case in cases}
    ran = runner.run(scaled)
    goldens = {case.name: _make_golden(right, case, scaled[case.name]) for case in cases}
    passed = [case for case in cases if passes(goldens[case.name], ran.outputs.get(case.name))]
    failed = tuple(case for case in cases if case not in passed)
    name = f"inputs divided by {_DIVISOR:g}"
    return _result(name, GraphRun(ran, failed, tuple(passed)), "large numbers")


def _scale_down(case: GoldenCase, graph: EvaluatedGraph) -> dict[str, np.ndarray]:
    """Divide the floating inputs; not masks, of which a large negative number hides a key."""
    inputs = dict(case.inputs)
    for name, array, role in input_roles(graph.evaluation, case.inputs):
        if is_floating(array.dtype) and role != "mask":
            inputs[name] = array / np.asarray(_DIVISOR, array.dtype)
    return inputs


def run_elsewhere(
    runner: GraphRunner,
    original: GraphRun,
    others: Sequence[GraphRunner],
    runtimes: Sequence[Runtime],
    out_of_time: OutOfTime,
) -> Iterator[KindedExperiment]:
    """Yield results of other graphs in the same runtime, and of this graph in other runtimes."""
    few = original.failed[:MOST_CASES]
    for other in others:
        if not out_of_time() and other.graph_file.name != runner.graph_file.name:
            trial = other.trial(few)
            if trial.failed or trial.passed:
                yield _result(f"{other.graph_file.name} in {runner.runtime.name}", trial, "")
    for runtime in runtimes:
        if out_of_time() or runtime.name == runner.runtime.name or runtime.unavailable():
            continue
        if known_limit(runtime, runner.graph_file):
            continue
        other = dataclasses.replace(runner, runtime=runtime, options={})
        yield _result(f"the same graph in {runtime.name}", other.trial(few), "")


def _result(name: str, trial: GraphRun, kind: str) -> KindedExperiment:
    total = len(trial.failed) + len(trial.passed)
    if not trial.ran.outputs:
        experiment = Experiment(name, None, trial.ran.complaint or trial.ran.outcome)
    else:
        says, count = ("fails", len(trial.failed)) if trial.failed else ("passes", total)
        result = f"{says} ({count} of {total})" if total > 1 else says
        experiment = Experiment(name, not trial.failed, result)
    return experiment, kind
