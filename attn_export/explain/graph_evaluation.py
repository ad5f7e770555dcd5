"""Comparison of a graph's float64 evaluation with the reference, and the choice of cases for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from attn_export.errors import GraphError
from attn_export.explain.graph_run import GoldenCase, GraphRun, GraphRunner, is_right
from attn_export.float64.evaluate import Evaluation, NotComputedError, Values
from attn_export.results import Golden
from attn_export.tensorfile import is_floating

FAILED, PASSED = 8, 4
"""The numbers of failed and of passed cases on which known faults are tried."""

LARGEST, TIMES = 2**13, 16
"""Limits on the size of a case that is evaluated: input elements, or multiples of the smallest
case, whichever is larger. Larger cases take too long."""


@dataclasses.dataclass(frozen=True)
class EvaluatedGraph:
    """A graph that can be evaluated in float64, and whether the evaluation gives the reference.

    Attributes:
        evaluation: The graph in float64.
        right: Whether it gives the reference in all examined cases that could be evaluated.
        not_computed: The error of each case that could not be evaluated, by the name of the case.
    """

    runner: GraphRunner
    evaluation: Evaluation
    right: bool
    not_computed: Mapping[str, NotComputedError] = dataclasses.field(default_factory=dict)

    def values(self, case: GoldenCase) -> Values | None:
        """Compute every value of the graph for a case; None if a node cannot be computed."""
        try:
            return self.evaluation.values(self.runner.to_graph_layout(case.inputs))
        except NotComputedError:
            return None

    def rounded_values(self, case: GoldenCase) -> Values | None:
        """Compute the values as `values` does, each rounded to the module's own type."""
        inputs = self.runner.to_graph_layout(case.inputs)
        try:
            return self.evaluation.rounded_values(inputs, dtype_of(case.golden))
        except NotComputedError:
            return None


def sample_cases(cases: Sequence[GoldenCase], count: int) -> list[GoldenCase]:
    """Return cases chosen evenly from the smallest to the largest that may be evaluated.

    The smallest cases alone would hide faults that need several queries or a past.
    """
    usable = [case for case in cases if not case.golden.case.ignored_rows] or cases
    limit = max(LARGEST, TIMES * usable[0].size) if usable else 0
    small = [case for case in usable if case.size <= limit]
    if len(small) <= count:
        return list(small)
    return [small[round(i * (len(small) - 1) / (count - 1))] for i in range(count)]


def choose_cases(trial: GraphRun) -> list[GoldenCase]:
    """Choose failed and passed cases to evaluate; the first one failed, and is of medium size."""
    failed = sample_cases(trial.failed, FAILED)
    failed.insert(0, failed.pop(len(failed) // 2))
    passed = sorted(trial.passed, key=lambda case: case.size)
    return [*failed, *sample_cases(passed, PASSED)]


def evaluate_graph(runner: GraphRunner, cases: Sequence[GoldenCase]) -> EvaluatedGraph:
    """Return a graph evaluated in float64, and whether it gives the reference."""
    evaluation = Evaluation.load(runner.path)
    not_computed: dict[str, NotComputedError] = {}
    right = True
    for case in cases:
        if runner.graph_file.takes(case.sizes):
            try:
                found = evaluation.outputs_at(runner.to_graph_layout(case.inputs))
            except NotComputedError as error:
                not_computed[case.name] = error
                continue
            right &= is_right(case.golden, runner.to_case_layout(found))
    return EvaluatedGraph(runner, evaluation, right, not_computed)


def evaluate_if_possible(
    runner: GraphRunner, cases: Sequence[GoldenCase], trial: GraphRun
) -> tuple[EvaluatedGraph | None, str]:
    """Return a graph evaluated in float64 and "", or None and the reason that it cannot be."""
    try:
        evaluated = evaluate_graph(runner, cases)
    except GraphError as error:
        return None, str(error)
    if any(name in trial.ran.outputs for name in evaluated.not_computed):
        # The runtime computes a case that the evaluation cannot.
        return None, str(next(iter(evaluated.not_computed.values())))
    return evaluated, ""


def first_right_graph(
    runners: Sequence[GraphRunner], cases: Sequence[GoldenCase]
) -> EvaluatedGraph | None:
    """Return the first graph of a bundle that gives the reference, if there is one.

    The standard dialect, in which attention is one node, comes first in a bundle. Graphs with
    other axis orders are left out.
    """
    for runner in runners:
        evaluated = None if runner.graph_file.layouts else evaluate_if_right(runner, cases)
        if evaluated is not None:
            return evaluated
    return None


def evaluate_if_right(runner: GraphRunner, cases: Sequence[GoldenCase]) -> EvaluatedGraph | None:
    """Return a graph evaluated in float64; None unless it gives the reference in every case."""
    try:
        evaluated = evaluate_graph(runner, cases)
    except GraphError:
        return None
    return evaluated if evaluated.right and not evaluated.not_computed else None


def loses_precision(
    suspect: EvaluatedGraph | None, right: EvaluatedGraph | None, cases: Sequence[GoldenCase]
) -> bool:
    """Return whether a graph gives the reference in float64, but not in the module's own type.

    That is so if it is wrong after rounding in a case in which another graph is right.
    """
    if suspect is None or right is None or not suspect.right:
        return False
    return any(
        is_right_when_rounded(right, case) and not is_right_when_rounded(suspect, case)
        for case in cases
    )


def is_right_when_rounded(evaluated: EvaluatedGraph, case: GoldenCase) -> bool:
    """Return whether a graph gives the reference if each node is rounded to the module's own type.

    It counts as right in a case whose sizes it does not accept.

    `evaluated`: The graph in float64.
    """
    if not evaluated.runner.graph_file.takes(case.sizes):
        return True
    values = evaluated.rounded_values(case)
    if values is None:
        return False
    outputs = evaluated.runner.to_case_layout(evaluated.evaluation.outputs_of(values))
    return is_right(case.golden, outputs)


def dtype_of(golden: Golden) -> np.dtype:
    """Return the floating type of a case's outputs; float32 if there is none."""
    dtypes = (array.dtype for array in golden.expected.values())
    return next((dtype for dtype in dtypes if is_floating(dtype)), np.dtype(np.float32))
