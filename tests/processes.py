"""Helpers for tests that start processes and signal them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_export.runtimes.child import child_command


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


def worker_after(code: str) -> Callable[..., list[str]]:
    """Return a replacement of `runtimes.process.child_command` that first runs some code."""

    def command(*arguments: Any) -> list[str]:
        interpreter, safe_path, _, module, *words = child_command(*arguments)
        program = f"import os, sys; from {module} import main\n{code}\nmain()"
        return [interpreter, safe_path, "-c", program, *words]

    return command


def gone(pid: int) -> bool:
    """Return whether a process has ended, including zombies."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"
