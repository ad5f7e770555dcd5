"""Child process and its protocol: JSON, one object a line, over pipes."""

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

from attn_export.interruption import undo_if_ended
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
