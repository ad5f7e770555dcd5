"""Interleaved measurement of candidates, each of which runs in a process of its own.

Candidates take turns for several rounds, so that a disturbance of the machine affects all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from attn_export.parts.benchmarks.measurements import Candidate, Measured
from attn_export.runtimes.child import Child, ChildFailedError, child_command
from attn_export.runtimes.protocol import Limits
from attn_export.system_info import WAIT_POLICY

SERVE = "attn_export.parts.benchmarks.candidate_worker:serve"
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
        # Threads that sleep while they wait would make PyTorch's candidates slower.
        environment = {n: value for n, value in os.environ.items() if n != WAIT_POLICY}
        self._child = Child(child_command(SERVE, limits, kind, limits.threads), environment)

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
