"""Helpers for tests that start processes and signal them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path


def default_signals() -> None:
    """Reset signals, for `preexec_fn`: tests in the background or under nohup ignore some."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_until_handled(pid: int, number: signal.Signals) -> None:
    """Wait until a started process has a handler of a signal."""
    bit = 1 << (number - 1)
    until = time.monotonic() + 20
    while not _caught(pid) & bit:
        assert time.monotonic() < until
        time.sleep(0.005)


def _caught(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return int(mask, 16)


def worker_after(code: str) -> Callable[[str, int, int], list[str]]:
    """Return a replacement of `runtimes.process.worker_command` that first runs some code.

    Args:
        code: The Python code. `os` and `sys` are imported.
    """

    def command(name: str, memory: int, threads: int) -> list[str]:
        start = f"sys.argv = ['worker', {name!r}, '{memory}', '{threads}']; worker.main()"
        program = f"import os, sys; from attn_export.runtimes import worker\n{code}\n{start}"
        return [sys.executable, "-P", "-c", program]

    return command


def gone(pid: int) -> bool:
    """Return whether a process has ended, including zombies."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"
