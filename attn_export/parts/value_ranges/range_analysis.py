"""Which values leave a narrow format, and what this does to the outputs.

A graph fits if rounding all values to the format makes no larger error than rounding them to its
digits alone, with any exponent. If it does not fit, values are rounded one at a time, so that a
value is named for what it does to the outputs and not for its size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attn_export.float64.evaluate import is_float
from attn_export.measures import Measures
from attn_export.parts.value_ranges.float_formats import FloatFormat, RangeFacts, facts_of
from attn_export.parts.value_ranges.lockstep import Lockstep, RoundedRun, Seen, amplified
from attn_export.parts.value_ranges.range_rule import (
    FACTOR,
    MOST_OF_ONE,
    ExpectedOutputs,
    GraphOutputs,
    is_within,
    largest,
)
from attn_export.parts.value_ranges.streamed_graph import StreamedGraph
from attn_export.quality import Budget
from attn_export.runtimes.run_options import Progress
from attn_export.temp_folders import on_disk
from attn_export.tensorfile import Array

_MOST_ALONE = 20
"""The largest number of values that are rounded alone."""

_MOST_RUNS = 2.0
"""The work of these runs, as a multiple of that of one run of the whole graph."""

_FEW = 2
"""The number of values that are rounded alone whatever the work: one of each kind."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What rounding one value alone does to the outputs.

    Attributes:
        facts: Its facts.
        kind: ``"overflow"``, ``"underflow"`` or ``"rounding"``.
        effect: The error of the outputs if nothing else is rounded; infinite if they are not finite
            where they should be.
        matters: Whether the outputs change by more than rounding all values changes them.
        made: Whether the values that its node reads are within the limits.
        nan_from: The name of the first node that gives NaN; "" if none does.
    """

    facts: RangeFacts
    kind: str
    effect: Measures
    matters: bool
    made: bool
    nan_from: str = ""

    @property
    def absorbed(self) -> bool:
        """Whether something becomes infinite and the outputs are finite."""
        return self.kind == "overflow" and math.isfinite(self.effect.whole)


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What a narrow format does to a graph.

    Attributes:
        lockstep: The runs that it is made of.
        values: Facts on every floating value, in the order of the graph.
        tried: The values that were rounded alone, in the order of the graph.
        expected: What is expected of the outputs for each set of inputs.
        errors: The error of the outputs with all values rounded, for each set.
        bad: The indices of the sets that do not pass.
    """

    lockstep: Lockstep
    values: Mapping[str, RangeFacts]
    tried: Sequence[Finding]
    expected: Sequence[ExpectedOutputs]
    errors: Sequence[Measures]
    bad: Sequence[int]

    @property
    def format(self) -> FloatFormat:
        """The format."""
        return self.lockstep.format

    @property
    def findings(self) -> list[Finding]:
        """The values that change the outputs."""
        return [finding for finding in self.tried if finding.matters]

    @property
    def fits(self) -> bool:
        """Whether all sets of inputs pass."""
        return not self.bad

    @property
    def error(self) -> Measures:
        """The largest error of the outputs with all values rounded."""
        return largest(self.errors)

    @property
    def best(self) -> Measures:
        """The largest error with all values rounded to the digits of the format alone."""
        return largest([expected.best for expected in self.expected])


def analyse(
    graph: StreamedGraph, sets: Sequence[Mapping[str, Array]], format_: FloatFormat,
    progress: Progress, budgets: Sequence[Budget] = (),
) -> Analysis:  # fmt: skip
    """Return what a narrow format does to a graph.

    `sets`: Sets of inputs, by name.
    """
    return _Analyser(graph, sets, format_, progress, budgets).analysis()


class _Analyser:
    def __init__(
        self, graph: StreamedGraph, sets: Sequence[Mapping[str, Array]], format_: FloatFormat,
        progress: Progress, budgets: Sequence[Budget],
    ) -> None:  # fmt: skip
        self._graph, self._sets, self._format = graph, sets, format_
        self._lockstep, self._progress = Lockstep(graph, format_), progress
        self._facts: dict[str, RangeFacts] = {}
        self._lossy: list[list[str]] = []
        self._budgets, self._expected = budgets, list[ExpectedOutputs]()

    def analysis(self) -> Analysis:
        self._progress.expect(len(self._sets))
        self._add_weights()
        errors, bad = [], []
        of_weights = [name for name, facts in self._facts.items() if facts.loss > self._format.eps]
        tried: dict[str, Finding] = {}
        for number, inputs in enumerate(self._sets):
            self._lossy.append(list(of_weights))
            outputs = self._run_together(number, inputs)
            errors.append(self._expected[number].error(outputs))
            if not self._expected[number].passes(outputs, errors[-1]):
                bad.append(number)
                self._try_alone(number, tried)
            self._progress.advance("rounding all values")
        findings = sorted(tried.values(), key=lambda finding: finding.facts.index)
        return Analysis(self._lockstep, self._facts, findings, self._expected, errors, bad)

    def _try_alone(self, number: int, tried: dict[str, Finding]) -> None:
        """Add what rounding single values does in a set of inputs; those that matter are known."""
        chosen = [
            f for f in self._candidates(number) if f.name not in tried or not tried[f.name].matters
        ]
        new = [f for f in chosen if f.name not in tried][: _MOST_ALONE - len(tried)]
        for finding in self._alone(number, [f for f in chosen if f.name in tried or f in new]):
            before = tried.get(finding.facts.name)
            if before is None or finding.effect.whole > before.effect.whole:
                tried[finding.facts.name] = finding

    # -- all values together ---------------------------------------------------------------------

    def _add_weights(self) -> None:
        for name in sorted(self._graph.weights() & set(self._graph.uses)):
            is_new = name not in self._graph.transposed
            if is_new and self._graph.dtypes.get(name) in self._lockstep.narrow_dtypes:
                stored = self._graph.stored(name) if self._graph.is_large(name) else None
                array = self._graph.weight(name) if stored is None else stored
                self._facts[name] = facts_of((name, "", "weight", -1), array, self._format)

    def _run_together(self, number: int, inputs: Mapping[str, Array]) -> GraphOutputs:
        wide, free = self._lockstep.wide(), RoundedRun("free")
        narrow = RoundedRun(base=free)

        def observe(run: RoundedRun, seen: Seen) -> None:
            is_narrow = self._graph.dtypes.get(seen.name) in self._lockstep.narrow_dtypes
            if run is wide and is_narrow:
                facts = self._facts_of(seen)
                if facts.loss > self._format.eps:
                    self._lossy[number].append(seen.name)
                known = self._facts.get(seen.name)
                self._facts[seen.name] = known.joined(facts) if known else facts

        reference, free_outputs, outputs = self._lockstep.run(inputs, (wide, free, narrow), observe)
        reference, free_outputs = (
            {name: on_disk(x) for name, x in found.items()} for found in (reference, free_outputs)
        )
        self._expected.append(ExpectedOutputs(reference, free_outputs, self._format, self._budgets))
        return outputs

    def _facts_of(self, seen: Seen) -> RangeFacts:
        if seen.node < 0:
            return facts_of((seen.name, "", "input", -1), seen.made, self._format)
        node = self._graph.nodes[seen.node]
        about = (seen.name, node.name or node.output[0], node.op_type, seen.node)
        read = self._facts.get(node.input[0]) if self._graph.passes_on(seen.node) else None
        if read is None:
            return facts_of(about, seen.made, self._format)
        name, maker, operator, index = about
        return dataclasses.replace(read, name=name, node=maker, operator=operator, index=index)

    # -- values alone ----------------------------------------------------------------------------

    def _candidates(self, number: int) -> list[RangeFacts]:
        """Return the values that lose most, the ones that make infinities first."""
        lossy = [self._facts[name] for name in self._lossy[number] if name in self._facts]
        lossy.sort(key=lambda facts: (not facts.overflow, self._is_passed_on(facts), -facts.loss))
        if self._expected[number].is_rough:
            free = RoundedRun("free")
            found = amplified(self._lockstep, self._sets[number], free)
            rough = [self._facts[each.value] for each in found if each.value in self._facts]
            rough += [facts for facts in self._facts.values() if facts.coarse]
            lossy = [*lossy[:1], *rough[:1], *lossy[1:], *rough[1:]]
        chosen = dict[str, RangeFacts]()
        left = _MOST_RUNS
        for facts in lossy:
            first = min(self._graph.readers.get(facts.name, ()), default=len(self._graph.nodes))
            left -= self._lockstep.share(first)
            if left < 0 and len(chosen) >= _FEW:
                break
            chosen[facts.name] = facts
        return list(chosen.values())

    def _is_passed_on(self, facts: RangeFacts) -> bool:
        """Return whether a node reads a value that leaves the limits itself."""
        if facts.index < 0:
            return False
        read = (self._facts.get(name) for name in self._graph.reads[facts.index])
        return any(known is not None and known.overflow > 0 for known in read)

    def _alone(self, number: int, chosen: Sequence[RangeFacts]) -> Iterator[Finding]:
        """Yield what rounding each of the chosen values does."""
        wide, format_ = self._lockstep.wide(), self._format
        runs = [
            RoundedRun(
                "limits" if facts.loss > format_.eps else "full", wide.kept,
                frozenset({facts.name}), base=wide,
            )
            for facts in chosen
        ]  # fmt: skip
        nan_from: dict[RoundedRun, str] = {}

        def observe(run: RoundedRun, seen: Seen) -> None:
            is_other = run is not wide and seen.node >= 0 and run not in nan_from
            if is_other and is_float(seen.made) and np.isnan(seen.made).any():
                nan_from[run] = self._graph.name_of(seen.node)

        _, *outputs = self._lockstep.run(self._sets[number], (wide, *runs), observe)
        expected = self._expected[number]
        best = Measures(0.0, 0.0) if expected.is_rough else expected.best
        for facts, run, found in zip(chosen, runs, outputs, strict=True):
            effect = expected.error(found)
            least = max(format_.eps, best.whole)
            kind = "overflow" if facts.overflow else "underflow"
            if facts.loss <= format_.eps:
                kind, least = "rounding", MOST_OF_ONE * format_.eps
            within = is_within(effect, Measures(least, max(least, FACTOR * best.row)))
            made = not self._is_passed_on(facts)
            yield Finding(facts, kind, effect, not within, made, nan_from.get(run, ""))
