"""What is to blame, from what a graph means in float64 and what a runtime made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from attn_export.errors import GraphError
from attn_export.explain.evaluate import Evaluation
from attn_export.explain.explanation import Deviation, Fault, Late, Lines
from attn_export.explain.localise import (
    first_difference,
    first_rounded_away,
    with_all_outputs,
)
from attn_export.explain.match import Evidence, Match, matches
from attn_export.explain.setting import KnownCase, Setting, Trial, is_right
from attn_export.scratch import scratch
from attn_export.tensorfile import is_floating

FAILED, PASSED = 8, 4
"""How many cases of each sort mistakes are tried on."""

LOCALISED = 3
"""In how many of the smallest and of the largest cases the first wrong node is looked for."""


@dataclasses.dataclass(frozen=True)
class Meaning:
    """A graph that can be evaluated in float64, and whether that gives the truth.

    Attributes:
        setting: The graph.
        right: Whether it does in the cases that were looked at.
    """

    setting: Setting
    evaluation: Evaluation
    right: bool

    def outputs(self, case: KnownCase) -> Mapping[str, np.ndarray]:
        """What the graph means, as the bundle has its outputs."""
        values = self.evaluation.values(self.setting.fed(case.inputs))
        return self.setting.given(self.evaluation.outputs_of(values))


def meaning(setting: Setting, cases: Sequence[KnownCase]) -> Meaning | None:
    """What a graph means; None where float64 cannot tell.

    Args:
        setting: The graph.
        cases: Those to compare with the truth.
    """
    try:
        evaluation = Evaluation.load(setting.path)
        found = Meaning(setting, evaluation, right=True)
        right = all(
            is_right(case.golden, found.outputs(case))
            for case in cases
            if setting.form.takes(case.sizes)
        )
    except (GraphError, RuntimeError, ValueError, TypeError, KeyError, IndexError):
        return None
    return dataclasses.replace(found, right=right)


def right_meaning(settings: Sequence[Setting], cases: Sequence[KnownCase]) -> Meaning | None:
    """The first graph of a bundle that means what it should, if there is one.

    The bundle's own order has the standard dialect first, in which attention is one node.
    """
    for setting in settings:
        found = meaning(setting, cases) if not setting.form.layouts else None
        if found is not None and found.right:
            return found
    return None


def fault_of(own: Meaning | None, trial_elsewhere: Trial | None) -> Fault:
    """Whether the graph or the runtime is to blame.

    Args:
        own: What the graph in question means.
        trial_elsewhere: What another runtime made of it, where float64 cannot tell.
    """
    if own is not None:
        return "runtime" if own.right else "graph"
    if trial_elsewhere is None or trial_elsewhere.ran.outcome != "ran":
        return "unknown"
    return "graph" if trial_elsewhere.failed else "runtime"


@dataclasses.dataclass(frozen=True)
class Found:
    """The mistakes that account for what came out, the best first.

    Attributes:
        in_right: Whether they were made in a right graph. Without one, what would have to be
            changed in the wrong one is looked for.
    """

    matches: Sequence[Match]
    in_right: bool


def known_mistakes(own: Meaning | None, right: Meaning | None, trial: Trial, late: Late) -> Found:
    """Make known mistakes in a graph, and compare what it gives then with what came out."""
    made_in_right = right is not None
    base = right or own
    if base is None or not trial.failed:
        return Found([], made_in_right)
    chosen = [*trial.failed[:FAILED], *trial.passed[:PASSED]]
    evidence = []
    for case in chosen:
        actual = trial.ran.outputs.get(case.name)
        if actual is None or set(actual) != set(base.evaluation.outputs):
            continue
        fed = base.setting.fed(case.inputs)
        values = base.evaluation.values(fed)
        target = actual if made_in_right else case.golden.expected
        evidence.append(Evidence(fed, values, base.evaluation.outputs_of(values), target))
    found = matches(base.evaluation, evidence, late) if evidence else []
    if not found and right is not None and own is not None and not own.right:
        return known_mistakes(own, None, trial, late)  # the right graph may have another form
    return Found(found, made_in_right)


def deviation(
    fault: Fault,
    own: Meaning | None,
    twins: Sequence[Setting],
    trial: Trial,
    lines: Lines,
) -> Deviation | None:
    """The first node whose output leaves the float64 run: of a wrong graph in several cases.

    What is wrong with a causal mask cannot show where there is one query.
    """
    if own is None or not trial.failed:
        return None
    if fault == "graph":
        return _first_of_several(own, twins, trial, lines)
    case = trial.failed[0]
    fed = own.setting.fed(case.inputs)
    values = own.evaluation.values(fed)
    dtype = next(a.dtype for a in case.golden.expected.values() if is_floating(a.dtype))
    noise = own.evaluation.noisy_values(fed, dtype)
    with scratch() as folder:
        path = folder / own.setting.path.name
        with_all_outputs(own.setting.path, values, path)
        seen = dataclasses.replace(own.setting, path=path).run({case.name: case.inputs})
        actual = seen.outputs.get(case.name)
    if actual is None:
        return None
    actual = own.setting.fed(actual)  # it was put in order, for the bundle
    return first_rounded_away(own.evaluation, values, noise, actual, lines)


def _first_of_several(
    own: Meaning, twins: Sequence[Setting], trial: Trial, lines: Lines
) -> Deviation | None:
    twin = _twin(own, twins, trial.failed[:1])
    if twin is None:
        return None
    order = {node.name: number for number, node in enumerate(own.evaluation.nodes)}
    found = []
    chosen = {c.name: c for c in (*trial.failed[:LOCALISED], *trial.failed[-LOCALISED:])}
    for case in chosen.values():
        mine, theirs = (m.evaluation.values(m.setting.fed(case.inputs)) for m in (own, twin))
        one = first_difference(own.evaluation, mine, twin.evaluation, theirs, lines)
        if one is not None:
            found.append(one)
    return min(found, key=lambda one: (order[one.node], -one.error), default=None)


def _twin(own: Meaning, others: Sequence[Setting], cases: Sequence[KnownCase]) -> Meaning | None:
    """The right graph that shares most names of values with the one in question."""
    mine = set(own.evaluation.producer)
    best: Meaning | None = None
    for other in others:
        found = meaning(other, cases)
        if found is None or not found.right or found.setting.path == own.setting.path:
            continue
        if best is None or _shared(mine, found) > _shared(mine, best):
            best = found
    return best


def _shared(names: set[str], other: Meaning) -> int:
    return len(names & set(other.evaluation.producer))
