"""Location of a fault, from a graph's meaning in float64 and a runtime's results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from attn_export.diagnose.eager_values import Witness, first_unmatched_node
from attn_export.diagnose.explanation import Deviation, Fault, Late, Lines
from attn_export.diagnose.graph_run import GraphRun, GraphRunner, KnownCase
from attn_export.diagnose.localise import (
    NO_SUCH_NODE,
    first_difference,
    first_runtime_deviation,
    first_value_in_no_right_graph,
    write_with_all_outputs,
)
from attn_export.diagnose.match import Evidence, Match, matches
from attn_export.diagnose.meaning import (
    Meaning,
    dtype_of,
    is_right_when_rounded,
    meaning_if_right,
    sample_cases,
)
from attn_export.temp_folders import scratch

LOCALISED = 6
"""Number of cases in which the first wrong node is looked for."""

ALIKE = 3
"""Number of these in which values are compared with all of another graph."""


def fault_of(own: Meaning | None, trial_elsewhere: GraphRun | None, *, lossy: bool) -> Fault:
    """Return whether the graph or the runtime is at fault.

    Args:
        own: The meaning of the graph in question.
        trial_elsewhere: Another runtime's result, if float64 cannot determine it.
        lossy: Whether it gives the truth in float64 alone.
    """
    if own is not None:
        return "runtime" if own.right and not own.stuck and not lossy else "graph"
    if trial_elsewhere is None or trial_elsewhere.ran.outcome != "ran":
        return "unknown"
    return "graph" if trial_elsewhere.failed else "runtime"


@dataclasses.dataclass(frozen=True)
class KnownMistakes:
    """Mistakes that account for the outputs, the best first.

    Attributes:
        in_right: Whether they were made in a right graph. Without one, what would have to be
            changed in the wrong one is looked for.
    """

    matches: Sequence[Match]
    in_right: bool


def known_mistakes(
    own: Meaning | None,
    right: Meaning | None,
    trial: GraphRun,
    cases: Sequence[KnownCase],
    late: Late,
) -> KnownMistakes:
    """Compare the outputs of a graph with known mistakes with the actual outputs.

    Args:
        own: The meaning of the graph in question.
        right: A graph that gives the truth, if there is one.
        trial: The runtime's result.
        cases: The cases to evaluate.
        late: Whether time is over.
    """
    made_in_right = right is not None
    base = right or own
    if base is None:
        return KnownMistakes([], made_in_right)
    evidence = []
    for case in cases:
        actual = trial.ran.outputs.get(case.name)
        values = base.values(case)
        if actual is None or values is None or set(actual) != set(base.evaluation.outputs):
            continue
        target = actual if made_in_right else case.golden.expected
        outputs = base.evaluation.outputs_of(values)
        evidence.append(Evidence(base.runner.to_graph_layout(case.inputs), values, outputs, target))
    found = matches(base.evaluation, evidence, late) if evidence else []
    if not found and right is not None and own is not None and not own.right:
        # The right graph may have another form.
        return known_mistakes(own, None, trial, cases, late)
    return KnownMistakes(found, made_in_right)


def first_deviation(
    fault: Fault,
    own: Meaning | None,
    twins: Sequence[GraphRunner],
    trial: GraphRun,
    lines: Lines,
    witness: Witness,
) -> Deviation | None:
    """Return the first node that deviates from the float64 run; for a wrong graph over cases.

    An error in a causal mask cannot show with one query.

    Args:
        fault: Whether the graph or the runtime is wrong.
        own: The meaning of the graph.
        twins: Graphs of the bundle to compare with.
        trial: The runtime's result.
        lines: The line of the module behind each node.
        witness: What values are compared with where no graph of the bundle is right.
    """
    if own is None or own.stuck or not trial.failed:
        return None
    if fault == "graph":
        found = _first_of_several(own, twins, trial, lines)
        if found is None or NO_SUCH_NODE in found.says:
            return _unlike(own, trial, lines, witness) or found
        return found
    case = trial.failed[0]
    values = own.values(case)
    if values is None:
        return None
    noise = own.evaluation.noisy_values(own.runner.to_graph_layout(case.inputs), dtype_of(case))
    with scratch() as folder:
        path = folder / own.runner.path.name
        write_with_all_outputs(own.runner.path, values, path)
        seen = dataclasses.replace(own.runner, path=path).run({case.name: case.inputs})
        actual = seen.outputs.get(case.name)
    if actual is None:
        return None
    actual = own.runner.to_graph_layout(actual)  # it was put in order, for the bundle
    return first_runtime_deviation(own.evaluation, values, noise, actual, lines)


def first_lossy(own: Meaning, cases: Sequence[KnownCase], lines: Lines) -> Deviation | None:
    """Return the first node that loses precision, in a graph that is right in float64 alone.

    Args:
        own: The meaning of the graph.
        cases: The failing cases.
        lines: The line of the module behind each node.
    """
    for case in cases:
        values = own.values(case)
        if values is not None and not is_right_when_rounded(own, case):
            rounded = own.evaluation.noisy_values(
                own.runner.to_graph_layout(case.inputs), dtype_of(case)
            )
            arrays = {n: a for n, a in rounded.items() if isinstance(a, np.ndarray)}
            found = first_runtime_deviation(own.evaluation, values, values, arrays, lines)
            if found is not None:
                return found
    return None


def _first_of_several(
    own: Meaning, twins: Sequence[GraphRunner], trial: GraphRun, lines: Lines
) -> Deviation | None:
    cases = sample_cases(trial.failed, LOCALISED)
    twin = _twin(own, twins, cases[:1])
    if twin is None:
        return None
    order = {node.name: number for number, node in enumerate(own.evaluation.nodes)}
    found = []
    for case in cases:
        mine, theirs = own.values(case), twin.values(case)
        if mine is None or theirs is None:
            continue
        one = first_difference(own.evaluation, mine, twin.evaluation, theirs, lines)
        if one is not None:
            found.append(one)
    if not found:
        return _by_values(own, twins, cases, lines)
    return min(found, key=lambda one: (order[one.node], -one.error))


def _unlike(own: Meaning, trial: GraphRun, lines: Lines, witness: Witness) -> Deviation | None:
    """Return the first value that the witness does not have, of several cases."""
    if witness.steps is None:
        return None
    order = {node.output[0]: number for number, node in enumerate(own.evaluation.nodes)}
    found = []
    for case in sample_cases(trial.failed, ALIKE):
        values = own.values(case)
        if values is not None:
            steps = witness.steps(case.inputs)
            one = first_unmatched_node(own.evaluation, values, witness.name, steps, lines)
            found += [one] if one is not None else []
    return min(found, key=lambda one: order[one.value], default=None)


def _by_values(
    own: Meaning, others: Sequence[GraphRunner], cases: Sequence[KnownCase], lines: Lines
) -> Deviation | None:
    """Return the first deviation from the bundle's graphs, for a graph with other names."""
    right = [found for other in others if (found := meaning_if_right(other, cases)) is not None]
    seen = []
    for case in cases[-ALIKE:]:
        mine = own.values(case)
        theirs = [values for of in right if (values := of.values(case)) is not None]
        if mine is not None and theirs:
            seen.append((mine, theirs))
    return first_value_in_no_right_graph(own.evaluation, seen, lines) if seen else None


def _twin(
    own: Meaning, others: Sequence[GraphRunner], cases: Sequence[KnownCase]
) -> Meaning | None:
    """Return the right graph that shares most names of values with the one in question."""
    mine = set(own.evaluation.producer)
    best: Meaning | None = None
    for other in others:
        found = meaning_if_right(other, cases)
        if found is None or found.runner.path == own.runner.path:
            continue
        if best is None or _shared(mine, found) > _shared(mine, best):
            best = found
    return best


def _shared(names: set[str], other: Meaning) -> int:
    return len(names & set(other.evaluation.producer))
