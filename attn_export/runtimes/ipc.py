"""The child's side of the protocol of `child.Child`: its input, output and memory limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from typing import Any, TextIO

from attn_export.runtimes.protocol import EngineDiedError

OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "Failed to allocate memory", "out of memory")
"""Parts of error messages that report a lack of memory."""


Jobs = queue.Queue[dict[str, Any] | None]
"""The jobs from the parent process, in order."""


class EventWriter:
    """A writer of events to the parent process, one JSON object per line."""

    def __init__(self, channel: TextIO) -> None:
        self._channel = channel

    def __call__(self, event: str, **values: Any) -> None:
        """Send one event with its values."""
        self._channel.write(json.dumps({"event": event, **values}) + "\n")
        self._channel.flush()


def connect(memory_mib: int) -> tuple[EventWriter, Jobs]:
    """Connect this process to its parent, and limit its memory.

    Engines print to stdout, which would disturb the protocol. Therefore stdout is redirected to
    stderr, and the writer keeps the pipe to the parent.

    Args:
        memory_mib: The limit in MiB; 0 for none.
    """
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jobs = _jobs_from_stdin()
    limit_memory(memory_mib)
    return EventWriter(channel), jobs


def _jobs_from_stdin() -> Jobs:
    """Return a queue of the jobs from stdin, which a thread reads.

    When the parent ends, the thread ends this process at once. It also ends the programs that this
    process started, if this process leads its process group, as a `Child` does.
    """
    jobs: Jobs = queue.Queue()

    def read_jobs() -> None:
        for line in sys.stdin:
            jobs.put(json.loads(line))
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=read_jobs, daemon=True).start()
    return jobs


def limit_memory(mib: int, pid: int | None = None) -> None:
    """Limit the memory that a process may allocate.

    Args:
        mib: The limit in MiB; 0 for none.
        pid: The process, on Linux. Default: this one.
    """
    if mib <= 0:
        return
    import resource

    # RLIMIT_DATA counts allocated memory, not mapped files. RLIMIT_AS would stop CUDA, which
    # reserves far more address space than it uses.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = mib << 20 if hard == resource.RLIM_INFINITY else min(mib << 20, hard)
    if pid is None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    else:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            resource.prlimit(pid, resource.RLIMIT_DATA, (limit, hard))


def outcome_of(error: Exception) -> str:
    """Return the outcome of an error: ``"crashed"``, ``"out of memory"`` or ``"refused"``."""
    if isinstance(error, EngineDiedError):
        return "crashed"
    if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
        return "out of memory"
    return "refused"
