"""Server that imports modules once and then forks processes: `python fork_server.py FD KIND`.

A message on the socket FD holds a job as JSON, and the file descriptors of the new process: stdin,
stdout, stderr, a socket on which the client receives its pid and its exit code, and others that the
process keeps open. The server reaps the process after the client has closed that socket, so that
its pid is not reused before.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from typing import Any

LIGHT = "light"
WITH_TORCH = "with torch"
IMPORTED = {
    LIGHT: (
        "forking", "attn_export.runtimes.worker", "attn_export.runtimes.child_main",
        "attn_export.commands.main", "attn_export.commands.check",
        "attn_export.commands.explain_bundle", "attn_export.commands.lower_here",
        "attn_export.commands.verify",
        "attn_export.graph.requirements", "attn_export.report.html", "onnx.reference",
        "onnxruntime",
    ),
    WITH_TORCH: (
        "forking", "default_share", "attn_export.commands.main",
        "attn_export.commands.build", "attn_export.commands.compare",
        "attn_export.commands.golden_vectors",
    ),
}  # fmt: skip
"""The modules that a server of each kind imports."""

MOST_BYTES, MOST_FILES = 1 << 18, 64


def serve(control: socket.socket) -> None:
    """Start processes until the other end of the socket is closed."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is control:
                    message, files, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_FILES)
                    if not message:
                        return
                    pid = _fork(json.loads(message), files)
                    end = socket.socket(fileno=files.pop(3))
                    for file in files:  # locks and pipes belong to the new process alone
                        os.close(file)
                    waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, end))
                elif isinstance(key.fileobj, int):
                    pid, end = key.data
                    waiting.unregister(key.fileobj)
                    os.close(key.fileobj)
                    if _send_exit_code(pid, end):
                        waiting.register(end, selectors.EVENT_READ, pid)
                    else:
                        _reap(pid, end)
                else:
                    waiting.unregister(key.fileobj)
                    _reap(key.data, key.fileobj)


def _send_exit_code(pid: int, end: socket.socket) -> bool:
    """Send the client the exit code of a process, or -signal; return False if it is gone."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    try:
        end.sendall(f"{code}\n".encode())
    except OSError:
        return False
    return True


def _reap(pid: int, end: Any) -> None:
    """Let the system forget a process that has ended, and close its socket."""
    os.waitpid(pid, 0)
    end.close()


def _fork(job: dict[str, Any], files: list[int]) -> int:
    """Fork a process that runs a job; return its pid."""
    with warnings.catch_warnings():
        # Python warns of threads. They are those of numpy's library, which supports forks.
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _set_up(job, files)
        importlib.import_module(job["module"]).main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = 1
        os._exit(code)


def _set_up(job: dict[str, Any], files: list[int]) -> None:
    """Give this process the files, environment and state that a new process would have."""
    os.setsid()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    os.write(files[3], f"{os.getpid()}\n".encode())
    kept = sorted({2, *files[4:]})
    for low, high in zip(kept, [*kept[1:], 1 << 16], strict=True):
        os.closerange(low + 1, high)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, encoding="utf-8", errors=errors)
        for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "replace"))
    )
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    sys.argv = ["", *job["words"]]
    sys.path[:0] = job["path"]
    if job.get("forks"):
        sys.modules["forking"].fork_by(socket.socket(fileno=files[4]))
    tempfile.tempdir = None  # the environment may name another folder
    random.seed()
    gc.enable()


def main() -> None:
    """Import the modules of a kind of server, and serve."""
    control, own_folder = socket.socket(fileno=int(sys.argv[1])), sys.path[0]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends when the tests end
    for name in IMPORTED[sys.argv[2]]:
        module = importlib.import_module(name)
        if hasattr(module, "warm_up"):
            module.warm_up()
    sys.path.remove(own_folder)
    gc.collect()
    gc.disable()
    gc.freeze()
    serve(control)


if __name__ == "__main__":
    main()
