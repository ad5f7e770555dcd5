"""Sentences that name the possible causes, the most likely first."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

from attn_export.diagnose.evaluate import NotComputedError
from attn_export.diagnose.experiments import ExperimentResult
from attn_export.diagnose.explanation import Cause, Deviation, Fault, Lines
from attn_export.diagnose.fault_attribution import KnownMistakes
from attn_export.diagnose.graph_run import GraphRun
from attn_export.diagnose.match import Match
from attn_export.diagnose.pattern import Pattern

# -- wrong signatures ---------------------------------------------------------------------------


WRONG_SIGNATURE = "other outputs"


def wrong_signature(trial: GraphRun) -> list[Cause]:
    """Return a cause for wrong names, types or shapes of outputs, from the smallest such case."""
    for case in trial.failed:
        outputs = trial.ran.outputs.get(case.name)
        if outputs is None:
            continue
        expected = case.golden.expected
        if set(outputs) != set(expected):
            actual_names, expected_names = ", ".join(outputs), ", ".join(expected)
            return [
                Cause(
                    WRONG_SIGNATURE,
                    f"the graph gives the outputs {actual_names}; the bundle has {expected_names}",
                )
            ]
        for name, expected_array in expected.items():
            actual = outputs[name]
            if actual.dtype != expected_array.dtype:
                return [
                    Cause(
                        WRONG_SIGNATURE,
                        f"{name} is {actual.dtype}, and should be {expected_array.dtype}",
                    )
                ]
            if actual.shape != expected_array.shape:
                shapes = f"{list(actual.shape)}, and should be {list(expected_array.shape)}"
                return [Cause(WRONG_SIGNATURE, f"the shape of {name} is {shapes}, in {case.name}")]
    return []


# -- wrong numbers ------------------------------------------------------------------------------


UNKNOWN = "unknown"
IN_GRAPH = (
    "the graph is wrong: in float64 it does not give the truth; no known mistake gives its "
    "numbers, and no first wrong value was found"
)

SURE = 0.01
"""A mistake comes before the first wrong node if it leaves a smaller share of the error
unexplained."""


@dataclasses.dataclass(frozen=True)
class Observations:
    """Observations of a fault.

    Attributes:
        fault: The part that is at fault.
        runtime: The name of the runtime.
        known: The known mistakes that explain the outputs.
        first: The first wrong node; None if none was found.
        pattern: Common properties of the failing cases.
        stuck: The error of each case that neither float64 nor the runtime can compute.
        witness: The name of the reference for the values of a wrong graph.
        lossy: Whether the graph gives the truth in float64, but not in its own type.
    """

    fault: Fault
    runtime: str
    known: KnownMistakes
    first: Deviation | None
    pattern: Pattern
    stuck: Mapping[str, NotComputedError]
    witness: str
    lossy: bool = False

    @property
    def shown(self) -> str:
        """The sizes that fail and the location of the error, as the end of a sentence."""
        sizes = [f"it fails {' and '.join(self.pattern.sizes)}"] if self.pattern.sizes else []
        return "".join(f"; {clause}" for clause in (*sizes, *self.pattern.places))


def causes(
    observations: Observations, results: Sequence[ExperimentResult], lines: Lines
) -> list[Cause]:
    """Return the possible causes, the most likely first.

    Args:
        observations: The observations.
        results: The other experiments.
        lines: The line of the module that each node came from.
    """
    if observations.fault == "graph":
        return _graph_causes(observations, lines) or [Cause(UNKNOWN, IN_GRAPH + observations.shown)]
    mending = [
        (result.kind, result.experiment.name)
        for result in results
        if result.within and result.experiment.mended
    ]
    verdict = f"the graph is right, {observations.runtime} is not"
    if observations.fault == "unknown":
        verdict = f"the graph or {observations.runtime} is wrong, and float64 cannot tell which"
    found = _runtime_causes(verdict, observations.known.matches, mending, observations.first, lines)
    unknown = f"{verdict}: no known mistake gives its numbers{observations.shown}"
    return found or [Cause(UNKNOWN, unknown)]


def _graph_causes(observations: Observations, lines: Lines) -> list[Cause]:
    """Return the causes in a wrong graph: known mistakes, then the first difference."""
    stuck = list(_uncomputed_causes(observations, lines))
    known, first = observations.known, observations.first
    causes = [_cause(match, lines, in_right=known.in_right) for match in known.matches]
    if first is None:
        return [*stuck, *causes]
    location = f"{first.operator} {first.node}{_line_suffix(first.line)}"
    says = f": {first.says}" if first.says else ""
    if observations.lossy:
        kind = "precision lost"
        effect = f"loses precision, by {first.error:.1e}" if isfinite(first.error) else "overflows"
        sentence = f"the graph is wrong, though right in float64: rounded, {location} {effect}"
    else:
        kind = "changed node"
        sentence = f"the graph differs from {observations.witness} first at {location}{says}"
        sentence += observations.shown
    changed = Cause(kind, sentence, first.node, first.line)
    # An observed difference comes before a mistake that only gives similar numbers.
    best = known.matches[0] if known.matches else None
    # A mistake at another node may only cancel the fault.
    located = best is not None and (known.in_right or best.mistake.node == first.node)
    if best is None or not located or best.unexplained >= SURE or observations.lossy:
        return [*stuck, changed, *causes]
    if first.node not in causes[0].sentence:
        both = f"{causes[0].sentence}; it differs from {observations.witness} first at {location}"
        causes[0] = dataclasses.replace(causes[0], sentence=both)
    return [*stuck, *causes, changed]


def _uncomputed_causes(observations: Observations, lines: Lines) -> Iterator[Cause]:
    """Yield a cause for the first case with a node that cannot be computed."""
    for case, error in itertools.islice(observations.stuck.items(), 1):
        line = lines.get(error.node, "")
        sentence = f"the graph is wrong: in {case}, {error}{_line_suffix(line)}{observations.shown}"
        yield Cause("cannot be computed", sentence, error.node, line)


def _runtime_causes(
    verdict: str,
    matches: Sequence[Match],
    mending: Sequence[tuple[str, str]],
    first: Deviation | None,
    lines: Lines,
) -> list[Cause]:
    """Return the causes in a wrong runtime: known mistakes, remedies, the first deviation.

    Args:
        verdict: The clause that says which part is wrong.
        matches: Mistakes that reproduce its outputs.
        mending: For each experiment that passes, the cause that it implies, and its name.
        first: The first node that leaves the float64 run.
        lines: The line of the module that each node came from.
    """
    remedies = ", or ".join(name for _, name in mending)
    passes_with = f"; it passes with {remedies}" if remedies else ""
    causes = [
        Cause(
            match.mistake.kind,
            f"{verdict}: {match.mistake.says}{_location(match, lines)} "
            f"({_explained_share(match)}){passes_with}",
            match.mistake.node,
            lines.get(match.mistake.node, ""),
            match.unexplained,
        )
        for match in matches
    ]
    by_remedy = [Cause(kind, f"{verdict}: it passes with {name}") for kind, name in mending]
    if first is not None:
        location = f"{first.operator} {first.node}{_line_suffix(first.line)}"
        says = f"{verdict}: it leaves the float64 run first at {location}"
        last = [
            Cause("operator", f"{says}, by {first.error:.1e}{passes_with}", first.node, first.line)
        ]
    else:
        last = []
    return [*causes, *by_remedy, *last]


def _cause(match: Match, lines: Lines, *, in_right: bool) -> Cause:
    mistake, location = match.mistake, _location(match, lines)
    if in_right:
        sentence = f"the graph is wrong: {mistake.says}{location} ({_explained_share(match)})"
    else:
        sentence = (
            f"the graph would be right if: {mistake.says}{location} ({_explained_share(match)})"
        )
    line = lines.get(mistake.node, "")
    return Cause(mistake.kind, sentence, mistake.node, line, match.unexplained)


def _location(match: Match, lines: Lines) -> str:
    node = match.mistake.node
    named = node and node not in match.mistake.says
    return (
        f", at {node}{_line_suffix(lines.get(node, ''))}"
        if named
        else _line_suffix(lines.get(node, ""))
    )


def _line_suffix(line: str) -> str:
    return f" ({line})" if line else ""


def _explained_share(match: Match) -> str:
    if match.exact:
        return "this gives the same numbers"
    explained = 1 - match.unexplained
    if explained > 0.99:
        return f"explains {explained:.2%} of the error; something else is left"
    return f"explains {explained:.0%} of the error"
