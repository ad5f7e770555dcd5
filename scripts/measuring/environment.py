"""Description of the machine of a measurement, and the environment of its processes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.system_info import environment


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


def made_by(machine: Mapping[str, Any] | None = None) -> str:
    """Return the line that each page of results has: command, commit, date, machine, versions.

    Args:
        machine: The environment of a measurement that is not of this moment.
    """
    machine = machine or environment()
    command = shlex.join([f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return f"`{command}`, commit {commit()}, {machine['date'].split()[0]}: {made_on(machine)}"


def commit() -> str:
    """Return the short commit of this checkout, with "+" where files beside results differ."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = git(
        "status", "--porcelain", "--untracked-files=no", ":/", ":(top,exclude)docs/results"
    )
    return f"{git('rev-parse', '--short=8', 'HEAD') or 'unknown'}{'+' if changed else ''}"
