"""The fewest nodes to keep in float32 so that a graph in a narrow format passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set

from attn_export.measures import Measures
from attn_export.parts.value_ranges.amplification import amplified
from attn_export.parts.value_ranges.lockstep import Lockstep
from attn_export.parts.value_ranges.range_analysis import Analysis
from attn_export.parts.value_ranges.range_rule import GraphOutputs, largest
from attn_export.parts.value_ranges.rounded_run import RoundedRun, Seen, full
from attn_export.parts.value_ranges.streamed_graph import StreamedGraph
from attn_export.runtimes.run_options import Progress
from attn_export.tensorfile import Array

_MOST_ROUNDS = 16
"""The most times that nodes are added."""

_WORST = 3
"""The number of values after which nodes are added because their rounding becomes larger."""


@dataclasses.dataclass(frozen=True)
class KeptNodes:
    """What a narrow graph keeps wide.

    Attributes:
        nodes: The indices of the nodes that compute in float32.
        clipped: The weights whose elements are limited to the largest number of the format.
        error: The error of the outputs.
        passes: Whether all sets of inputs pass.
    """

    nodes: Set[int]
    clipped: Set[str]
    error: Measures
    passes: bool


def search(
    graph: StreamedGraph, sets: Sequence[Mapping[str, Array]], analysis: Analysis,
    progress: Progress,
) -> KeptNodes:  # fmt: skip
    """Return the nodes to keep: none of them can be left out."""
    return _Search(graph, sets, analysis, progress).kept()


class _Search:
    def __init__(
        self, graph: StreamedGraph, sets: Sequence[Mapping[str, Array]], analysis: Analysis,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._graph, self._sets, self._analysis = graph, sets, analysis
        self._progress = progress
        self._lockstep = Lockstep(graph, analysis.format)
        self._readers = graph.readers()
        self._clipped: Set[str] = frozenset()
        self._known: dict[tuple[int, Set[int], Set[str]], tuple[Measures, bool]] = {}

    def kept(self) -> KeptNodes:
        findings = self._analysis.findings
        large = {
            f.facts.name for f in findings if f.facts.operator == "weight" and f.facts.overflow
        }
        nodes = self._around(f.facts.name for f in findings if f.facts.name not in large)
        self._clipped = frozenset(large)
        found = self._grown(nodes) if large or nodes else None
        if found is None:
            self._clipped = frozenset()
            found = self._grown(nodes | self._around(large))
        passes = found is not None
        kept = self._reduced(found) if found is not None else nodes
        self._clipped = frozenset(w for w in self._clipped if not kept >= set(self._readers[w]))
        judged = [self._judged(number, kept) for number in range(len(self._sets))]
        errors, passed = [error for error, _ in judged], all(fits for _, fits in judged)
        return KeptNodes(kept, self._clipped, largest(errors), passes and passed)

    def _around(self, names: Iterable[str]) -> frozenset[int]:
        """Return the nodes that make or read values."""
        found = set[int]()
        for name in names:
            found |= set(self._readers.get(name, ()))
            found |= {self._graph.producer[name]} if name in self._graph.producer else set()
        return frozenset(found)

    def _run(self, nodes: Set[int], base: RoundedRun | None = None) -> RoundedRun:
        return RoundedRun(full, kept=nodes, clipped=self._clipped, base=base)

    def _outputs(self, number: int, runs: Sequence[RoundedRun]) -> Sequence[GraphOutputs]:
        return self._lockstep.run(self._sets[number], runs)

    def _judged(self, number: int, nodes: Set[int]) -> tuple[Measures, bool]:
        """Return the error of a set of inputs with some nodes kept, and whether it passes."""
        key = number, nodes, self._clipped
        if key not in self._known:
            (outputs,) = self._outputs(number, [self._run(nodes)])
            self._known[key] = self._verdict(number, outputs)
        return self._known[key]

    def _verdict(self, number: int, outputs: GraphOutputs) -> tuple[Measures, bool]:
        expected = self._analysis.expected[number]
        error = expected.error(outputs)
        return error, expected.passes(outputs, error)

    def _grown(self, nodes: frozenset[int]) -> frozenset[int] | None:
        """Return nodes with further ones until all pass; None if none helps."""
        for _ in range(_MOST_ROUNDS):
            self._progress.phase(f"keeping {len(nodes)} nodes in float32")
            further = next(
                filter(None, (self._missing(n, nodes) for n in self._analysis.bad)), None
            )
            if further is None:
                return nodes
            if further <= nodes:
                return None
            nodes |= further
        return None

    def _missing(self, number: int, nodes: frozenset[int]) -> frozenset[int] | None:
        """Return the nodes around values that still lose; None if a set of inputs passes.

        Values that become infinite come first, then those that lose digits by limits, and then
        those whose rounding a node makes larger.
        """
        format_ = self._analysis.format
        overflowing, lossy = [], dict[str, float]()

        def observe(_: RoundedRun, seen: Seen) -> None:
            if seen.name not in self._analysis.values or self._is_wide(seen, nodes):
                return
            if format_.overflows(seen.made).any():
                overflowing.append(seen.name)
            elif self._analysis.values[seen.name].loss > format_.eps:
                lossy[seen.name] = self._analysis.values[seen.name].loss

        run = self._run(nodes)
        (outputs,) = self._lockstep.run(self._sets[number], [run], observe)
        self._known[number, nodes, self._clipped] = self._verdict(number, outputs)
        if self._known[number, nodes, self._clipped][1]:
            return None
        worst = sorted(lossy, key=lambda name: -lossy[name])[: len(lossy) // 2 + 1]
        for names in (overflowing, worst, self._coarse(number, run)):
            further = self._around(names) - nodes
            if further:
                return further
        return nodes

    def _coarse(self, number: int, run: RoundedRun) -> list[str]:
        """Return the values that are rounded before a node that makes their rounding larger."""
        found = list[str]()
        for each in amplified(self._lockstep, self._sets[number], run)[:_WORST]:
            waiting, seen = [each.value], set[str]()
            while waiting:
                name = waiting.pop()
                maker = self._graph.producer.get(name)
                is_exact = maker is not None and maker in run.kept
                if is_exact and name not in seen:
                    waiting += self._graph.reads[self._graph.producer[name]]
                elif name in self._analysis.values:
                    found.append(name)
                seen.add(name)
        return found

    def _is_wide(self, seen: Seen, nodes: Set[int]) -> bool:
        """Return whether no node reads a value in the narrow format."""
        made = seen.node < 0 or seen.node in nodes
        return made and nodes >= set(self._readers.get(seen.name, ()))

    # -- nodes that can be left out --------------------------------------------------------------

    def _reduced(self, nodes: frozenset[int]) -> frozenset[int]:
        """Return the nodes without those that can be left out."""
        while True:
            self._progress.phase(f"leaving out each of {len(nodes)} nodes")
            spare = self._spare(nodes)
            left = self._without(nodes, sorted(spare))
            if left == nodes:
                return nodes
            nodes = left

    def _spare(self, nodes: frozenset[int]) -> set[int]:
        """Return the nodes without which all others pass."""
        spare = set(nodes)
        for number in self._analysis.bad:
            base, order = self._run(nodes), sorted(spare)
            runs = [self._run(nodes - {n}, base) for n in order]
            _, *outputs = self._outputs(number, [base, *runs])
            for n, found in zip(order, outputs, strict=True):
                self._known[number, nodes - {n}, self._clipped] = self._verdict(number, found)
            spare = {n for n in order if self._judged(number, nodes - {n})[1]}
        return spare

    def _without(self, nodes: frozenset[int], spare: Sequence[int]) -> frozenset[int]:
        """Return the nodes without as many of the spare ones as can be left out together."""
        if not spare:
            return nodes
        left = nodes - set(spare)
        if all(self._judged(number, left)[1] for number in self._analysis.bad):
            return left
        if len(spare) == 1:
            return nodes
        half = len(spare) // 2
        return self._without(self._without(nodes, spare[:half]), spare[half:])
