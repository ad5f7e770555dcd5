"""Description of the machine of a measurement, and the environment of its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def let_children_import() -> None:
    """Let processes that this one starts import `measuring`."""
    folder = str(Path(__file__).resolve().parent.parent)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))


def made_on(machine: Mapping[str, Any]) -> str:
    """Describe the machine and the versions of a measurement in one line.

    Args:
        machine: The environment of a `BenchReport`.
    """
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, "
        f"Python {machine['python']}; {versions}"
    )
