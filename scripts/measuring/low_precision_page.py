"""Tables of `scripts/bench_low_precision` in markdown, from its figures as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attn_export.errors import printable
from attn_export.parts.benchmarks.bench_report import three_digits
from attn_export.report.tables import markdown_table

FLOAT = "float32"
PEER_GOAL = 0.90

NAN = float("nan")

Workloads = Mapping[str, Mapping[str, Any]]
"""Results of `workload_to_dict`, by the name of the row."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of a table.

    Attributes:
        name: The name of the row.
        columns: The names of its candidates.
        goal: The largest ratio of the best candidate with integers to float32.
    """

    name: str
    columns: Sequence[str]
    goal: float


def beside_float(title: str, lines: Sequence[Line], workloads: Workloads) -> str:
    """Return the table of layers with integers beside float32.

    Args:
        title: The heading of the table.
        lines: The rows, which must have the same columns.
        workloads: The figures.
    """
    heads = ["", *lines[0].columns, "best of integers / float32", "goal", "met"]
    rows = []
    for line in lines:
        times = {column: _median(workloads[line.name], column) for column in line.columns}
        # Goals are for candidates with integers only.
        ours = [time for name, time in times.items() if name != FLOAT]
        ratio = min(ours) / times[FLOAT]
        cells = [three_digits(time) for time in times.values()]
        rows.append((line.name, *cells, *_verdict(ratio, line.goal)))
    return "\n".join([f"## {title}\n", *markdown_table(heads, rows), ""])


def beside_peers(
    names: Sequence[str], own: Collection[str], peers: Sequence[str], workloads: Workloads
) -> str:
    """Return the table that compares our best candidate with each peer.

    Args:
        names: The names of the rows. Rows without peers are omitted.
        own: The names of our candidates that do the same work as the peers.
        peers: The names of the peers.
        workloads: The figures.
    """
    heads = ["", "best of ours", *peers, "ours / best peer", "goal", "met"]
    rows = []
    failed: dict[str, None] = {}
    for name in names:
        candidates = {entry["name"]: entry for entry in workloads[name]["candidates"]}
        if not any(peer in candidates for peer in peers):
            continue
        ours = min(_median(workloads[name], column) for column in own)
        theirs = [_median(workloads[name], peer) for peer in peers]
        ratio = ours / min(time for time in theirs if time == time)
        cells = [three_digits(x) for x in (ours, *theirs)]
        rows.append((name, *cells, *_verdict(ratio, PEER_GOAL)))
        failed |= {
            f"- {name}: {peer}: not run: {printable(candidates[peer]['reason'], 120)}": None
            for peer in peers
            if peer in candidates and candidates[peer]["outcome"] != "ran"
        }
    page = ["## Beside others\n", *markdown_table(heads, rows), "", *failed, ""]
    return "\n".join(page) if rows else ""


def _median(workload: Mapping[str, Any], column: str) -> float:
    """Return the median of a candidate; NaN if it did not run."""
    return next(
        (
            float(entry["median_ms"])
            for entry in workload["candidates"]
            if entry["name"] == column and entry["outcome"] == "ran"
        ),
        NAN,
    )


def _verdict(ratio: float, goal: float) -> tuple[str, str, str]:
    """Return the last cells of a row: the ratio, the goal, and whether it is met."""
    return f"{ratio:.2f}", f"≤ {goal:.2f}", "yes" if ratio <= goal else "**no**"
