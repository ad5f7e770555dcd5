"""The fewest nodes to keep in float32 so that a graph in a narrow format passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set

from attn_export.measures import Measures
from attn_export.parts.value_ranges.lockstep import RoundedRun, Seen, amplified
from attn_export.parts.value_ranges.range_analysis import Analysis
from attn_export.parts.value_ranges.range_rule import GraphOutputs, largest
from attn_export.parts.value_ranges.streamed_graph import StreamedGraph
from attn_export.runtimes.run_options import Progress
from attn_export.tensorfile import Array

_MOST_RUNS = 18.0
"""The work of the search, in runs of the whole graph: what is left after nodes were added is for
trying to leave them out."""

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
        is_least: Whether each node was tried to be left out, before the search had to end.
    """

    nodes: Set[int]
    clipped: Set[str]
    error: Measures
    passes: bool
    is_least: bool


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
        self._lockstep = analysis.lockstep
        self._readers = graph.readers
        self._clipped: Set[str] = frozenset()
        self._left = _MOST_RUNS
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
        self._clipped = frozenset(w for w in self._clipped if not kept >= self._readers[w])
        judged = [self._judged(number, kept) for number in range(len(self._sets))]
        errors, passed = [error for error, _ in judged], all(fits for _, fits in judged)
        return KeptNodes(kept, self._clipped, largest(errors), passes and passed, self._left >= 0)

    def _around(self, names: Iterable[str]) -> frozenset[int]:
        """Return the nodes that make or read values."""
        found = set[int]()
        for name in names:
            found |= self._readers.get(name, set())
            found |= {self._graph.maker[name]} if name in self._graph.maker else set()
        return frozenset(found)

    def _run(self, nodes: Set[int], base: RoundedRun | None = None) -> RoundedRun:
        return RoundedRun(kept=nodes, clipped=self._clipped, base=base)

    def _judged(self, number: int, nodes: Set[int]) -> tuple[Measures, bool]:
        """Return the error of a set of inputs with some nodes kept, and whether it passes."""
        key = number, nodes, self._clipped
        if key not in self._known:
            (outputs,) = self._lockstep.run(self._sets[number], [self._run(nodes)])
            self._known[key] = self._verdict(number, outputs)
        return self._known[key]

    def _verdict(self, number: int, outputs: GraphOutputs) -> tuple[Measures, bool]:
        expected = self._analysis.expected[number]
        error = expected.error(outputs)
        return error, expected.passes(outputs, error)

    def _grown(self, nodes: frozenset[int]) -> frozenset[int] | None:
        """Return nodes with further ones until all pass; None if none helps."""
        while self._left > 0:
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
        self._left -= 1 / len(self._analysis.bad)
        (outputs,) = self._lockstep.run(self._sets[number], [run], observe)
        self._known[number, nodes, self._clipped] = self._verdict(number, outputs)
        if self._known[number, nodes, self._clipped][1]:
            return None
        worst = sorted(lossy, key=lambda name: -lossy[name])[: len(lossy) // 2 + 1]
        for names in (overflowing, worst):
            further = self._around(names) - nodes
            if further:
                return further
        return (self._around(self._coarse(number, run)) - nodes) or nodes

    def _coarse(self, number: int, run: RoundedRun) -> list[str]:
        """Return the values that are rounded before a node that makes their rounding larger."""
        self._left -= 2 / len(self._analysis.bad)
        found = list[str]()
        for each in amplified(self._lockstep, self._sets[number], run)[:_WORST]:
            waiting, seen = [each.value], set[str]()
            while waiting:
                name = waiting.pop()
                maker = self._graph.maker.get(name)
                is_exact = maker is not None and maker in run.kept
                if is_exact and name not in seen:
                    waiting += self._graph.reads[self._graph.maker[name]]
                elif name in self._analysis.values:
                    found.append(name)
                seen.add(name)
        return found

    def _is_wide(self, seen: Seen, nodes: Set[int]) -> bool:
        """Return whether no node reads a value in the narrow format."""
        made = seen.node < 0 or seen.node in nodes
        return made and nodes >= self._readers.get(seen.name, set())

    # -- nodes that can be left out --------------------------------------------------------------

    def _reduced(self, nodes: frozenset[int]) -> frozenset[int]:
        """Return the nodes without those that can be left out.

        What cannot be left out cannot be when fewer are kept, but for the neighbours of nodes that
        were left out. Many nodes are tried in groups that read each other before they are alone.
        """
        self._progress.phase(f"leaving out each of {len(nodes)} nodes")
        if sum(map(self._lockstep.share, nodes)) > self._left / 2:
            nodes = self._without(nodes, self._spare(nodes, self._groups(nodes)))
        tried = nodes
        while tried:
            left = self._without(nodes, self._spare(nodes, [frozenset({n}) for n in sorted(tried)]))
            names = set[str]()
            for n in nodes - left:
                names |= {*self._graph.reads[n], *self._graph.nodes[n].output}
            tried, nodes = left & self._around(names), left
        return nodes

    def _groups(self, nodes: frozenset[int]) -> list[frozenset[int]]:
        """Return the nodes in groups that are joined by what they read, in the order of ends."""
        groups: list[frozenset[int]] = []
        for n in sorted(nodes):
            made = {self._graph.maker.get(name) for name in self._graph.reads[n]}
            joined = [group for group in groups if not group.isdisjoint(made)]
            groups = [group for group in groups if group not in joined]
            groups.append(frozenset({n}).union(*joined))
        return groups

    def _spare(
        self, nodes: frozenset[int], groups: Sequence[frozenset[int]]
    ) -> list[frozenset[int]]:
        """Return the groups without which all others pass, of those that work is left for."""
        spare = []
        for group in reversed(groups):  # the last ones take the least work
            self._left -= self._lockstep.share(min(group))
            if self._left < 0:
                break
            spare.append(group)
        for number in self._analysis.bad:
            base = self._run(nodes)
            runs = [self._run(nodes - group, base) for group in spare]
            _, *outputs = self._lockstep.run(self._sets[number], [base, *runs])
            for group, found in zip(spare, outputs, strict=True):
                self._known[number, nodes - group, self._clipped] = self._verdict(number, found)
            spare = [group for group in spare if self._judged(number, nodes - group)[1]]
        return spare

    def _without(self, nodes: frozenset[int], spare: Sequence[frozenset[int]]) -> frozenset[int]:
        """Return the nodes without as many of the spare groups as can be left out together."""
        if not spare or (self._left < 0 and len(spare) > 1):
            return nodes
        self._left -= len(spare) > 1
        left = nodes.difference(*spare)
        if all(self._judged(number, left)[1] for number in self._analysis.bad):
            return left
        if len(spare) == 1:
            return nodes
        half = len(spare) // 2
        return self._without(self._without(nodes, spare[:half]), spare[half:])
