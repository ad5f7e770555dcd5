"""Execution of commands in forked processes that are killed: by time, or at a step on disk.

`python runner.py` reads one JSON object a line and answers each with another. It has imported what
commands need, so that a run takes as long as its work. Orphans become its children: it waits for
all processes that a killed command has left, and says how many did not end.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir  # noqa: F401
import torch

import attn_export.commands.build
import attn_export.commands.explain_bundle
import attn_export.commands.lower
import attn_export.commands.lower_here
import attn_export.export
import attn_export.export.subject
import attn_export.truth.oracle
from attn_export import output_folder, temp_folders
from attn_export.commands.main import run

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 20
"""Seconds that orphans have to end."""

COUNTED_CALLS = ((os, "mkdir"), (os, "rename"), (os, "replace"), (shutil, "rmtree"))


REPLACING = ("exchange", "rename", "replace")


class KillSwitch:
    """Counter of disk operations from the first that replaces, which kills the process at one."""

    def __init__(self, job: dict[str, Any], log: Path) -> None:
        self._stop: int = job.get("step", -1)
        self._before: bool = job.get("before", False)
        self._swept: str = job.get("swept", "")
        self._log = log.open("w")
        self._count = 0
        self._sweeping = False
        for module, name in COUNTED_CALLS:
            setattr(module, name, self._counted(getattr(module, name)))
        swap = output_folder.exchange if job.get("exchange", True) else lambda *_: False
        output_folder.exchange = self._counted(swap, "exchange")
        temp_folders.sweep = self._uncounted(temp_folders.sweep)
        attn_export.commands.lower.limited = self._here

    def _here(self, _function: str, _about: str, **arguments: str) -> Any:
        """Lower in this process, whose steps are counted."""
        return attn_export.commands.lower_here.lower_here(**arguments)

    def _counted(self, call: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self._sweeping:  # the number of swept folders depends on earlier runs
                return call(*arguments, **options)
            step = name or call.__name__
            if step not in REPLACING and not self._count:
                return call(*arguments, **options)  # the number before it depends on timing
            number, self._count = self._count, self._count + 1
            self._log.write(f"{step}\n")
            self._log.flush()
            if number == self._stop and self._before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **options)
            if number == self._stop:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    def _uncounted(self, sweep: Callable[[Path], None]) -> Callable[[Path], None]:
        def swept(place: Path) -> None:
            self._sweeping = True
            sweep(place)
            self._sweeping = False
            if place.name == self._swept:
                os.kill(os.getpid(), signal.SIGKILL)

        return swept


def _forked(job: dict[str, Any], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(job["said"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        os.dup2(1, 2)
        os.chdir(job["cwd"])
        os.environ.pop("TMPDIR", None)
        tempfile.tempdir, temp_folders.MEMORY, temp_folders.MIN_FREE_BYTES = (
            job["temporary"],
            Path(job["memory"]),
            1,
        )
        KillSwitch(job, log)
        code = run(job["arguments"])
    finally:
        sys.stdout.flush()
        os._exit(code)


def _ended(pid: int, job: dict[str, Any]) -> int:
    """Wait for the end, or kill it after some seconds; return its exit code or -signal."""
    until = time.monotonic() + job.get("seconds", 600)
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            until += 600
        time.sleep(0.002)


def _orphans() -> int:
    """Wait until no process is left; return how many there are after all."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0
        if not found:
            time.sleep(0.005)
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def main() -> None:
    """Serve jobs until the end of the input."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        log = Path(job["said"] + ".steps")
        started = time.monotonic()
        code = _ended(_forked(job, log), job)
        answer = {
            "code": code,
            "seconds": time.monotonic() - started,
            "orphans": _orphans(),
            "steps": log.read_text().split() if log.exists() else [],
            "said": Path(job["said"]).read_text(errors="replace"),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
