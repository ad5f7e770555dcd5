"""One of our own graphs as a candidate, with all that its run needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attn_export.bench.arrays import Feed
from attn_export.bench.measurements import Candidate, Work
from attn_export.results import GraphFile


def as_candidate(
    name: str,
    folder: Path,
    graph: GraphFile,
    inputs: Mapping[str, Feed],
    outputs: Mapping[str, Feed],
    work: Work,
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
        "inputs": {name: feed.to_json() for name, feed in inputs.items()},
        "outputs": {name: feed.to_json() for name, feed in outputs.items()},
        "layouts": {name: list(axes) for name, axes in graph.layouts.items()},
        "bound": dict(graph.bound),
    }
    return Candidate(name, "ours", "graph", options, work)
