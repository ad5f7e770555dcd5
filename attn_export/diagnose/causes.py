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
    """Return a cause for wrong names, types or shapes, in the smallest case that shows them."""
    for case in trial.failed:
        outputs = trial.ran.outputs.get(case.name)
        if outputs is None:
            continue
        wanted = case.golden.expected
        if set(outputs) != set(wanted):
            found, expected = ", ".join(outputs), ", ".join(wanted)
            return [
                Cause(
                    WRONG_SIGNATURE,
                    f"the graph gives the outputs {found}; the bundle has {expected}",
                )
            ]
        for name, right in wanted.items():
            got = outputs[name]
            if got.dtype != right.dtype:
                return [
                    Cause(WRONG_SIGNATURE, f"{name} is {got.dtype}, and should be {right.dtype}")
                ]
            if got.shape != right.shape:
                shapes = f"{list(got.shape)}, and should be {list(right.shape)}"
                return [Cause(WRONG_SIGNATURE, f"the shape of {name} is {shapes}, in {case.name}")]
    return []


# -- sentences that name the possible causes, the most likely first -----------------------------


UNKNOWN = "unknown"
IN_GRAPH = (
    "the graph is wrong: in float64 it does not give the truth; no known mistake gives its "
    "numbers, and no first wrong value was found"
)

SURE = 0.01
"""A mistake that leaves less of the error unexplained is named before the first wrong node."""


@dataclasses.dataclass(frozen=True)
class Observations:
    """All that was seen of a fault.

    Attributes:
        fault: The part that is at fault.
        runtime: The name of the runtime.
        found: The mistakes that account for the outputs.
        first: The first wrong node.
        pattern: Common properties of the failing cases.
        stuck: By case, nodes that neither float64 nor the runtime can compute.
        witness: What the values of a wrong graph were compared with.
        lossy: Whether the graph gives the truth in float64 alone.
    """

    fault: Fault
    runtime: str
    found: KnownMistakes
    first: Deviation | None
    pattern: Pattern
    stuck: Mapping[str, NotComputedError]
    witness: str
    lossy: bool = False

    @property
    def shown(self) -> str:
        """The sizes and the places in the outputs that show it, as the end of a sentence."""
        sizes = [f"it fails {' and '.join(self.pattern.sizes)}"] if self.pattern.sizes else []
        return "".join(f"; {said}" for said in (*sizes, *self.pattern.places))


def causes(seen: Observations, done: Sequence[ExperimentResult], lines: Lines) -> list[Cause]:
    """Return the possible causes, the most likely first.

    Args:
        seen: The observations.
        done: The other experiments.
        lines: The line of the module that each node came from.
    """
    if seen.fault == "graph":
        return _in_graph(seen, lines) or [Cause(UNKNOWN, IN_GRAPH + seen.shown)]
    mending = [(d.kind, d.experiment.name) for d in done if d.within and d.experiment.mended]
    verdict = f"the graph is right, {seen.runtime} is not"
    if seen.fault == "unknown":
        verdict = f"the graph or {seen.runtime} is wrong, and float64 cannot tell which"
    said = _in_runtime(verdict, seen.found.matches, mending, seen.first, lines)
    unknown = f"{verdict}: no known mistake gives its numbers{seen.shown}"
    return said or [Cause(UNKNOWN, unknown)]


def _in_graph(seen: Observations, lines: Lines) -> list[Cause]:
    """Return the causes in a wrong graph: known mistakes, then the first difference."""
    stuck = list(_stuck(seen, lines))
    found, first = seen.found, seen.first
    causes = [_cause(match, lines, in_right=found.in_right) for match in found.matches]
    if first is None:
        return [*stuck, *causes]
    place = f"{first.operator} {first.node}{_at(first.line)}"
    says = f": {first.says}" if first.says else ""
    if seen.lossy:
        kind = "precision lost"
        loses = f"loses precision, by {first.error:.1e}" if isfinite(first.error) else "overflows"
        sentence = f"the graph is wrong, though right in float64: rounded, {place} {loses}"
    else:
        kind = "changed node"
        sentence = f"the graph differs from {seen.witness} first at {place}{says}{seen.shown}"
    changed = Cause(kind, sentence, first.node, first.line)
    # What was seen to be different stands before what would only give similar numbers.
    best = found.matches[0] if found.matches else None
    # A change elsewhere may cancel the fault.
    located = best is not None and (found.in_right or best.mistake.node == first.node)
    if best is None or not located or best.unexplained >= SURE or seen.lossy:
        return [*stuck, changed, *causes]
    if first.node not in causes[0].sentence:
        both = f"{causes[0].sentence}; it differs from {seen.witness} first at {place}"
        causes[0] = dataclasses.replace(causes[0], sentence=both)
    return [*stuck, *causes, changed]


def _stuck(seen: Observations, lines: Lines) -> Iterator[Cause]:
    """Yield a cause for nodes that cannot be computed."""
    for case, error in itertools.islice(seen.stuck.items(), 1):
        line = lines.get(error.node, "")
        sentence = f"the graph is wrong: in {case}, {error}{_at(line)}{seen.shown}"
        yield Cause("cannot be computed", sentence, error.node, line)


def _in_runtime(
    verdict: str,
    found: Sequence[Match],
    mending: Sequence[tuple[str, str]],
    first: Deviation | None,
    lines: Lines,
) -> list[Cause]:
    """Return the causes in a wrong runtime: known mistakes, remedies, the first deviation.

    Args:
        verdict: A statement of the right and the wrong part.
        found: Mistakes that reproduce its outputs.
        mending: For each experiment that passes, the cause that it implies, and its name.
        first: The first node that leaves the float64 run.
        lines: The line of the module that each node came from.
    """
    ways = ", or ".join(name for _, name in mending)
    mended = f"; it passes with {ways}" if ways else ""
    causes = [
        Cause(
            match.mistake.kind,
            f"{verdict}: {match.mistake.says}{_where(match, lines)} ({_share(match)}){mended}",
            match.mistake.node,
            lines.get(match.mistake.node, ""),
            match.unexplained,
        )
        for match in found
    ]
    of_options = [Cause(kind, f"{verdict}: it passes with {name}") for kind, name in mending]
    if first is not None:
        place = f"{first.operator} {first.node}{_at(first.line)}"
        says = f"{verdict}: it leaves the float64 run first at {place}"
        last = [Cause("operator", f"{says}, by {first.error:.1e}{mended}", first.node, first.line)]
    else:
        last = []
    return [*causes, *of_options, *last]


def _cause(match: Match, lines: Lines, *, in_right: bool) -> Cause:
    mistake, place = match.mistake, _where(match, lines)
    if in_right:
        sentence = f"the graph is wrong: {mistake.says}{place} ({_share(match)})"
    else:
        sentence = f"the graph would be right if: {mistake.says}{place} ({_share(match)})"
    line = lines.get(mistake.node, "")
    return Cause(mistake.kind, sentence, mistake.node, line, match.unexplained)


def _where(match: Match, lines: Lines) -> str:
    node = match.mistake.node
    named = node and node not in match.mistake.says
    return f", at {node}{_at(lines.get(node, ''))}" if named else _at(lines.get(node, ""))


def _at(line: str) -> str:
    return f" ({line})" if line else ""


def _share(match: Match) -> str:
    if match.exact:
        return "this gives the same numbers"
    explained = 1 - match.unexplained
    if explained > 0.99:
        return f"explains {explained:.2%} of the error; something else is left"
    return f"explains {explained:.0%} of the error"
