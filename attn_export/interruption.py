"""Interruption of the command line: unfinished work is undone, and nothing else runs.

A signal must not become an exception there. torch, onnx and others call Python from C++, where an
exception that comes at the wrong moment ends the process with abort(), or comes back as an error of
another kind, as if the module could not be exported. So the handler itself undoes what is under way
and ends the process. A call of the jobs from Python keeps Python's own handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from attn_export.errors import INTERRUPTED

MESSAGE = "interrupted; nothing half-written is left"

_under_way: dict[object, Callable[[], None]] = {}
_asks = False


def undo_if_ended(undo: Callable[[], None]) -> Callable[[], None]:
    """Register an undo action for a signal that ends this process from here on.

    Args:
        undo: May be called at any time, and more than once.

    Returns:
        Forgets it.
    """
    key = object()
    _under_way[key] = undo

    def forget() -> None:
        _under_way.pop(key, None)

    return forget


@contextlib.contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Undo at the end of the block, however that ends.

    Args:
        undo: May be called at any time, and more than once.
    """
    forget = undo_if_ended(undo)
    try:
        yield
    finally:
        undo()
        forget()


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt within a block that can return partial results."""
    global _asks
    before, _asks = _asks, True
    try:
        yield
    finally:
        _asks = before


def end_on_signal() -> None:
    """Take over SIGINT, SIGTERM and SIGHUP, but those that are ignored: nohup stays nohup."""
    for number in _signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def _signals() -> list[signal.Signals]:
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _end(number: int, _: FrameType | None) -> None:
    if number == signal.SIGINT and _asks:
        raise KeyboardInterrupt
    for each in _signals():  # whoever is impatient does not keep us from tidying up
        signal.signal(each, signal.SIG_IGN)
    for undo in reversed(list(_under_way.values())):
        with contextlib.suppress(Exception):
            undo()
    with contextlib.suppress(OSError):
        os.write(2, f"attn-export: {MESSAGE}\n".encode())
    os._exit(INTERRUPTED if number == signal.SIGINT else 128 + number)
