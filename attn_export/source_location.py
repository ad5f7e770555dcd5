"""Locations of errors in the user's own files."""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from itertools import pairwise, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

Line = tuple[str, int]
"""The path of a file and the number of a line."""

STDLIB, OURS = Path(sysconfig.get_path("stdlib")).resolve(), Path(__file__).resolve().parent
_INSTALLED = ("site-packages", "dist-packages")
"""Names of folders with installed packages, which may lie within that of the standard library."""

TOOLS = (
    "torch", "onnxscript", "onnx_ir", "onnx", "numpy", "sympy",
    "einops", "einx", "opt_einsum", "torch_einops_utils", "jaxtyping", "beartype", "typeguard",
    "frozendict", "loguru", "packaging", "decorator", "wrapt", "typing_extensions",
)  # fmt: skip
"""Packages that are skipped, because the user's line that calls them is the cause of an error."""

_RAISED = ("", 0)
"""The end of the lines of a run that raised an error."""


@functools.cache  # called for every frame, and resolving a path reads the disk
def is_user_file(file: str) -> bool:
    """Return whether a file belongs to neither Python, nor this package, nor one of `TOOLS`."""
    path = Path(file).resolve()
    if file.startswith("<") or path.suffix == ".pyx" or path.is_relative_to(OURS):
        return False
    packages = [after for folder, after in pairwise(path.parts) if folder in _INSTALLED]
    if packages:
        return packages[-1] not in TOOLS
    return not path.is_relative_to(STDLIB)


def line_of(error: BaseException) -> str:
    """Return the innermost user line in the traceback of an error, or of its causes; else ""."""
    lines: list[Line] = []
    current: BaseException | None = error
    while current is not None:
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(current.__traceback__)]
        # torch states the line that it was translating in the message.
        frames += _frames_in(str(current))
        lines += [frame for frame in frames if is_user_file(frame[0])]
        current = current.__cause__
    return show(lines[-1]) if lines else ""


def line_in(trace: str) -> str:
    """Return the innermost user line in the text of a stack trace, or ""."""
    lines = [frame for frame in _frames_in(trace) if is_user_file(frame[0])]
    return show(lines[-1]) if lines else ""


def _frames_in(text: str) -> list[Line]:
    return [(file, int(n)) for file, n in re.findall(r'File "([^"]+)", line (\d+)', text)]


def branching_line(one: Callable[[], object], other: Callable[[], object]) -> str:
    """Return the last common user line of two runs, after which they diverge.

    If one of them raises an error, that is the line of the error. Return "" if both run the same
    lines.
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
    """Return the user lines that a function runs, in order; `_RAISED` follows after an error."""
    lines: list[Line] = []

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:  # noqa: ARG001
        return on_line if is_user_file(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        run()
    except Exception:
        lines.append(_RAISED)
    finally:
        sys.settrace(before)
    return lines


def user_line() -> str:
    """Return the innermost user line on the call stack; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return show((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return ""
