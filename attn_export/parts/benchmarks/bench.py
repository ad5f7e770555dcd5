"""Benchmark of a bundle's own graphs against PyTorch and the bare exporter's graph."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.bundle.manifest import bundle_spec, read_bundle
from attn_export.cases.draw import add_sums
from attn_export.errors import RuntimeFailure, UsageError
from attn_export.parts.benchmarks.bundle_candidates import RUNTIME, BundleCandidates
from attn_export.parts.benchmarks.measurements import (
    BenchReport,
    Candidate,
    Measured,
    WorkloadResult,
)
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.child import Child, ChildFailedError, child_command
from attn_export.runtimes.decode_inputs import CAPACITY, IDS, LOGIT_COUNT, MOST_KEYS, QUERY_LEN
from attn_export.runtimes.protocol import Limits
from attn_export.runtimes.run_options import Progress
from attn_export.schema import Manifest
from attn_export.spec import AttentionSpec
from attn_export.system_info import FOR_TORCH, environment, processor
from attn_export.temp_folders import scratch

BATCHES, PREFILL_LENGTHS, DECODE_LENGTHS = (1,), (512,), (2048,)
"""The default batch sizes, numbers of new tokens without a past, and numbers of keys of a step."""

_OF_MODELS = (1, 8), (512,), (129, 513, 2049)
"""The same for whole models, which may have fewer positions."""

HUNG_AFTER = 300.0
"""The time limit of a candidate in seconds. torch.compile may take a minute or two."""

_Planned = Sequence[tuple[str, Mapping[str, int], Sequence[Candidate]]]
"""The name of each workload, the size of every axis, and the candidates."""

KEYS = ("past_len", "capacity", "key_len")
"""Axes of keys that a graph has if one new token can attend to many keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measuring:
    """The workloads of a benchmark, and how they are measured.

    Attributes:
        decode: Numbers S of keys for one new token. By default 2048 if the graphs have an axis of
            keys, unless `prefill` is given.
        turn_seconds: The approximate length of a turn, which has at least one run.
        seconds: The time after which no further workload is begun.
    """

    batch: Sequence[int] = ()
    prefill: Sequence[int] = ()
    decode: Sequence[int] = ()
    rounds: int = 5
    threads: int | None = None
    turn_seconds: float = 0.2
    seconds: float = math.inf

    def __post_init__(self) -> None:
        cores = Limits.default().threads
        if (self.threads or 1) > cores:  # they wait for each other: a run takes minutes
            raise UsageError(f"--threads {self.threads}: this process may use {cores} at once")

    def measure(self, name: str, planned: _Planned, progress: Progress) -> BenchReport:
        """Measure workloads one after the other."""
        limits = Limits.default()
        threads = min(self.threads or limits.threads, limits.threads)  # others would only wait
        limits = dataclasses.replace(limits, seconds=HUNG_AFTER, threads=threads)
        progress.expect(sum(progress_steps(some, self.rounds) for _, _, some in planned))
        workloads, end = [], time.monotonic() + self.seconds
        for title, sizes, candidates in planned:
            if time.monotonic() > end:
                break
            workloads.append(WorkloadResult(title, sizes, measure(
                candidates, rounds=self.rounds, turn_seconds=self.turn_seconds, limits=limits,
                advance=progress.advance,
            )))  # fmt: skip
        left_out = tuple(title for title, _, _ in planned[len(workloads) :])
        return BenchReport(name, tuple(workloads), threads, self.rounds, machine(), left_out)

    def workloads(
        self,
        manifest: Manifest,
        spec: AttentionSpec | None,
    ) -> list[tuple[str, dict[str, int]]]:
        """Return the name of each workload, and the sizes of all axes in it."""
        axes = {axis for signature in manifest.inputs.values() for axis in signature.shape}
        can_decode = any(axis in axes for axis in KEYS)
        if self.decode and not can_decode:
            raise UsageError("--decode: the graphs have no cache; leave it out")
        prefill, decode = self.prefill, self.decode
        most = min(manifest.bounds.get(a, (0, None))[1] or MOST_KEYS for a in (CAPACITY, QUERY_LEN))
        for length in (*prefill, *decode):
            if length > most:
                raise UsageError(f"{length} tokens are too many; the bundle takes {most}")
        of_model = IDS in manifest.inputs
        more = {LOGIT_COUNT: 1} if of_model else {}
        batches, *lengths = _OF_MODELS if of_model else (BATCHES, PREFILL_LENGTHS, DECODE_LENGTHS)
        if not prefill and not decode:
            prefill, decode = (tuple(dict.fromkeys(min(n, most) for n in some)) for some in lengths)
            decode = decode if can_decode else ()
        found = []
        for B in self.batch or batches:
            found += [(f"prefill, B {B}, L {L}", _sizes(spec, B, L, L) | more) for L in prefill]
            found += [(f"decode, B {B}, S {S}", _sizes(spec, B, 1, S) | more) for S in decode]
        return found


def bench(bundle: Path | str, *, progress: Progress | None = None, **how: Any) -> BenchReport:
    """Measure every graph of a bundle, its peers, and the rooflines of the machine.

    `how`: The fields of `Measuring`.
    """
    measuring, folder = Measuring(**how), Path(bundle)
    manifest = read_bundle(folder)
    reason = runtime(RUNTIME).unavailable()
    if reason:
        raise RuntimeFailure(f"bench needs ONNX Runtime: {reason}")
    spec = bundle_spec(folder, manifest)
    with scratch() as out:
        candidates = BundleCandidates(folder, out, manifest, spec)
        planned = [
            (name, sizes, candidates.candidates(sizes, decode=sizes["query_len"] == 1))
            for name, sizes in measuring.workloads(manifest, spec)
        ]
        return measuring.measure(manifest.name, planned, progress or Progress())


def machine() -> dict[str, Any]:
    """Return the environment with the processor and the version of OpenVINO, if it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    facts = {**environment(), "processor": processor()}
    with contextlib.suppress(PackageNotFoundError):
        facts["versions"]["openvino"] = version("openvino")
    return facts


def _sizes(spec: AttentionSpec | None, B: int, L: int, S: int) -> dict[str, int]:
    sizes = {
        "batch": B, "query_len": L, "past_len": S - L, "total_len": S, "key_len": S, "capacity": S,
    }  # fmt: skip
    if spec is None:
        return sizes
    return add_sums(sizes, {k: v for k, v in spec.relations.items() if k not in sizes})


# -- interleaved runs: candidates take turns, so that a disturbance affects all -----------------

_SERVE = "attn_export.parts.benchmarks.candidate_worker:serve"
"""The function that a candidate's process calls."""

_MOST_RUNS = 2000
"""Largest number of runs in a turn."""


class CandidateProcess:
    """A candidate and its process, which blocks on a pipe between turns."""

    def __init__(self, candidate: Candidate, limits: Limits) -> None:
        self.candidate = candidate
        self._limits = limits
        self._child: Child | None = None
        self._latency = 0.0
        self._result = Measured(candidate, reason=candidate.reason)
        if not candidate.reason and not candidate.alone:
            self._start()

    @property
    def alive(self) -> bool:
        """True if the candidate can take further turns."""
        return not self._result.reason

    @property
    def pid(self) -> int | None:
        """The identifier of its process, or None while it has none."""
        return self._child.pid if self._child else None

    def prepare(self) -> None:
        """Load the candidate, allocate and bind its memory, and run it twice."""
        if not self.alive:
            return
        if self._child is None:
            self._start()
        event = self._request({"do": "prepare", "options": dict(self.candidate.options)})
        if event is not None:
            self._latency = event["latency"]
            growth = event["growth"] if self._result.growth is None else self._result.growth
            self._update(outcome="ran", growth=growth, peak=event["peak"], facts=event["facts"])

    def turn(self, seconds: float) -> None:
        """Run for about this number of seconds, at least once."""
        if self.candidate.alone and self._child is None:
            self.prepare()
        if not self.alive:
            return
        runs = min(max(1, round(seconds / max(self._latency, 1e-6))), _MOST_RUNS)
        # Other candidates evicted this one's data from the processor's caches, so it runs once
        # without being timed, unless one run is longer than a turn.
        event = self._request({"do": "run", "runs": runs, "warm": self._latency < seconds})
        if event is not None:
            self._update(seconds=(*self._result.seconds, *event["seconds"]))
            self._latency = sorted(event["seconds"])[runs // 2]
        if self.candidate.alone:
            self.close()

    def measured(self) -> Measured:
        """Return the result, without times if the candidate failed in any turn."""
        return self._result if self.alive else dataclasses.replace(self._result, seconds=())

    def close(self) -> None:
        """End its process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _start(self) -> None:
        kind, limits = self.candidate.kind, self._limits
        # Candidates are measured as users run them; threads that sleep would make PyTorch slower.
        environment = {n: value for n, value in os.environ.items() if n not in FOR_TORCH}
        self._child = Child(child_command(_SERVE, limits, kind, limits.threads), environment)

    def _update(self, **fields: Any) -> None:
        self._result = dataclasses.replace(self._result, **fields)

    def _request(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """Send a job and return its answer; on failure return None and end the process."""
        assert self._child is not None
        self._child.send(job)
        try:
            return self._child.receive(self._limits.seconds)
        except ChildFailedError as error:
            self._update(outcome=error.outcome, reason=str(error))
        self.close()
        return None


# -- measurement of all candidates --------------------------------------------------------------


_SETTLE = 0.1
"""Pause between turns in seconds: threads of ONNX Runtime spin for up to 50 ms after a run."""


def measure(
    candidates: Sequence[Candidate],
    *,
    rounds: int,
    turn_seconds: float,
    limits: Limits,
    advance: Callable[[str], None] = lambda _: None,
) -> tuple[Measured, ...]:
    """Return the results of candidates that are measured in turns, in their order.

    `turn_seconds`: The approximate length of a turn in seconds. A turn has at least one run.
    """
    with contextlib.ExitStack() as stack:
        # All processes start and import their SDKs at the same time. Only one computes at a time.
        processes = [CandidateProcess(candidate, limits) for candidate in candidates]
        for process in processes:
            stack.callback(process.close)
        for process in processes:
            if not process.candidate.alone:
                process.prepare()
                time.sleep(_SETTLE)
            advance(f"{process.candidate.name}: ready")
        for number in range(1, rounds + 1):
            for process in processes:
                process.turn(turn_seconds)
                time.sleep(_SETTLE)
                advance(f"{process.candidate.name}: round {number}")
        return tuple(process.measured() for process in processes)


def progress_steps(candidates: Sequence[Candidate], rounds: int) -> int:
    """Return the number of times that `measure` calls `advance`."""
    return len(candidates) * (rounds + 1)
