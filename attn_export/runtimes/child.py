"""Child processes that exchange JSON objects, one per line, over pipes.

`limited` calls one function in a child process with limits on time and memory, because C++ parsers
crash or never return on some files. They also keep the interpreter's lock, so that Python handles
no signal until they return. All child processes run the program `child_main`.
"""

from __future__ import annotations

import contextlib
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
from attn_export.errors import GraphError
from attn_export.interruption import AT_END
from attn_export.results import Outcome
from attn_export.runtimes.protocol import Limits

CHILD_MAIN = "attn_export.runtimes.child_main"
"""The module that child processes run."""

_TAIL = 300
"""Number of characters of the last line of stderr that a message about a crash quotes."""


class ChildFailedError(Exception):
    """A child process that hangs, has ended, or reports an error. The message is the reason."""

    def __init__(self, outcome: Outcome, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.outcome, self.kind = outcome, kind


class Child:
    """A child process, with a thread that reads its messages."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # Ctrl-C must reach only the process that the user started; that one ends this child.
            start_new_session=True,
            text=True,
            env=environment,
        )
        AT_END.append(self._kill)
        threading.Thread(
            target=self._read_messages, args=(self._process.stdout,), daemon=True
        ).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one object. If the process has ended, only `receive` raises an error."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next object that the child sends."""
        try:
            message = self._messages.get(timeout=seconds)
        except queue.Empty as error:
            raise ChildFailedError("hung", f"timed out after {seconds:g} s") from error
        if message is None:
            raise ChildFailedError("crashed", self.describe_exit())
        if message["event"] == "failed":
            raise ChildFailedError(message["outcome"], message["reason"], message["kind"])
        return message

    def describe_exit(self) -> str:
        """Wait until the process ends; return its exit status and its last line on stderr."""
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        status = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"ended with {status}" + (f": {lines[-1][-_TAIL:]}" if lines else "")

    def close(self) -> None:
        """End the process and its children."""
        self._kill()
        self._process.wait()
        with contextlib.suppress(ValueError):  # closed before
            AT_END.remove(self._kill)
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

    def _read_messages(self, stream: IO[str]) -> None:
        try:
            for line in stream:
                self._messages.put(json.loads(line))
        except ValueError:
            pass  # The line is not valid JSON, or the stream was closed: no more messages follow.
        self._messages.put(None)


def child_command(function: str, limits: Limits, *arguments: str | int) -> list[str]:
    """Return the command of a child process, which runs `child_main`."""
    # -P: the process must not import files of the current folder, such as a numpy.py.
    words = map(str, (function, limits.memory_mib or 0, *arguments))
    return [sys.executable, "-P", "-m", CHILD_MAIN, *words]


# -- one function in a process with limits ------------------------------------------------------


def call_in_child(
    function: str,
    arguments: Mapping[str, Any],
    limits: Limits,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Call a function in a child process with limits.

    Returns:
        The result of the function, as a JSON value.
    """
    child = Child(
        child_command(f"{CHILD_MAIN}:call", limits),
        {**os.environ, **environment} if environment else None,
    )
    try:
        child.send({"function": function, "arguments": arguments})
        return child.receive(limits.seconds)["value"]
    finally:
        child.close()


def limited(
    function: str,
    about: str,
    limits: Limits | None = None,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Any:
    """Call a function of this package that reads a file in a child process with limits.

    Returns:
        The result of the function, as a JSON value.
    """
    limits = limits or Limits.default()
    try:
        return call_in_child(function, arguments, limits, environment)
    except ChildFailedError as error:
        if error.kind:
            raise getattr(errors, error.kind)(str(error)) from error
        if error.outcome == "hung":
            raise GraphError(
                f"{about} takes longer than {limits.seconds:g} s to read; it has nested ONNX "
                "functions, or is far larger than one layer"
            ) from error
        if error.outcome == "crashed":
            raise GraphError(f"{about} cannot be read: a process that tried it {error}") from error
        raise GraphError(f"{about}: {error}") from error
