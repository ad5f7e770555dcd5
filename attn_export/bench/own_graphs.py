"""Our own graphs as candidates, and graphs that a process with torch writes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.bench.feeds import Feed
from attn_export.bench.measurements import Candidate, Cost
from attn_export.results import GraphFile

# -- graphs that a process with torch writes, so that their users need none ---------------------


TAIL = 300
"""Number of characters kept of the output of a failed exporter."""


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

    Args:
        job: The job, as JSON values.
        file: The file to write.

    Raises:
        RuntimeError: If it fails; with its message.
    """
    module = "attn_export.bench.peers_export"
    command = [sys.executable, "-P", "-m", module, json.dumps(job), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"the export failed: {said[-1][-TAIL:]}")


# -- one of our own graphs as a candidate, with all that its run needs --------------------------


def as_candidate(
    name: str,
    folder: Path,
    graph: GraphFile,
    inputs: Mapping[str, Feed],
    outputs: Mapping[str, Feed],
    work: Cost,
) -> Candidate:
    """Return a graph as a candidate in ONNX Runtime.

    Args:
        name: Its name in the contest.
        folder: The folder of the graph.
        graph: Its file, its layouts, and what is written in place.
        inputs: As the bundle states them.
        outputs: Likewise.
        work: The work of one run.
    """
    options = {
        "file": str(folder / graph.name),
        "inputs": {
            name: dataclasses.replace(feed, dtype=graph.dtypes.get(name, feed.dtype)).to_json()
            for name, feed in inputs.items()
        },
        "outputs": {name: feed.to_json() for name, feed in outputs.items()},
        "layouts": {name: list(axes) for name, axes in graph.layouts.items()},
        "bound": dict(graph.bound),
    }
    return Candidate(name, "ours", "graph", options, work)
