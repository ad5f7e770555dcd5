"""Candidates and results of benchmarks: frozen values, and the figures derived from them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any, Literal

from attn_export.errors import RuntimeFailure, counted
from attn_export.results import Outcome

_Role = Literal["ours", "peer", "roof"]
"""Role of a candidate. ``roof`` is a GEMM or a read of memory, whose speed limits the others."""

_STEADY = 20
"""The least number of runs of which a 95th percentile says something."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Minimal work of one run.

    Attributes:
        flops: The number of multiplications and additions in matrix products. Causal attention
            counts only pairs of a query and a key that it may attend to.
    """

    flops: float = 0.0
    bytes: float = 0.0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation of the work that a workload measures.

    Attributes:
        kind: A key of `KINDS` in `candidate_worker`, or the "MODULE:FUNCTION" that makes it.
        alone: Whether its process ends after each of its turns, because it needs much memory.
    """

    name: str
    role: _Role
    kind: str
    options: Mapping[str, Any]
    work: Work
    alone: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Result of a candidate.

    Attributes:
        growth: The largest growth of its memory in the first run, in bytes; None if not known.
        peak: The most memory of its process, from its start to its first runs, in bytes.
    """

    candidate: Candidate
    seconds: tuple[float, ...] = ()
    growth: int | None = None
    peak: int | None = None
    outcome: Outcome = "not run"
    reason: str = ""
    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the candidate."""
        return self.candidate.name

    @property
    def role(self) -> _Role:
        """The role of the candidate."""
        return self.candidate.role

    @property
    def ran(self) -> bool:
        """True if at least one run was timed."""
        return bool(self.seconds)

    @property
    def median(self) -> float:
        """The median time of a run in seconds; NaN if there is none."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    @property
    def p95(self) -> float:
        """The 95th percentile of the times in seconds, by nearest rank; NaN if there are none."""
        if not self.seconds:
            return math.nan
        return sorted(self.seconds)[math.ceil(0.95 * len(self.seconds)) - 1]

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, over the batch."""
        return self.candidate.work.tokens / self.median

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of `Work.flops` at the median time."""
        return self.candidate.work.flops / self.median

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second of `Work.bytes` at the median time."""
        return self.candidate.work.bytes / self.median


@dataclasses.dataclass(frozen=True)
class WorkloadResult:
    """Candidates that were measured in one interleaved run."""

    name: str
    sizes: Mapping[str, int]
    measured: tuple[Measured, ...]

    def with_role(self, role: _Role) -> list[Measured]:
        """Return the results of candidates that have this role and ran."""
        return [m for m in self.measured if m.role == role and m.ran]

    def named(self, name: str) -> Measured | None:
        """Return the result of the candidate with this name, or None if it did not run."""
        return next((m for m in self.measured if m.name == name and m.ran), None)

    def best_peer(self, *names: str) -> Measured | None:
        """Return the peer with the smallest median, among these names or, by default, all."""
        peers = [m for m in self.with_role("peer") if not names or m.name in names]
        return min(peers, key=lambda m: m.median, default=None)

    def ratio(self, measured: Measured, *names: str) -> float:
        """Return the median divided by that of `best_peer`; NaN if no peer ran."""
        best = self.best_peer(*names)
        return measured.median / best.median if best else math.nan

    @property
    def flops_roof(self) -> float:
        """FLOP/s of the fastest roofline that multiplies matrices; NaN if none ran."""
        rates = [m.flops_per_second for m in self.with_role("roof")]
        return max(filter(None, rates), default=math.nan)

    @property
    def bytes_roof(self) -> float:
        """Bytes per second of the fastest roofline that reads memory; NaN if none ran."""
        rates = [m.bytes_per_second for m in self.with_role("roof")]
        return max(filter(None, rates), default=math.nan)

    def fraction(self, measured: Measured) -> float:
        """Return the least time that the rooflines allow, divided by the median time.

        The result is NaN without a roofline. It may exceed 1 if the candidate reads its data from
        the processor's cache, because the roofline reads from memory.
        """
        work = measured.candidate.work
        shares = (
            work.flops / self.flops_roof / measured.median,
            work.bytes / self.bytes_roof / measured.median,
        )
        return max((s for s in shares if s > 0), default=math.nan)


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """All workloads of one benchmark.

    Attributes:
        left_out: The names of those for which no time was left.
    """

    name: str
    workloads: tuple[WorkloadResult, ...]
    threads: int
    rounds: int
    environment: Mapping[str, object]
    left_out: tuple[str, ...] = ()

    @property
    def busy(self) -> str:
        """A warning that other work was on the machine, by the spread of the times, or ""."""
        ran = [m for workload in self.workloads for m in workload.measured if m.ran]
        unsteady = sum(len(m.seconds) >= _STEADY and m.p95 > 2 * m.median for m in ran)
        if not unsteady:
            return ""
        return (
            f"the machine was busy: the p95 of {unsteady} of {counted(len(ran), 'measurement')} is "
            "over twice the median; end other programs and measure again"
        )

    @property
    def exit_code(self) -> int:
        """0 if all candidates with the role ``ours`` ran, else 5."""
        ours = [m for workload in self.workloads for m in workload.measured if m.role == "ours"]
        return 0 if ours and all(m.ran for m in ours) else RuntimeFailure.exit_code
