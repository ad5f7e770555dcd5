"""The result of looking at the ranges of a graph, and the limits that a user sets for it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from attn_export.errors import UsageError, printable
from attn_export.measures import Measures
from attn_export.parts.value_ranges.float_formats import RangeFacts
from attn_export.parts.value_ranges.range_analysis import Analysis
from attn_export.quality import parse_bound

_LIMITS = {"findings": "<=", "error": "<=", "kept": "<=", "margin": ">="}
"""The measures of limits with their relations: values that change outputs, the error as a multiple
of that of rounding alone, nodes kept in float32, and the bits of each value below the largest
number."""

_NUMBER = re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclasses.dataclass(frozen=True)
class Fix:
    """A graph in the narrow format that was written, or the attempt.

    Attributes:
        path: The file; "" if no nodes mend the graph.
        nodes: The names of the nodes that compute in float32.
        clipped: The names of the weights that are limited to the largest number.
        count: The number of nodes of the graph.
        time: The share of the time of a float64 run that these nodes take.
        weight_bytes: What their weights take more than in the narrow format.
        error: The error of the outputs of the written graph.
        passed: The number of sets of inputs that pass in the written graph.
        judged: The number of sets.
        beside: What ONNX Runtime on the CPU does with the written graph, as text.
        is_least: Whether none of the nodes can be left out, as far as each was tried.
    """

    path: str
    nodes: Sequence[str]
    clipped: Sequence[str]
    count: int
    time: float
    weight_bytes: int
    error: Measures
    passed: int
    judged: int
    beside: str
    is_least: bool = True


@dataclasses.dataclass(frozen=True)
class RangeResult:
    """What a narrow format does to a graph, and the fix.

    Attributes:
        graph: The file of the graph.
        notes: Notes for the reader.
    """

    graph: str
    analysis: Analysis
    notes: Sequence[str]
    fix: Fix | None = None

    def worst(self, count: int) -> list[RangeFacts]:
        """Return the values that matter most: findings in the order of the graph, then losses."""
        analysis = self.analysis
        first = [finding.facts for finding in analysis.findings]
        names = {facts.name for facts in first}
        values, eps = analysis.values.values(), analysis.format.eps
        lossy = [facts for facts in values if facts.loss > eps and facts.name not in names]
        lossy.sort(key=lambda facts: (-facts.loss, -facts.largest))
        return [*first, *lossy][:count]

    @property
    def holds(self) -> bool:
        """Whether the outputs pass, those of the written graph if there is one."""
        return self.fix.passed == self.fix.judged if self.fix else self.analysis.fits

    @property
    def measured(self) -> dict[str, float]:
        """What limits may be set for."""
        analysis, fixed = self.analysis, bool(self.fix and self.fix.path)
        margins = (facts.margin(analysis.format) for facts in analysis.values.values())
        return {
            "findings": 0 if fixed else len(analysis.findings), "error": self.ratio or 0.0,
            "kept": len(self.fix.nodes) if self.fix else 0, "margin": min(margins, default=0.0),
        }  # fmt: skip

    @property
    def ratio(self) -> float | None:
        """The error as a multiple of that of rounding alone, after the fix if there is one."""
        error, best = self.analysis.error.whole, self.analysis.best.whole
        if self.fix and self.fix.path:
            error = self.fix.error.whole
        return error / best if best else None


@dataclasses.dataclass(frozen=True)
class RangeLimit:
    """A limit for CI, such as ``findings<=0``."""

    measure: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> RangeLimit:
        """Parse a limit."""
        bound = parse_bound(text, _LIMITS, _NUMBER)
        if bound:
            return cls(bound[0], float(bound[1]))
        forms = ", ".join(f"{name}{sign}NUMBER" for name, sign in _LIMITS.items())
        raise UsageError(f"--limit is {forms}; got {printable(text, 40)!r}")

    def exceeded(self, measured: Mapping[str, float]) -> str:
        """Return what exceeds the limit, as text; "" if nothing does."""
        sign, value = _LIMITS[self.measure], measured[self.measure]
        kept = value <= self.limit if sign == "<=" else value >= self.limit
        return "" if kept else f"{self.measure}{sign}{self.limit:g}: it is {value:.3g}"
