"""Sentences of an explanation: possible causes, the most likely first; the cost of quantising."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path

from attn_export.bundle.golden import read_golden
from attn_export.bundle.manifest import GOLDEN
from attn_export.bundle.quality_vectors import distance, is_plain, read_quality
from attn_export.explain.explanation import Blame, Cause, Deviation, Experiment, Lines, line_suffix
from attn_export.explain.faults.fault import VERDICT
from attn_export.explain.graph_run import GoldenCase, GraphRun
from attn_export.explain.match import Match
from attn_export.explain.pattern import Pattern
from attn_export.float64.evaluate import NotComputedError
from attn_export.quality import Quality
from attn_export.results import Arrays

# -- wrong signatures ---------------------------------------------------------------------------


WRONG_SIGNATURE = "other outputs"


def wrong_signature(trial: GraphRun) -> list[Cause]:
    """Return a cause for wrong names, types or shapes of outputs, from the smallest such case."""
    for case in trial.failed:
        outputs = trial.ran.outputs.get(case.name)
        difference = "" if outputs is None else _signature_difference(case, outputs)
        if difference:
            return [Cause(WRONG_SIGNATURE, difference)]
    return []


def _signature_difference(case: GoldenCase, outputs: Arrays) -> str:
    """Describe the first difference in names, types or shapes of outputs; "" if there is none."""
    expected = case.golden.expected
    if set(outputs) != set(expected):
        actual_names, expected_names = ", ".join(outputs), ", ".join(expected)
        return f"the graph gives the outputs {actual_names}; the bundle has {expected_names}"
    for name, right in expected.items():
        actual = outputs[name]
        if actual.dtype != right.dtype:
            return f"{name} is {actual.dtype}, and should be {right.dtype}"
        if actual.shape != right.shape:
            shapes = f"{list(actual.shape)}, and should be {list(right.shape)}"
            return f"the shape of {name} is {shapes}, in {case.name}"
    return ""


# -- wrong numbers ------------------------------------------------------------------------------


UNKNOWN = "unknown"
_IN_GRAPH = (
    "the graph is wrong: in float64 it does not give the reference outputs; no known fault "
    "reproduces its outputs, and no first wrong value was found"
)

_CORRECTION = "; its outputs become right if"

_SURE = 0.01
"""A fault that leaves a smaller share of the error unexplained precedes the first wrong node."""


@dataclasses.dataclass(frozen=True)
class Observations:
    """Observations of a fault.

    Attributes:
        matches: The known faults that explain the outputs.
        from_right_graph: Whether they were made in a right graph, or in the wrong one.
        first: The first wrong node; None if none was found.
        not_computed: The error of each case that neither float64 nor the runtime can compute.
        reference: The name of the reference for the values of a wrong graph.
        lossy: Whether the graph gives the reference in float64, but not in its own type.
    """

    fault: Blame
    runtime: str
    matches: Sequence[Match]
    from_right_graph: bool
    first: Deviation | None
    pattern: Pattern
    not_computed: Mapping[str, NotComputedError]
    reference: str
    lossy: bool = False

    @property
    def shown(self) -> str:
        """The sizes that fail and the location of the error, as the end of a sentence."""
        sizes = [f"it fails {' and '.join(self.pattern.sizes)}"] if self.pattern.sizes else []
        return "".join(f"; {clause}" for clause in (*sizes, *self.pattern.places))


def causes(
    observations: Observations, results: Mapping[Experiment, str], lines: Lines
) -> list[Cause]:
    """Return the possible causes, the most likely first."""
    if observations.fault == "graph":
        return _graph_causes(observations, lines) or [
            Cause(UNKNOWN, _IN_GRAPH + observations.shown)
        ]
    passing = [
        (kind, experiment.name)
        for experiment, kind in results.items()
        if kind and experiment.passed
    ]
    verdict = f"the graph is right, {observations.runtime} is wrong"
    if observations.fault == "unknown":
        verdict = f"the graph or {observations.runtime} is wrong, and float64 cannot tell which"
    unknown = f"{verdict}: no known fault reproduces its outputs{observations.shown}"
    return _runtime_causes(verdict, observations, passing, lines) or [Cause(UNKNOWN, unknown)]


def _graph_causes(observations: Observations, lines: Lines) -> list[Cause]:
    """Return the causes in a wrong graph: known faults, then the first difference."""
    not_computed = list(_uncomputed_causes(observations, lines))
    first, from_right_graph = observations.first, observations.from_right_graph
    clause = "the graph is wrong" + ("" if from_right_graph else _CORRECTION)
    # An observed relation comes before a fault that would have to be made in some rows alone.
    observed = first is not None and bool(first.relation)
    matches = [match for match in observations.matches if not (observed and match.only)]
    matches.sort(
        key=lambda match: first is None or match.fault.node not in {first.node, *first.among}
    )
    if first is not None and first.in_weights:
        # Wrong weights are seen: a fault at another node only has the same effect.
        matches = [
            m for m in matches if m.fault.node in first.relation or m.fault.node == first.node
        ]
    causes = [_cause(match, lines, clause) for match in matches]
    if first is None:
        return [*not_computed, *causes]
    location = first.location
    says = "; ".join(filter(None, (first.relation, first.says)))
    says = f": {says}" if says else ""
    if observations.lossy:
        kind = "precision lost"
        effect = f"loses precision, by {first.error:.1e}" if isfinite(first.error) else "overflows"
        sentence = f"the graph is wrong, though right in float64: rounded, {location} {effect}"
    else:
        kind = "changed node"
        differs = f"it differs from {observations.reference} first at {location}{says}"
        sentence = f"the graph is wrong: {differs}"
        sentence += observations.shown
    changed = Cause(kind, sentence, first.node, first.line)
    # An observed difference comes before a fault that only gives similar numbers.
    best = matches[0] if matches else None
    # A fault at another node may only cancel the fault.
    located = best is not None and (
        from_right_graph or best.fault.node in {first.node, *first.among}
    )
    if best is None or not located or _is_weaker(best, first) or observations.lossy:
        return [*not_computed, changed, *causes]
    if first.node not in causes[0].sentence and best.fault.node not in first.among:
        both = f"{causes[0].sentence}; it differs from {observations.reference} first at {location}"
        causes[0] = dataclasses.replace(causes[0], sentence=both)
    return [*not_computed, *causes, changed]


def _is_weaker(match: Match, first: Deviation) -> bool:
    """Return whether a fault explains less than the first wrong value does."""
    return not first.among and match.unexplained >= (_SURE if not first.relation else _SURE / 10)


def _uncomputed_causes(observations: Observations, lines: Lines) -> Iterator[Cause]:
    """Yield a cause for the first case with a node that cannot be computed."""
    for case, error in itertools.islice(observations.not_computed.items(), 1):
        line = lines.get(error.node, "")
        sentence = f"the graph is wrong: in {case}, {error}{line_suffix(line)}{observations.shown}"
        yield Cause("cannot be computed", sentence, error.node, line)


def _runtime_causes(
    verdict: str, observations: Observations, passing: Sequence[tuple[str, str]], lines: Lines
) -> list[Cause]:
    """Return the causes in a wrong runtime: known faults, remedies, the first deviation.

    `passing` has the cause that each passing experiment implies, and its name.
    """
    remedies = ", or ".join(name for _, name in passing)
    passes_with = f"; it passes with {remedies}" if remedies else ""
    causes = [_cause(match, lines, verdict, passes_with) for match in observations.matches]
    causes += [Cause(kind, f"{verdict}: it passes with {name}") for kind, name in passing]
    first = observations.first
    if first is not None:
        differs = f"it first differs from the float64 run at {first.location}, by {first.error:.1e}"
        inexact = f"{first.location} is inexact there: {first.says}"
        says = f"{verdict}: {inexact if first.says else differs}{passes_with}"
        cause = Cause("operator", says, first.node, first.line)
        # An inexact operator was seen to give the wrong outputs.
        causes.insert(0 if first.says else len(causes), cause)
    return causes


def _cause(match: Match, lines: Lines, clause: str, ending: str = "") -> Cause:
    """Return a known fault as a cause, in a sentence that begins with `clause`."""
    node, effect = match.fault.node, match.fault.effect
    line = lines.get(node, "")
    location = (f", at {node}" if node and node not in effect else "") + line_suffix(line)
    only = f", but only {match.only}" if match.only else ""
    if clause.endswith(_CORRECTION):
        effect = effect.replace("what it should be", "what it is")
    clause = match.fault.place.given.get(VERDICT, clause)
    says = f"{effect}{only}{location} ({_explained_share(match)})"
    sentence = f"{clause}: {says}{ending}"
    return Cause(match.fault.kind, sentence, node, line, match.unexplained)


def _explained_share(match: Match) -> str:
    if match.exact:
        return "this gives the same numbers"
    explained = 1 - match.unexplained
    if explained > 0.99:
        return f"explains {explained:.2%} of the error; the rest has another cause"
    return f"explains {explained:.0%} of the error"


# -- distance from the float model ---------------------------------------------------------------


def quality_sentences(folder: Path, runs: Mapping[str, GraphRun]) -> tuple[str, ...]:
    """Return sentences on the distance from the float model; none if the bundle has no figures."""
    goldens = read_golden(folder / GOLDEN)
    quality, _ = read_quality(folder / GOLDEN, goldens, ())
    if quality is None or not quality.outputs:
        return ()
    return tuple(_quality_sentences(quality, runs))


def _quality_sentences(quality: Quality, runs: Mapping[str, GraphRun]) -> Iterator[str]:
    first = quality.outputs[0]
    kernels = [f"{_kernel_sqnr(run, first.part)} in {graph}" for graph, run in runs.items()]
    alone = ", ".join(kernels)
    yield f"{first.part}: {first.sqnr:.1f} dB after quantising; of the kernel alone {alone}"


def _kernel_sqnr(run: GraphRun, output: str) -> str:
    """Return the SQNR of a runtime's output against the quantised model's reference, as text."""
    pairs = (
        (case.golden.expected[output], run.ran.outputs[case.name][output])
        for case in (*run.passed, *run.failed)
        if is_plain(case.golden.case) and output in run.ran.outputs.get(case.name, {})
    )
    sqnr = distance(output, pairs).sqnr
    return f"{sqnr:.1f} dB" if isfinite(sqnr) else "no error"
