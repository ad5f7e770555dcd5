"""Handling of Ctrl-C and other signals in the command line: tidy up, then exit.

The handlers raise no exception. torch, onnx and others call Python from C++, where an unexpected
exception ends the process with abort(), or is turned into another error, as if the module could not
be exported. Jobs that are called from Python keep Python's own handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from attn_export.errors import INTERRUPTED

MESSAGE = "interrupted; nothing half-written is left"

AT_END: list[Callable[[], None]] = []
"""What kills a child process or removes a temporary folder that is there, in order of creation."""

_CURSOR = b"\r\x1b[2K\x1b[?25h"
"""Escapes that erase a progress bar and show the cursor, which the bar hides."""

_now = {"message": MESSAGE, "ctrl-c": ""}


@contextlib.contextmanager
def _within(name: str, value: str) -> Iterator[None]:
    before, _now[name] = _now[name], value
    try:
        yield
    finally:
        _now[name] = before


def ctrl_c_raises() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt on Ctrl-C inside this block, which can return partial results."""
    return _within("ctrl-c", "raises")


def message_if_ended(message: str) -> contextlib.AbstractContextManager[None]:
    """Print another message than `MESSAGE` if a signal ends the process inside this block."""
    return _within("message", message)


def end_on_signal() -> None:
    """Install the handler for SIGINT, SIGTERM and SIGHUP, except for ignored ones, as by nohup."""
    for number in _signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _signals() -> list[signal.Signals]:
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _end(number: int, _: FrameType | None) -> None:
    if number == signal.SIGINT and _now["ctrl-c"]:
        raise KeyboardInterrupt
    for name in _signals():  # a second signal must not interrupt this
        signal.signal(name, signal.SIG_IGN)
    for tidy in reversed(AT_END):
        with contextlib.suppress(Exception):
            tidy()
    if util := sys.modules.get("multiprocessing.util"):
        with contextlib.suppress(Exception):
            for child in sys.modules["multiprocessing"].active_children():
                child.kill()
            # Semaphores have names in the system, and Python warns of those left there.
            util._run_finalizers(0)
    with contextlib.suppress(OSError):
        os.write(2, _CURSOR * os.isatty(2) + f"attn-export: {_now['message']}\n".encode())
    os._exit(INTERRUPTED if number == signal.SIGINT else 128 + number)
