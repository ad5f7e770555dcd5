"""Places where a module tests whether it is being exported or compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from attn_export.source_location import is_theirs, show

ASKED = (
    torch.compiler.is_exporting, torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling,
    torch.onnx.is_in_onnx_export, torch.jit.is_tracing,  # type: ignore[attr-defined]
)  # fmt: skip
"""Functions that answer otherwise in an export than in a plain call."""


def places_that_ask(run: Callable[[], Any]) -> list[str]:
    """Return the user's calls of such a function: ``is_exporting() at mine.py:12``.

    Args:
        run: Calls the module.
    """
    names = {function.__code__: function.__name__ for function in ASKED}
    found: dict[str, None] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event == "call" and frame.f_code in names and caller is not None:
            file = caller.f_code.co_filename
            if is_theirs(file):
                found[f"{names[frame.f_code]}() at {show((file, caller.f_lineno))}"] = None

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(found)
