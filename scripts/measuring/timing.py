"""Times of functions and commands, measured in interleaved rounds."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    runs: int = 1,
    unused: int = 0,
    clean: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Call functions in turn and return their times in seconds. A first round is not counted.

    If a function returns a float, this is the time to count.

    Args:
        calls: The functions by name.
        rounds: The number of rounds that are counted.
        runs: The number of runs of each function in a round.
        unused: The number of runs before these, which are not counted.
        clean: Called after each run, without being timed.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            for run in range(unused + runs):
                started = time.perf_counter()
                result = call()
                seconds = time.perf_counter() - started
                clean()
                if number and run >= unused:
                    times[name].append(result if isinstance(result, float) else seconds)
        print(f"round {number} of {rounds}", file=sys.stderr)
    return times


def command(
    words: Sequence[str], folder: Path, *, prints_time: bool = False
) -> Callable[[], object]:
    """Return a function that runs a command.

    Args:
        words: The command.
        folder: The folder to run it in.
        prints_time: Whether the command prints the time to count.
    """

    def run() -> float | None:
        output = subprocess.run(words, cwd=folder, check=True, capture_output=True).stdout
        return float(output) if prints_time else None

    return run
