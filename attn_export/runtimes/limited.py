"""One function in a process with limits: parsers in C++ run for ever on some files, or crash.

They do not let go of the interpreter either, so that no signal is handled until they end.
`python -m attn_export.runtimes.limited MEMORY_MIB` is that process.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from attn_export import errors
from attn_export.errors import AttnExportError, GraphError, one_line
from attn_export.runtimes.child import Child, module_command
from attn_export.runtimes.ipc import EventWriter, jobs_from_stdin, limit_memory, private_stdout
from attn_export.runtimes.protocol import Limits

PR_SET_PDEATHSIG = 1
"""Constant of <linux/prctl.h>. The thread that started the process waits for it."""


def limited(
    function: str,
    about: str,
    limits: Limits | None = None,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Any:
    """Call a function of this package in a process of its own.

    Args:
        function: ``"MODULE:FUNCTION"``, within `attn_export`.
        about: The file that it looks at, for messages.
        limits: Its time and memory. Default: `Limits.default`.
        environment: Environment variables of its process beside those of this one.
        arguments: Its keyword arguments, as JSON holds them.

    Returns:
        The result of the function, as JSON holds it.

    Raises:
        AttnExportError: The error of the function; GraphError if the process ended before it did,
            or took longer than `limits.seconds`.
    """
    limits = limits or Limits.default()
    child = Child(
        module_command("attn_export.runtimes.limited", limits.memory_mib or 0),
        {**os.environ, **environment} if environment else None,
    )
    try:
        child.send({"function": function, "about": about, "arguments": arguments})
        answer = child.receive(limits.seconds)
        if answer is None:
            raise GraphError(
                f"{about} cannot be read: a process that tried it {child.how_it_died()}"
            )
    except TimeoutError as error:
        raise GraphError(
            f"{about} takes longer than {limits.seconds:g} s to read; it has nested ONNX "
            "functions, or is far larger than one layer"
        ) from error
    finally:
        child.close()
    if answer["event"] == "raised":
        raise getattr(errors, answer["kind"])(answer["message"])
    return answer["value"]


def _die_with_parent() -> None:
    """Request the end of this process with its parent.

    A parser in C++ does not let the thread run that would notice.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Serve one call, then end."""
    send = EventWriter(private_stdout())
    jobs = jobs_from_stdin()
    _die_with_parent()
    limit_memory(int(sys.argv[1]))
    job = jobs.get()
    if job is None:
        return
    module, _, name = job["function"].partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(**job["arguments"])
    except AttnExportError as error:
        kind = next(c for c in type(error).__mro__ if c.__module__ == errors.__name__)
        send("raised", kind=kind.__name__, message=str(error))
    except Exception as error:
        send("raised", kind=GraphError.__name__, message=f"{job['about']}: {one_line(error)}")
    else:
        send("returned", value=value)


if __name__ == "__main__":
    main()
