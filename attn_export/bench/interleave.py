"""All candidates in turn, several rounds over, so that what disturbs one disturbs all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from attn_export.bench.contestant import Contestant
from attn_export.bench.measurements import Candidate, Measured
from attn_export.runtimes.protocol import Limits

SETTLE = 0.1
"""Seconds between turns: threads of ONNX Runtime go on spinning for up to 50 ms after a run."""


def measure(
    candidates: Sequence[Candidate],
    *,
    rounds: int,
    turn_seconds: float,
    limits: Limits,
    advance: Callable[[str], None] = lambda _: None,
) -> tuple[Measured, ...]:
    """Measure candidates against each other.

    Args:
        candidates: Those with `alone` are started for every turn, one at a time.
        rounds: The number of turns of each.
        turn_seconds: How long a turn is about; one run at least.
        limits: For each process.
        advance: Receives the candidate's name after its preparation and each of its turns.
    """
    with contextlib.ExitStack() as stack:
        # All processes start at once and import their SDKs; what follows is one at a time.
        contestants = [Contestant(candidate, limits) for candidate in candidates]
        for contestant in contestants:
            stack.callback(contestant.close)
        for contestant in contestants:
            if not contestant.candidate.alone:
                contestant.prepare()
                time.sleep(SETTLE)
            advance(f"{contestant.candidate.name}: ready")
        for number in range(1, rounds + 1):
            for contestant in contestants:
                contestant.turn(turn_seconds)
                time.sleep(SETTLE)
                advance(f"{contestant.candidate.name}: round {number}")
        return tuple(contestant.measured() for contestant in contestants)


def steps(candidates: Sequence[Candidate], rounds: int) -> int:
    """Return the number of times that `measure` calls `advance`."""
    return len(candidates) * (rounds + 1)
