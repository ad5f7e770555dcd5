"""Description of the machine of a measurement, and the environment of its processes."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.parts.benchmarks.bench import machine

START = time.monotonic()
"""The time at which this script started."""

MEASURED = (":/", *(f":(top,exclude){text}" for text in
            ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml")))  # fmt: skip
"""The files of this checkout that results depend on, for git: all but texts."""


def let_children_import() -> None:
    """Let processes that this one starts import `measuring`."""
    folder = str(Path(__file__).resolve().parent.parent)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))


def made_on(facts: Mapping[str, Any]) -> str:
    """Describe the machine and the versions of a measurement in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['system']}, "
        f"Python {facts['python']}; {versions}"
    )


def write_page(path: Path, text: str, facts: Mapping[str, Any] | None = None) -> None:
    """Write a page of results, with the line below its title that says how it was made.

    Args:
        path: The page.
        text: Its text, which begins with its title.
        facts: The environment of the measurement; default: this machine's.
    """
    title, rest = text.split("\n", 1)
    path.write_text(f"{title}\n\n{made_by(facts)}\n{rest}", encoding="utf-8")


def made_by(facts: Mapping[str, Any] | None = None) -> str:
    """Return the line of a page: command, commit, date, minutes, machine and versions."""
    facts = facts or machine()
    command = shlex.join([f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    minutes = math.ceil((time.monotonic() - START) / 60)
    date = facts["date"].split()[0]
    return f"`{command}`, commit {commit()}, {date}, {minutes} min: {made_on(facts)}."


def commit() -> str:
    """Return the short commit that last changed a measured file, with "+" if one differs now."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments, "--", *MEASURED]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    last = git("log", "-1", "--abbrev=8", "--format=%h") or "unknown"
    return f"{last}{'+' if git('status', '--porcelain', '--untracked-files=no') else ''}"
