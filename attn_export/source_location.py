"""Location of errors in the user's own files."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

Line = tuple[str, int]

STDLIB, OURS = Path(sysconfig.get_path("stdlib")).resolve(), Path(__file__).resolve().parent
INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages: within the standard library's folder, but not of it."""
TOOLS = (
    "torch", "onnxscript", "onnx_ir", "onnx", "numpy", "sympy",
    "einops", "einx", "opt_einsum", "torch_einops_utils", "jaxtyping", "beartype", "typeguard",
    "frozendict", "loguru", "packaging", "decorator", "wrapt", "typing_extensions",
)  # fmt: skip
"""Packages that only pass errors on: they compute what the line that calls them says."""
RAISED = ("", 0)


@functools.cache  # asked for every frame, and to resolve a path asks the disk
def is_theirs(file: str) -> bool:
    """Return whether a file belongs to neither torch, nor Python, nor this package."""
    path = Path(file).resolve()
    if file.startswith("<") or path.is_relative_to(OURS):
        return False
    packages = [after for part, after in pairwise(path.parts) if part in INSTALLED]
    if packages:
        return packages[-1] not in TOOLS
    return not path.is_relative_to(STDLIB)


def line_of(error: BaseException) -> str:
    """Return the innermost user line that an error, or its cause, passed through.

    It reads ``file.py:12``, or "" if there is none.
    """
    found: list[Line] = []
    at: BaseException | None = error
    while at is not None:
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(at.__traceback__)]
        # What torch says of the code that it was translating.
        frames += _frames_in(str(at))
        found += [frame for frame in frames if is_theirs(frame[0])]
        at = at.__cause__
    return show(found[-1]) if found else ""


def line_in(trace: str) -> str:
    """Return the innermost user line in the text of a stack trace, or ""."""
    found = [frame for frame in _frames_in(trace) if is_theirs(frame[0])]
    return show(found[-1]) if found else ""


def _frames_in(text: str) -> list[Line]:
    return [(file, int(n)) for file, n in re.findall(r'File "([^"]+)", line (\d+)', text)]


def branching_line(one: Callable[[], object], other: Callable[[], object]) -> str:
    """Return the user line after which two runs diverge.

    If only one of them raises, return the line of the error; "" if both take the same path.

    Args:
        one: A run of the user's code.
        other: Another run of it.
    """
    first, second = _lines_of(one), _lines_of(other)
    last: Line | None = None
    for a, b in zip_longest(first, second):
        if a != b:
            return show(last) if last else ""
        last = a
    return ""


def show(line: Line) -> str:
    """Format a line as ``file.py:12``."""
    return f"{Path(line[0]).name}:{line[1]}"


def _lines_of(run: Callable[[], object]) -> list[Line]:
    """Return the user lines that a run passes, in order; an error ends them with `RAISED`."""
    lines: list[Line] = []

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:  # noqa: ARG001
        return on_line if is_theirs(frame.f_code.co_filename) else None

    with _tracing(on_call):
        try:
            run()
        except Exception:
            lines.append(RAISED)
    return lines


@contextlib.contextmanager
def _tracing(trace: Any) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def user_line() -> str:
    """Return the innermost line of the user's that is being run; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_theirs(frame.f_code.co_filename):
            return show((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return ""
