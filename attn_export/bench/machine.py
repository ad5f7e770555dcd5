"""The machine and the libraries that were measured."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

from attn_export.system_info import environment

OTHERS = ("openvino",)
"""Packages that take part where they are installed."""


def machine() -> dict[str, Any]:
    """Return `system_info`, the processor, and the versions of engines beside our own."""
    from importlib.metadata import PackageNotFoundError, version

    made = environment()
    for name in OTHERS:
        try:
            made["versions"][name] = version(name)
        except PackageNotFoundError:
            continue
    return {**made, "processor": _processor()}


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
