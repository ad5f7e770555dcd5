"""Graphs that a process with torch writes, so that their users need none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TAIL = 300
"""How many characters of what a failed exporter said are kept."""


def file_of(options: Mapping[str, Any]) -> Path:
    """Return the file of a candidate; if it is missing, run its ``export`` job first.

    Raises:
        RuntimeError: If the exporter fails; with its message.
    """
    file = Path(options["file"])
    if "export" in options and not file.exists():
        make_graph(options["export"], file)
    return file


def make_graph(job: Mapping[str, Any], file: Path) -> None:
    """Do one job of `peers_export`.

    Raises:
        RuntimeError: If it fails; with its message.
    """
    module = "attn_export.bench.peers_export"
    command = [sys.executable, "-P", "-m", module, json.dumps(job), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"the export failed: {said[-1][-TAIL:]}")
