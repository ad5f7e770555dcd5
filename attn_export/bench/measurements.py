"""Subjects and results of measurements: frozen values, and the figures derived from them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any, Literal

from attn_export.errors import RuntimeFailure
from attn_export.results import Outcome

Role = Literal["ours", "peer", "roof"]
"""``roof``: a bare GEMM or a bare read of memory, which says what the machine can do."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Minimal work of one run.

    Attributes:
        flops: Multiplications and additions of the matrix products; of causal attention only
            those below the diagonal.
        bytes: Bytes that must be read from memory once: keys, values and weights.
        tokens: The number of new tokens of a run, over the batch.
    """

    flops: float = 0.0
    bytes: float = 0.0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    Attributes:
        name: Unique within a contest.
        kind: The way to make it: a key of `worker.KINDS`.
        options: Options of its maker; plain JSON.
        alone: Whether it takes so much memory that its process lives for its own turns only.
        reason: Why it cannot even be tried; empty where it can.
    """

    name: str
    role: Role
    kind: str
    options: Mapping[str, Any]
    work: Cost
    alone: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Result of a candidate.

    Attributes:
        seconds: The time of every run, all rounds together.
        growth: By how many bytes its memory grew at most in its first run; None where the
            system does not report it.
        outcome: ``"ran"``, or how it failed.
        reason: Why it failed.
        facts: Facts that it reported.
    """

    candidate: Candidate
    seconds: tuple[float, ...] = ()
    growth: int | None = None
    outcome: Outcome = "not run"
    reason: str = ""
    facts: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The candidate's."""
        return self.candidate.name

    @property
    def role(self) -> Role:
        """The candidate's."""
        return self.candidate.role

    @property
    def ran(self) -> bool:
        """Return whether there are times."""
        return bool(self.seconds)

    @property
    def median(self) -> float:
        """Seconds; NaN where it did not run."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    @property
    def p95(self) -> float:
        """Seconds that 95 % of the runs did not exceed (nearest rank); NaN where it did not run."""
        if not self.seconds:
            return math.nan
        return sorted(self.seconds)[math.ceil(0.95 * len(self.seconds)) - 1]

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, over the batch."""
        return self.candidate.work.tokens / self.median

    @property
    def flops_per_second(self) -> float:
        """FLOP/s by the median."""
        return self.candidate.work.flops / self.median

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second by the median, of those that must be read."""
        return self.candidate.work.bytes / self.median


@dataclasses.dataclass(frozen=True)
class Contest:
    """Candidates that were measured in one interleaved run.

    Attributes:
        name: Unique within a report.
        sizes: The sizes of the work: batch, query_len and so on.
    """

    name: str
    sizes: Mapping[str, int]
    measured: tuple[Measured, ...]

    def of(self, role: Role) -> list[Measured]:
        """Return the candidates of a role that ran."""
        return [m for m in self.measured if m.role == role and m.ran]

    def named(self, name: str) -> Measured | None:
        """Return the candidate of this name, if it ran."""
        return next((m for m in self.measured if m.name == name and m.ran), None)

    def best_peer(self, *names: str) -> Measured | None:
        """Return the fastest peer by the median, of these names or of all."""
        peers = [m for m in self.of("peer") if not names or m.name in names]
        return min(peers, key=lambda m: m.median, default=None)

    def ratio(self, measured: Measured, *names: str) -> float:
        """Return its median over that of the best peer of these names; NaN if there is none."""
        best = self.best_peer(*names)
        return measured.median / best.median if best else math.nan

    @property
    def flops_roof(self) -> float:
        """FLOP/s of the best bare GEMM; NaN where none ran."""
        return max((m.flops_per_second for m in self.of("roof") if _computes(m)), default=math.nan)

    @property
    def bytes_roof(self) -> float:
        """Bytes per second of the best bare read; NaN where none ran."""
        return max((m.bytes_per_second for m in self.of("roof") if _reads(m)), default=math.nan)

    def fraction(self, measured: Measured) -> float:
        """Return the least time that the rooflines allow over the median; NaN without a roofline.

        It is more than 1 where the processor's cache holds the data of the roofline.
        """
        work = measured.candidate.work
        shares = (
            work.flops / self.flops_roof / measured.median,
            work.bytes / self.bytes_roof / measured.median,
        )
        return max((s for s in shares if s > 0), default=math.nan)


def _computes(measured: Measured) -> bool:
    return measured.candidate.work.flops > 0


def _reads(measured: Measured) -> bool:
    return measured.candidate.work.bytes > 0


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """Every contest of one job.

    Attributes:
        threads: For computing, in every candidate's process.
        rounds: The number of turns of each candidate.
        environment: Versions and machine.
    """

    name: str
    contests: tuple[Contest, ...]
    threads: int
    rounds: int
    environment: Mapping[str, object]

    @property
    def exit_code(self) -> int:
        """0, or 5 where a graph of ours did not run."""
        ours = [m for contest in self.contests for m in contest.measured if m.role == "ours"]
        return 0 if ours and all(m.ran for m in ours) else RuntimeFailure.exit_code
