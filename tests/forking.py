"""Processes of this package that are forked by a server, so that their imports are done.

Tests start thousands of Python processes, and each would import the same for a quarter of a second,
with torch for four. They are processes of their own as ever, with their pipes, limits and signals.
Those that the tests' own processes start are forked, and those that a forked command line starts.
With --all nothing is forked.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from fork_server import LIGHT, WITH_TORCH

from attn_export.runtimes import child, process
from attn_export.runtimes.engines.ort_cpu import NO_TELEMETRY

SERVER = Path(__file__).with_name("fork_server.py")
FORKED = {process.SERVE, f"{child.CHILD_MAIN}:call"}
"""Functions that `child_main` calls in processes that are forked."""

COMMAND_LINE = "attn_export.__main__"

DECIDED_AT_START = ("PYTHON", "LD_", "OMP_", "OPENBLAS_")
"""Prefixes of environment variables that have an effect only at the start of a process."""

_lock = threading.Lock()
_servers: dict[str, socket.socket] = {}
_started: list[subprocess.Popen[bytes]] = []


class Forked:
    """A forked process, with the part of the interface of `subprocess.Popen` that `Child` uses."""

    def __init__(self, job: Mapping[str, Any], files: Sequence[int], kind: str = LIGHT) -> None:
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        job = {"environment": dict(os.environ), "cwd": str(Path.cwd()), "path": [], **job}
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sent_files = [*files[:3], theirs.fileno(), *files[3:]]
        with theirs, _lock:
            socket.send_fds(_server(kind), [json.dumps(job).encode()], sent_files)
        self.pid = int(self._end.recv(32))

    def poll(self) -> int | None:
        """Return the exit code or -signal, or None while the process runs."""
        if self.returncode is None and select.select([self._end], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end of the process; return the exit code or -signal."""
        if self.returncode is None:
            self.returncode = int(self._end.recv(32))
            self._end.close()
        return self.returncode


def _server(kind: str) -> socket.socket:
    """Return the socket of a server, which is started at the first call.

    The server ends with this process and those that it handed the socket to.
    """
    if kind not in _servers:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, str(SERVER), str(number), kind],
                stdin=subprocess.DEVNULL, pass_fds=[number], start_new_session=True,
                env={**os.environ, **dict([NO_TELEMETRY])},
            )  # fmt: skip
        _servers[kind] = own
        _started.append(process)
    return _servers[kind]


@functools.cache
def _start_environment() -> dict[str, str]:
    """Return the variables in `DECIDED_AT_START` as they were at the first call."""
    return {n: value for n, value in os.environ.items() if n.startswith(DECIDED_AT_START)}


def _is_as_at_start() -> bool:
    """Return whether the environment has the variables that servers were started with."""
    return _start_environment.__wrapped__() == _start_environment()


def _popen(
    command: Sequence[str], *, env: Any, pass_fds: Sequence[int] = (), **options: Any
) -> Any:
    """Start a process, forked if it is one of this package: `subprocess.Popen` for `Child`."""
    start, words = list(command[:4]), command[4:]
    program = [sys.executable, "-P", "-m", child.CHILD_MAIN]
    if env is not None or start != program or words[0] not in FORKED:
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **options)
    if not _is_as_at_start():
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **options)
    (stdin, stdin_writer), (stdout_reader, stdout) = os.pipe(), os.pipe()
    try:
        files = [stdin, stdout, options["stderr"].fileno(), *pass_fds]
        process = Forked({"module": child.CHILD_MAIN, "words": words}, files)
    finally:
        os.close(stdin)
        os.close(stdout)
    process.stdin, process.stdout = os.fdopen(stdin_writer, "w"), os.fdopen(stdout_reader)
    return process


FORKING = SimpleNamespace(Popen=_popen, PIPE=subprocess.PIPE)


def fork_from_now_on() -> None:
    """Fork the processes that `Child` starts from now on, if the system can (Linux)."""
    if hasattr(os, "pidfd_open"):
        _start_environment()
        child.subprocess = FORKING  # type: ignore[attr-defined]


def fork_by(server: socket.socket) -> None:
    """Have the processes that `Child` starts forked by the server of another process."""
    _servers[LIGHT] = server
    child.subprocess = FORKING  # type: ignore[attr-defined]


def forking() -> bool:
    """Return whether processes are forked."""
    return child.subprocess is FORKING and _is_as_at_start()  # type: ignore[attr-defined]


@contextlib.contextmanager
def started_anew() -> Iterator[None]:
    """Start processes without forking inside this block."""
    before, child.subprocess = child.subprocess, subprocess  # type: ignore[attr-defined]
    try:
        yield
    finally:
        child.subprocess = before  # type: ignore[attr-defined]


def run_forked(
    arguments: Sequence[str], cwd: Path, *, with_torch: bool
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a forked process, as `subprocess.run` would with captured output."""
    with (
        Path(os.devnull).open() as nothing, tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):  # fmt: skip
        job = {
            "module": COMMAND_LINE, "words": list(arguments), "cwd": str(cwd), "path": [str(cwd)],
            "forks": True,
        }  # fmt: skip
        files = [file.fileno() for file in (nothing, out, err, _server(LIGHT))]
        code = Forked(job, files, WITH_TORCH if with_torch else LIGHT).wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())
