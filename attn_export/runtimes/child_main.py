"""Program of all child processes: `python -P -m attn_export.runtimes.child_main FUNCTION MIB …`.

It calls FUNCTION, a "MODULE:FUNCTION", with a writer of events to the parent, the jobs from the
parent, and the further arguments. MIB limits its memory. Jobs and events are JSON objects, one per
line. If the function raises an error, the event `failed` reports it. `child.Child` is the parent's
side.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from attn_export import errors
from attn_export.errors import lacking, one_line
from attn_export.runtimes.protocol import EngineDiedError

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2), from <linux/prctl.h>: the signal to send when the parent thread ends."""

Jobs = queue.Queue[dict[str, Any]]
"""The jobs from the parent process, in order."""


Send = Callable[..., None]
"""A function that sends an event with its values to the parent process, as a line of JSON."""


def main() -> None:
    """Call the function that the command line names, and report the error that it raises."""
    function, memory_mib, *arguments = sys.argv[1:]
    send, jobs = connect(int(memory_mib))
    try:
        load_function(function)(send, jobs, *arguments)
    except Exception as error:
        names = (c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__)
        kind = next(names, "")
        reason = str(error) if kind else one_line(error)
        send("failed", outcome=outcome_of(error), reason=reason, kind=kind)


def load_function(name: str) -> Callable[..., Any]:
    """Return the function of a "MODULE:FUNCTION"."""
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def call(send: Send, jobs: Jobs) -> None:
    """Call one function with keyword arguments, and send its result as the event `returned`."""
    _end_with_parent()
    job = jobs.get()
    send("returned", value=load_function(job["function"])(**job["arguments"]))


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    The thread that reads stdin would notice, but a C++ parser that keeps the interpreter's lock
    does not let it run. Only a process whose starter waits for it may call this.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def connect(memory_mib: int) -> tuple[Send, Jobs]:
    """Connect this process to its parent, and limit its memory to `memory_mib`, if that is not 0.

    Engines print to stdout, which would disturb the protocol. Therefore stdout is redirected to
    stderr, and the writer keeps the pipe to the parent.
    """
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jobs = _jobs_from_stdin()
    limit_memory(memory_mib)

    def send(event: str, **values: Any) -> None:
        channel.write(json.dumps({"event": event, **values}) + "\n")
        channel.flush()

    return send, jobs


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

    `mib`: The limit in MiB; 0 for none.
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


def allow_mapped(size: int) -> None:
    """Raise the limit of this process, if there is one, for a file that is mapped.

    A private mapping that may be written counts as allocated, although nobody writes it.
    """
    if sys.platform == "win32":
        return
    import resource

    limit, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if limit != resource.RLIM_INFINITY:
        more = limit + size if hard == resource.RLIM_INFINITY else min(limit + size, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (more, hard))


def outcome_of(error: Exception) -> str:
    """Return the outcome of an error: ``"crashed"``, ``"out of memory"`` or ``"refused"``."""
    if isinstance(error, EngineDiedError):
        return "crashed"
    return "out of memory" if lacking(error) == "memory" else "refused"


if __name__ == "__main__":
    main()
