"""The workloads of `scripts/bench_peers` and the goals of each."""

from __future__ import annotations

import dataclasses

from attn_export.parts.benchmarks.measurements import Measured, WorkloadResult
from attn_export.parts.benchmarks.peers import BARE, PEERS, STATIC
from measuring.dims import Dims

HEADS, HEAD_DIM, EMBED_DIM = 16, 64, 1024
ROOF, MEMORY = "sgemm roof", "memory growth"
PREFILL_PEERS = tuple(row.name for row in PEERS if not row.decodes)
MIB = 1 << 20
OURS = "ours"


@dataclasses.dataclass(frozen=True)
class Goal:
    """Goal of a benchmark.

    Attributes:
        against: The name of a peer, ``"best peer"``, `ROOF` or `MEMORY`.
        limit: With a peer, the largest ratio of medians; with `ROOF`, the smallest fraction of the
            roofline; with `MEMORY`, the largest growth in MiB.
    """

    against: str
    limit: float

    def figure(self, result: WorkloadResult) -> float:
        """Return the measured figure; NaN if a candidate did not run."""
        ours = result.named(OURS)
        if ours is None:
            return float("nan")
        if self.against == ROOF:
            return result.fraction(ours)
        if self.against == MEMORY:
            return float("nan") if ours.growth is None else ours.growth / MIB
        return result.ratio(ours, *self._peers)

    def peer(self, result: WorkloadResult) -> Measured | None:
        """Return the peer that the goal compares with, if it ran."""
        return result.best_peer(*self._peers)

    @property
    def _peers(self) -> tuple[str, ...]:
        return PREFILL_PEERS if self.against == "best peer" else (self.against,)

    def met(self, result: WorkloadResult) -> bool:
        """Return whether the goal was reached; False if it was not measured."""
        figure = self.figure(result)
        return figure >= self.limit if self.against == ROOF else figure <= self.limit

    @property
    def text(self) -> str:
        """The limit with its sign and unit."""
        if self.against == MEMORY:
            return f"≤ {self.limit:g} MiB"
        return f"{'≥' if self.against == ROOF else '≤'} {self.limit:.2f}"


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes at which candidates are measured, and the goals for our result."""

    name: str
    dims: Dims
    goals: tuple[Goal, ...]

    @property
    def of_layer(self) -> bool:
        """True if the workload is of a whole layer, with projections."""
        return bool(self.dims.embed_dim)


def workloads() -> list[Workload]:
    """Return all workloads, each first for attention without projections, then for the layer."""
    all_workloads = []
    for core in (*_decode(), *_prefill(), *_short()):
        layer = dataclasses.replace(core.dims, embed_dim=EMBED_DIM)
        all_workloads += [core, Workload(f"{core.name}, layer", layer, core.goals)]
    return all_workloads


def _decode() -> list[Workload]:
    rows = (  # Hkv, S, against the static cache, against the bare export
        ("MHA", 16, 4096, 0.80, 0.40),
        ("GQA", 4, 4096, 0.80, 0.25),
        ("GQA", 4, 8192, 0.80, 0.25),
        ("MQA", 1, 8192, 0.35, 0.08),
    )
    return [
        Workload(
            f"decode {variant}, B 8, S {S}",
            _dims(batch=8, query_len=1, key_len=S, num_kv_heads=Hkv, causal=True),
            (Goal(STATIC, static), Goal(BARE, bare)),
        )
        for variant, Hkv, S, static, bare in rows
    ]


def _prefill() -> list[Workload]:
    rows = (  # causal, L, against the best peer, memory
        (False, 2048, 0.98, None),
        (False, 8192, 0.85, 300),
        (True, 2048, 1.03, None),
        (True, 8192, 1.03, 320),
    )
    prefills = []
    for causal, L, ratio, memory in rows:
        goals = (Goal("best peer", ratio), *((Goal(MEMORY, memory),) if memory else ()))
        variant = "causal" if causal else "full"
        prefills.append(
            Workload(f"prefill {variant}, L {L}", _dims(query_len=L, causal=causal), goals)
        )
    return prefills


def _short() -> list[Workload]:
    return [
        Workload(f"short prefill, L {L}", _dims(query_len=L), (Goal(ROOF, 0.90),))
        for L in (128, 256, 512)
    ]


def _dims(
    *,
    query_len: int,
    key_len: int = 0,
    batch: int = 1,
    num_kv_heads: int = HEADS,
    causal: bool = False,
) -> Dims:
    return Dims(
        batch=batch, query_len=query_len, key_len=key_len or query_len, num_heads=HEADS,
        num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, causal=causal,
    )  # fmt: skip
