"""Meaning of a graph in float64, and the choice of cases for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from attn_export.diagnose.evaluate import Evaluation, NotComputedError, Values
from attn_export.diagnose.graph_run import GraphRun, GraphRunner, KnownCase, is_right
from attn_export.errors import GraphError
from attn_export.tensorfile import is_floating

FAILED, PASSED = 8, 4
"""Numbers of failed and of passed cases on which mistakes are tried."""

LARGEST, TIMES = 2**13, 16
"""Most numbers in a case that is evaluated, or most times those of the smallest case:
larger ones take long."""


@dataclasses.dataclass(frozen=True)
class Meaning:
    """A graph that can be evaluated in float64, and whether that gives the truth.

    Attributes:
        runner: The graph.
        right: Whether it does in the cases that were looked at and could be evaluated.
        stuck: By the name of each case that could not, the node that cannot be computed.
    """

    runner: GraphRunner
    evaluation: Evaluation
    right: bool
    stuck: Mapping[str, NotComputedError] = dataclasses.field(default_factory=dict)

    def outputs(self, case: KnownCase) -> Mapping[str, np.ndarray]:
        """Return the graph's float64 outputs, with the bundle's axes and names."""
        return self.as_stated(self.evaluation.values(self.runner.fed(case.inputs)))

    def as_stated(self, values: Values) -> Mapping[str, np.ndarray]:
        """Return the graph's outputs from its values, with the bundle's axes and names."""
        return self.runner.from_outputs(self.evaluation.outputs_of(values))

    def values(self, case: KnownCase) -> Values | None:
        """Return every value of a case; None if a node cannot be computed."""
        try:
            return self.evaluation.values(self.runner.fed(case.inputs))
        except NotComputedError:
            return None


def spread(cases: Sequence[KnownCase], count: int) -> list[KnownCase]:
    """Return some of the cases, from the smallest to the largest that can be evaluated.

    The smallest cases alone hide mistakes with several queries, or with a past.

    Args:
        cases: The smallest first.
        count: The number of cases.
    """
    plain = [case for case in cases if not case.golden.case.ignored_rows] or cases
    limit = max(LARGEST, TIMES * plain[0].size) if plain else 0
    fitting = [case for case in plain if case.size <= limit]
    if len(fitting) <= count:
        return list(fitting)
    return [fitting[round(i * (len(fitting) - 1) / (count - 1))] for i in range(count)]


def looked_at(trial: GraphRun) -> list[KnownCase]:
    """Return the cases to evaluate; the first fails and is of medium size."""
    failed = spread(trial.failed, FAILED)
    failed.insert(0, failed.pop(len(failed) // 2))
    passed = sorted(trial.passed, key=lambda case: case.size)
    return [*failed, *spread(passed, PASSED)]


def meaning(runner: GraphRunner, cases: Sequence[KnownCase]) -> Meaning:
    """Return the meaning of a graph.

    Args:
        runner: The graph.
        cases: The cases to compare with the truth.

    Raises:
        GraphError: If it cannot be evaluated in float64 at all.
    """
    found = Meaning(runner, Evaluation.load(runner.path), right=True)
    stuck: dict[str, NotComputedError] = {}
    right = True
    for case in cases:
        if runner.form.takes(case.sizes):
            try:
                right &= is_right(case.golden, found.outputs(case))
            except NotComputedError as error:
                stuck[case.name] = error
    return dataclasses.replace(found, right=right, stuck=stuck)


def understood(
    runner: GraphRunner, cases: Sequence[KnownCase], trial: GraphRun
) -> tuple[Meaning | None, str]:
    """Return the meaning of a graph; None and the reason if float64 cannot determine it.

    Args:
        runner: The graph.
        cases: The cases to compare with the truth.
        trial: The runtime's result.
    """
    try:
        found = meaning(runner, cases)
    except GraphError as error:
        return None, str(error)
    if any(name in trial.ran.outputs for name in found.stuck):
        # The runtime can do what the evaluation cannot.
        return None, str(next(iter(found.stuck.values())))
    return found, ""


def right_meaning(runners: Sequence[GraphRunner], cases: Sequence[KnownCase]) -> Meaning | None:
    """Return the first right graph of a bundle, if there is one.

    The bundle's own order has the standard dialect first, in which attention is one node.

    Args:
        runners: The graphs in their runtimes.
        cases: The cases.
    """
    for runner in runners:
        found = None if runner.form.layouts else if_right(runner, cases)
        if found is not None:
            return found
    return None


def if_right(runner: GraphRunner, cases: Sequence[KnownCase]) -> Meaning | None:
    """Return the meaning of a graph, if it gives the truth in every case.

    Args:
        runner: The graph in its runtime.
        cases: The cases.
    """
    try:
        found = meaning(runner, cases)
    except GraphError:
        return None
    return found if found.right and not found.stuck else None


def loses_precision(own: Meaning | None, right: Meaning | None, cases: Sequence[KnownCase]) -> bool:
    """Return whether a graph gives the truth in float64 alone.

    It is wrong after rounding, and another graph is not.

    Args:
        own: The graph.
        right: One of the bundle that gives the truth.
        cases: The failing cases.
    """
    if own is None or right is None or not own.right or own.runner.path == right.runner.path:
        return False
    return any(right_rounded(right, case) and not right_rounded(own, case) for case in cases)


def right_rounded(of: Meaning, case: KnownCase) -> bool:
    """Return whether a graph gives the truth with each node rounded to the module's own type.

    Args:
        of: The graph in float64.
        case: The case.
    """
    if not of.runner.form.takes(case.sizes):
        return True
    try:
        values = of.evaluation.noisy_values(of.runner.fed(case.inputs), dtype_of(case))
    except NotComputedError:
        return False
    return is_right(case.golden, of.as_stated(values))


def dtype_of(case: KnownCase) -> np.dtype:
    """Return the floating type of a case."""
    dtypes = (array.dtype for array in case.golden.expected.values())
    return next((dtype for dtype in dtypes if is_floating(dtype)), np.dtype(np.float32))
