"""Child process and its protocol: JSON, one object a line, over pipes.

`limited` runs one function in such a process, with limits: parsers in C++ run for ever on some
files, or crash. They do not let go of the interpreter either, so that no signal is handled until
they end.
`python -m attn_export.runtimes.child MEMORY_MIB` is that process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from attn_export import errors
from attn_export.errors import AttnExportError, GraphError, one_line
from attn_export.interruption import undo_if_ended
from attn_export.runtimes.protocol import Limits
from attn_export.temp_folders import held_locks

TAIL = 300
"""Number of characters kept of the output of a crashed process."""


class Child:
    """One process. Waiting for it does not spin: a thread blocks on its pipe.

    Args:
        command: The command line.
        environment: Its environment; this process's own where None.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # Ctrl-C is for the process that the user started; it ends this one.
            start_new_session=True,
            text=True,
            env=environment,
            pass_fds=held_locks(),
        )
        self._forget = undo_if_ended(self._kill)
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one object; if the process has ended, `receive` reports it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the next object that the child sends; None after its end.

        Raises:
            TimeoutError: If nothing comes for so long.
        """
        try:
            return self._said.get(timeout=seconds)
        except queue.Empty as error:
            raise TimeoutError(f"gave no sign of life for {seconds:g} s") from error

    def how_it_died(self) -> str:
        """Wait for its end; return exit code or signal, and its last line on stderr."""
        code = self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"ended with {how}" + (f": {said[-1][-TAIL:]}" if said else "")

    def close(self) -> None:
        """End the process and its children."""
        self._kill()
        self._process.wait()
        self._forget()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _kill(self) -> None:
        if self._process.poll() is not None:
            return
        if hasattr(os, "killpg"):
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()

    def _listen(self, stream: IO[str]) -> None:
        try:
            for line in stream:
                self._said.put(json.loads(line))
        except ValueError:
            pass  # It printed garbage, or the stream was closed: both end the conversation.
        self._said.put(None)


def module_command(module: str, *words: str | int) -> list[str]:
    """Return the command that runs a module of this package in another process."""
    # -P: what lies in the current folder, a numpy.py say, is not for that process.
    return [sys.executable, "-P", "-m", module, *map(str, words)]


# -- one function in a process with limits ------------------------------------------------------

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
        module_command("attn_export.runtimes.child", limits.memory_mib or 0),
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
    from attn_export.runtimes.ipc import (
        EventWriter,
        jobs_from_stdin,
        limit_memory,
        private_stdout,
    )

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
