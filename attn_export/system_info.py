"""Environment of a result, without paths or names of hosts; installation of missing packages."""

from __future__ import annotations

import os
import platform
import re
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attn_export.errors import UsageError

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
    """Return versions, system, processor and date."""
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def processor() -> str:
    """Return the name of the machine's processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


# -- packages that are not installed ------------------------------------------------------------


EXTRAS = {
    "onnxruntime": "cpu",
    "torch": "build",
    "onnxscript": "build",
    "matplotlib": "build",
    "model_signing": "sign",
    "OpenSSL": "sign",
    "cryptography": "sign",
    "distributed": "sweep",
}
"""The extra of this package that brings a package."""


def install_command(*requirements: str) -> str:
    """Return the command that installs packages into this environment, which may have no pip."""
    quoted = " ".join(f"'{name}'" if set(name) & set("[<>") else name for name in requirements)
    if find_spec("pip"):
        return f"pip install {quoted}"
    place = Path(sys.prefix)
    if place.is_relative_to(Path.cwd()):
        place = place.relative_to(Path.cwd())
    return f"python3 -m pip --python {place} install {quoted}"


def missing_package(package: str, *requirements: str) -> str:
    """Return the message for a package that is not installed, with the command that brings it.

    Args:
        package: The name of the package.
        requirements: The arguments of pip. Default: the extra with it, or else the package.
    """
    extra = [f"attn-export[{EXTRAS[package]}]"] if package in EXTRAS else [package]
    return f"{package} is not installed; {install_command(*(requirements or extra))}"


def check_installed(package: str) -> None:
    """Refuse early what needs a package of an extra that was not installed.

    Raises:
        UsageError: If it is not installed.
    """
    if find_spec(package) is None:
        raise UsageError(missing_package(package))
