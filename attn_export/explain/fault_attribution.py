"""Attribution of a fault to graph or runtime, and search for the first wrong node."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper

from attn_export.explain.comparison import Evidence
from attn_export.explain.eager_values import ValueReference, first_unmatched_node
from attn_export.explain.explanation import Blame, Deviation, Lines, OutOfTime
from attn_export.explain.graph_evaluation import (
    EvaluatedGraph,
    evaluate_if_right,
    is_right_when_rounded,
    sample_cases,
)
from attn_export.explain.graph_run import GoldenCase, GraphRun, GraphRunner
from attn_export.explain.inexact_operators import inexact_operator
from attn_export.explain.localise import (
    GRAPHS_AGREE,
    NO_SUCH_NODE,
    first_difference,
    first_runtime_deviation,
    first_value_in_no_right_graph,
    value_error,
    write_with_all_outputs,
)
from attn_export.explain.match import Match, matches
from attn_export.explain.value_relations import first_relation
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.measures import eps, measure
from attn_export.results import Arrays
from attn_export.temp_folders import scratch
from attn_export.tensorfile import Array, is_floating

_LOCALISED = 6
"""The largest number of cases in which the first wrong node is located."""

_ROUNDED, _MOST_ROUNDED = 1000, 0.02
"""The largest relative distance of outputs that only differ by rounding, in eps, and in all."""

ALIKE = 3
"""The largest number of cases in which each value is compared with all values of a reference."""


def fault_of(
    suspect: EvaluatedGraph | None, trial_elsewhere: GraphRun | None, *, lossy: bool
) -> Blame:
    """Return whether the graph or the runtime is at fault.

    `suspect`: The graph in question; None if it cannot be evaluated in float64.
    `lossy`: Whether the graph gives the reference in float64, but not in its own type.
    """
    if suspect is not None:
        return "runtime" if suspect.right and not suspect.not_computed and not lossy else "graph"
    if trial_elsewhere is None or trial_elsewhere.ran.outcome != "ran":
        return "unknown"
    return "graph" if trial_elsewhere.failed else "runtime"


def known_faults(
    suspect: EvaluatedGraph | None,
    right: EvaluatedGraph | None,
    trial: GraphRun,
    cases: Sequence[GoldenCase],
    out_of_time: OutOfTime,
    first: Deviation | None = None,
) -> tuple[list[Match], bool]:
    """Return the known faults that explain the outputs of a graph.

    `suspect`: The graph in question; None if it cannot be evaluated in float64.

    Returns:
        The faults, and whether they were made in a right graph and give the wrong outputs.
        Otherwise they were made in the wrong graph and give the right outputs.
    """
    from_right_graph = right is not None
    base = right or suspect
    if base is None:
        return [], from_right_graph
    evidence = []
    for case in cases:
        target = case.golden.expected if right is None else _actual_outputs(suspect, trial, case)
        values = base.values(case)
        if target is None or values is None or set(target) != set(base.evaluation.outputs):
            continue
        outputs = base.evaluation.outputs_of(values)
        layout = base.runner.to_graph_layout(target)
        errors = case.golden.tolerance.items() if case in trial.passed else ()
        tolerance = {name: error.whole for name, error in errors if error is not None}
        evidence.append(Evidence(values, outputs, layout, case.sizes, tolerance))
    matching = []
    if evidence:
        thorough = first is None or not first.relation
        matching = matches(base.evaluation, evidence, out_of_time, thorough=thorough)
        if right is None:  # a correction must make the outputs right, which no rounding does
            matching = [match for match in matching if match.exact and not match.fault.is_rounding]
        elif first is not None and suspect is not None and not suspect.right:
            tried = [(case, suspect.values(case)) for case in cases[:ALIKE]]
            matching = [
                match for match in matching
                if match.exact or all(
                    _gives(match, base, first.value, case, seen) for case, seen in tried
                )
            ]  # fmt: skip
    is_wrong = suspect is not None and not suspect.right
    is_unclear = first is None or bool(first.among)
    if not matching and is_unclear and right is not None and is_wrong:
        # The graphs may differ in structure: search for a fault that corrects the wrong one.
        return known_faults(suspect, None, trial, cases, out_of_time, first)
    return matching, from_right_graph


def _gives(
    match: Match, right: EvaluatedGraph, name: str, case: GoldenCase, wrong_values: Values | None
) -> bool:
    """Return whether a fault gives the first wrong value, as far as can be seen."""
    values = right.values(case)
    if values is None or wrong_values is None or name not in right.evaluation.producer:
        return True
    mistaken = match.fault.values(right.evaluation, values)
    before, after = (value_error(wrong_values[name], x[name]) for x in (values, mistaken))
    return after <= max(GRAPHS_AGREE, before / 2)


def _actual_outputs(
    suspect: EvaluatedGraph | None, trial: GraphRun, case: GoldenCase
) -> Arrays | None:
    """Return the outputs to explain: those of a wrong graph in float64, else the runtime's."""
    values = None if suspect is None or suspect.right else suspect.values(case)
    if suspect is None or values is None:
        return trial.ran.outputs.get(case.name)
    return suspect.runner.to_case_layout(suspect.evaluation.outputs_of(values))


def first_deviation(
    fault: Blame,
    suspect: EvaluatedGraph | None,
    counterparts: Sequence[GraphRunner],
    trial: GraphRun,
    lines: Lines,
    reference: ValueReference,
) -> Deviation | None:
    """Return the first wrong node.

    If the runtime is wrong, its values in the smallest failing case are compared with float64. If
    the graph is wrong, it is compared with other graphs in several cases, because a fault in a
    causal mask, for example, does not show with one query.

    `suspect`: The graph in question; None if it cannot be evaluated in float64.
    """
    if suspect is None or suspect.not_computed or not trial.failed:
        return None
    if fault != "graph":
        return _with_line(_first_in_runtime(suspect, trial.failed[0]), lines)
    deviation = _with_line(_first_over_cases(suspect, counterparts, trial), lines)
    if deviation is None or deviation.among or NO_SUCH_NODE in deviation.says:
        return _first_unmatched_over_cases(suspect, trial, lines, reference) or deviation
    return deviation


def _with_line(deviation: Deviation | None, lines: Lines) -> Deviation | None:
    if deviation is None:
        return None
    return dataclasses.replace(deviation, line=lines.get(deviation.node, ""))


def _first_in_runtime(suspect: EvaluatedGraph, case: GoldenCase) -> Deviation | None:
    """Return the first node whose output in the runtime is wrong; a copy outputs every value."""
    values, rounded = suspect.values(case), suspect.rounded_values(case)
    if values is None or rounded is None:
        return None
    with scratch() as folder:
        path = folder / suspect.runner.path.name
        write_with_all_outputs(suspect.runner.path, values, path)
        run = dataclasses.replace(suspect.runner, path=path).run({case.name: case.inputs})
        actual = run.outputs.get(case.name)
    if actual is None:
        return None
    actual = suspect.runner.to_graph_layout(actual)  # outputs came in the bundle's axis order
    return inexact_operator(suspect, case, actual) or first_runtime_deviation(
        suspect.evaluation, values, rounded, actual
    )


def first_lossy(
    suspect: EvaluatedGraph, cases: Sequence[GoldenCase], lines: Lines
) -> Deviation | None:
    """Return the first node that loses precision, in a graph that is right in float64."""
    for case in cases:
        values, rounded = suspect.values(case), suspect.rounded_values(case)
        if values is None or rounded is None:
            continue
        if not is_right_when_rounded(suspect, case):
            arrays = {n: a for n, a in rounded.items() if isinstance(a, np.ndarray)}
            deviation = first_runtime_deviation(suspect.evaluation, values, values, arrays)
            if deviation is not None:
                return _with_line(deviation, lines)
    return None


def _first_over_cases(
    suspect: EvaluatedGraph, counterparts: Sequence[GraphRunner], trial: GraphRun
) -> Deviation | None:
    cases = sample_cases(trial.failed, _LOCALISED)
    counterpart = _counterpart(suspect, counterparts, cases[:1])
    if counterpart is None:
        return None
    others = sample_cases(trial.passed, ALIKE)
    suspect, counterpart, chosen = _in_one_branch(suspect, counterpart, [*cases, *others])
    order = {node.name: number for number, node in enumerate(suspect.evaluation.nodes)}
    deviations, compared = [], []
    for case in chosen:
        suspect_values, right_values = suspect.values(case), counterpart.values(case)
        if suspect_values is None or right_values is None:
            continue
        compared.append((suspect_values, right_values))
        found = first_difference(
            suspect.evaluation, suspect_values, counterpart.evaluation, right_values
        )
        deviations += [found] if found is not None else []
    if not deviations:
        return _first_by_values(suspect, counterparts, cases)
    name, first = min(deviations, key=lambda found: (order[found[1].node], -found[1].error))
    relation, in_weights = first_relation(
        name, suspect.evaluation, counterpart.evaluation, compared
    )
    return dataclasses.replace(first, relation=relation, in_weights=in_weights)


def _first_unmatched_over_cases(
    suspect: EvaluatedGraph, trial: GraphRun, lines: Lines, reference: ValueReference
) -> Deviation | None:
    """Return the first node with a value that the reference does not have in a failing case.

    It is the largest case that has one: values of few elements are alike by coincidence. In
    float64 a graph may decide otherwise than it did, as on the bucket of a distance; such cases
    show nothing.
    """
    for case in reversed(sample_cases(trial.failed, 2 * ALIKE) if reference.steps else ()):
        values = suspect.values(case)
        if values is not None and reference.steps is not None and is_as_run(
            suspect, values, trial.ran.outputs.get(case.name, {})
        ):  # fmt: skip
            steps = reference.steps(case.inputs)
            deviation = first_unmatched_node(suspect.evaluation, values, reference, steps, lines)
            if deviation is not None:
                return deviation
    return None


def is_as_run(suspect: EvaluatedGraph, values: Values, ran: Arrays) -> bool:
    """Return whether the float64 outputs of a graph are those of the runtime, but for rounding."""
    outputs = suspect.runner.to_case_layout(suspect.evaluation.outputs_of(values))
    return all(
        measure(ran[name], array).whole <= min(_ROUNDED * eps(ran[name].dtype), _MOST_ROUNDED)
        for name, array in outputs.items()
        if name in ran and is_floating(ran[name].dtype) and ran[name].shape == array.shape
    )


def _first_by_values(
    suspect: EvaluatedGraph, others: Sequence[GraphRunner], cases: Sequence[GoldenCase]
) -> Deviation | None:
    """Return the first node with a value in no right graph, for a graph with other value names."""
    right_graphs = [
        right_graph
        for other in others
        if (right_graph := evaluate_if_right(other, cases)) is not None
    ]
    compared = []
    for case in cases[-ALIKE:]:
        suspect_values = suspect.values(case)
        right_values = [
            values for graph in right_graphs if (values := graph.values(case)) is not None
        ]
        if suspect_values is not None and right_values:
            compared.append((suspect_values, right_values))
    return first_value_in_no_right_graph(suspect.evaluation, compared) if compared else None


def _counterpart(
    suspect: EvaluatedGraph, others: Sequence[GraphRunner], cases: Sequence[GoldenCase]
) -> EvaluatedGraph | None:
    """Return the right graph that shares most value names with the one in question."""
    names = set(suspect.evaluation.producer)
    candidates = [
        candidate
        for other in others
        if other.path != suspect.runner.path
        and (candidate := evaluate_if_right(other, cases)) is not None
    ]
    return max(
        candidates,
        key=lambda candidate: len(names.intersection(candidate.evaluation.producer)),
        default=None,
    )


# -- graphs with the branches that a case takes in place of their If nodes ----------------------


def _in_one_branch(
    suspect: EvaluatedGraph, counterpart: EvaluatedGraph, cases: Sequence[GoldenCase]
) -> tuple[EvaluatedGraph, EvaluatedGraph, list[GoldenCase]]:
    """Return two graphs without `If` nodes, and the cases that take the branches that they have."""
    graphs, chosen = [], list(cases)
    for graph in (suspect, counterpart):
        taken = {
            case.name: [bool(values[node.input[0]]) for node in _branching(graph.evaluation)]
            for case in chosen
            if (values := graph.values(case)) is not None
        }
        if not any(taken.values()):  # there is no such node, or no case can be computed
            graphs.append(graph)
            continue
        first = next(case for case in chosen if case.name in taken)
        chosen = [case for case in chosen if taken.get(case.name) == taken[first.name]]
        inputs = graph.runner.to_graph_layout(first.inputs)
        inlined = dataclasses.replace(graph, evaluation=_inlined(graph.evaluation, inputs))
        graphs.append(inlined)
    return graphs[0], graphs[1], chosen


def _branching(evaluation: Evaluation) -> list[onnx.NodeProto]:
    return [node for node in evaluation.nodes if node.op_type == "If"]


def _inlined(evaluation: Evaluation, inputs: Mapping[str, Array]) -> Evaluation:
    """Return a graph with the branches that it takes with some inputs, nested ones too."""
    if not _branching(evaluation):
        return evaluation
    values = evaluation.values(inputs)
    model = onnx.ModelProto()
    model.CopyFrom(evaluation.proto)
    del model.graph.node[:]
    for node in evaluation.nodes:
        if node.op_type != "If":
            model.graph.node.append(node)
            continue
        taken = "then_branch" if values[node.input[0]] else "else_branch"
        branch = next(a.g for a in node.attribute if a.name == taken)
        model.graph.initializer.extend(branch.initializer)
        model.graph.node.extend(branch.node)
        for inner, name in zip(branch.output, node.output, strict=True):
            identity = helper.make_node("Identity", [inner.name], [name], f"{node.name}.{name}")
            model.graph.node.append(identity)
    return _inlined(Evaluation(model), inputs)
