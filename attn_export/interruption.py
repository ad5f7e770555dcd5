"""Handling of Ctrl-C and other signals in the command line: undo unfinished work, then exit.

The handlers raise no exception. torch, onnx and others call Python from C++, where an unexpected
exception ends the process with abort(), or is turned into another error, as if the module could not
be exported. Therefore the handler itself calls the registered undo actions and ends the process.
Jobs that are called from Python keep Python's own handlers.
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

_message = MESSAGE
_undo_actions: dict[object, Callable[[], None]] = {}
_raises_on_ctrl_c = False


def undo_if_ended(undo: Callable[[], None]) -> Callable[[], None]:
    """Register an action to run if a signal ends this process; return a function that cancels it.

    The action may be called at any time, and more than once.
    """
    key = object()
    _undo_actions[key] = undo

    def cancel() -> None:
        _undo_actions.pop(key, None)

    return cancel


@contextlib.contextmanager
def undo_at_end(undo: Callable[[], None]) -> Iterator[None]:
    """Call an undo action at the end of the block, even if a signal ends the process.

    The action may be called at any time, and more than once.
    """
    cancel = undo_if_ended(undo)
    try:
        yield
    finally:
        undo()
        cancel()


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C inside this block, which can return partial results."""
    global _raises_on_ctrl_c
    before, _raises_on_ctrl_c = _raises_on_ctrl_c, True
    try:
        yield
    finally:
        _raises_on_ctrl_c = before


@contextlib.contextmanager
def message_if_ended(message: str) -> Iterator[None]:
    """Print another message than `MESSAGE` if a signal ends the process inside this block."""
    global _message
    before, _message = _message, message
    try:
        yield
    finally:
        _message = before


def end_on_signal() -> None:
    """Install the handler for SIGINT, SIGTERM and SIGHUP, except for ignored ones, as by nohup."""
    for number in _signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _signals() -> list[signal.Signals]:
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _end(number: int, _: FrameType | None) -> None:
    if number == signal.SIGINT and _raises_on_ctrl_c:
        raise KeyboardInterrupt
    for name in _signals():  # a second signal must not interrupt the undo actions
        signal.signal(name, signal.SIG_IGN)
    for undo in reversed(list(_undo_actions.values())):
        with contextlib.suppress(Exception):
            undo()
    if util := sys.modules.get("multiprocessing.util"):
        with contextlib.suppress(Exception):
            for child in sys.modules["multiprocessing"].active_children():
                child.kill()
            # Semaphores have names in the system, and Python warns of those left there.
            util._run_finalizers(0)
    with contextlib.suppress(OSError):
        os.write(2, f"attn-export: {_message}\n".encode())
    os._exit(INTERRUPTED if number == signal.SIGINT else 128 + number)
