"""Wall time of commands, measured in interleaved rounds."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def interleaved(
    commands: Mapping[str, Sequence[str]], rounds: int, folder: Path, prints_time: str = ""
) -> dict[str, list[float]]:
    """Run commands in turn and return their times in seconds. A first round is not counted.

    Args:
        commands: The commands by name.
        rounds: The number of measurements of each.
        folder: The folder to run them in.
        prints_time: The name of a command whose output is the time to count.

    Raises:
        CalledProcessError: If a command fails.
    """
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            started = time.perf_counter()
            output = subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout
            seconds = time.perf_counter() - started
            if number:
                times[name].append(float(output) if name == prints_time else seconds)
        print(f"round {number} of {rounds}", file=sys.stderr)
    return times
