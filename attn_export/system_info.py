"""Environment of a result: versions and machine, without paths or names of hosts."""

from __future__ import annotations

import os
import platform
from typing import Any

PACKAGES = ("attn-export", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime-gpu",
            "onnxruntime", "numpy")  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that a result depends on."""
    # Imported here: `verify` starts its runtimes' processes first.
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, Any]:
    """Return versions, system and processor."""
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
    }
