"""Pictures of the HTML report: error maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from attn_export.error_maps import ErrorMap, ErrorMapPanel
from attn_export.errors import counted
from attn_export.report.tables import graph_label
from attn_export.results import Report, Verdict

# A figure shows an `ErrorMap`, with a picture in SVG of each of its panels. Both are dicts of the
# values that `page/error_maps.html.j2` names.

STEPS = (0.01, 0.1, 0.25, 0.5, 1.0)
"""Upper limits of the colours of a picture, as fractions of its largest error."""

SHOWN = 12
"""Largest number of maps on a page. report.json has all."""

WIDE, HIGH = 288, 192
"""Largest size of a picture in CSS pixels, which fits on the screen of a phone."""

SMALLEST, LARGEST = 4, 18
"""Smallest and largest size of a cell in CSS pixels."""

APART = 24
"""Largest number of rows or columns of a picture with lines between its cells."""


def figures(report: Report) -> list[dict[str, object]]:
    """Return the figures of a report: failures first, then in the order of their errors.

    Runtimes and graphs whose maps look the same share a figure.
    """
    verdicts = {(v.runtime, v.graph, v.case, v.output): v for v in report.verdicts}
    maps = []
    for run in report.runs:
        if run.worst is not None:
            verdict = verdicts[run.runtime, run.graph, run.worst.case, run.worst.output]
            maps.append((verdict, run.worst, f"{run.runtime}, {graph_label(run.graph)}"))
    maps.sort(key=lambda item: (item[0].status == "passed", -_size(item[0])))
    found: list[tuple[dict[str, object], list[str]]] = []
    for verdict, error_map, name in maps:
        figure = _figure(error_map, verdict)
        same = next((names for known, names in found if known == figure), None)
        if same is None:
            found.append((figure, [name]))
        else:
            same.append(name)
    return [{"name": "; ".join(names), **figure} for figure, names in found]


def _size(verdict: Verdict) -> float:
    """Return the error of a verdict as a sort key: infinity for NaN or none."""
    return math.inf if verdict.worst is None or math.isnan(verdict.worst) else verdict.worst


def _figure(error_map: ErrorMap, verdict: Verdict) -> dict[str, object]:
    at = ", ".join(f"{name} {i}" for name, i in zip(error_map.axes, error_map.index, strict=True))
    share = ""
    if verdict.worst is not None and math.isfinite(verdict.worst):
        share = f", {verdict.worst:.3g} times the error allowed"
    return {
        "of": f"{error_map.case}, {error_map.output} {list(error_map.shape)}",
        "place": f"worst at {at or 'its one element'}: actual {error_map.actual}, "
        f"expected {error_map.expected}",
        "verdict": verdict.status + share,
        "passed": verdict.status == "passed",
        "pictures": [_picture(panel, error_map) for panel in error_map.panels],
    }


def _picture(panel: ErrorMapPanel, error_map: ErrorMap) -> dict[str, object]:
    """Return the picture of a panel, whose coordinates are in units of a cell."""
    across, down = len(panel.values[0]), len(panel.values)
    apart = max(across, down) <= APART
    axes = [
        f"{sign} {name} ({size})"
        for sign, name, size in zip("↓→", (panel.rows, panel.columns), panel.sizes, strict=True)
        if name
    ]
    return {
        "width": across * _cell(across, WIDE),
        "height": down * _cell(down, HIGH),
        "across": across,
        "down": down,
        "paths": _paths(panel.values, apart=apart),
        "worst": (panel.worst[1], panel.worst[0]),
        "apart": apart,
        "axes": ", ".join(axes) or "one element",
        "words": _description(panel, error_map),
    }


def _description(panel: ErrorMapPanel, error_map: ErrorMap) -> str:
    (rows, columns), (row, column) = panel.sizes, panel.worst
    down, across = len(panel.values), len(panel.values[0])
    cells_note = "" if (down, across) == (rows, columns) else f", drawn as {down} by {across} cells"
    wrong = sum(value is None for line in panel.values for value in line)
    of_rows = f" of {panel.rows}" if panel.rows else ""
    of_columns = f" of {panel.columns}" if panel.columns else ""
    return (
        f"Error of {error_map.output}: {counted(rows, 'row')}{of_rows} by "
        f"{counted(columns, 'column')}{of_columns}{cells_note}. "
        f"The worst is in row {row + 1}, column {column + 1} of the picture."
        + (f" {counted(wrong, 'cell')} cannot be measured." if wrong else "")
    )


def _cell(count: int, pixels: int) -> int:
    return max(SMALLEST, min(LARGEST, pixels // count))


def _paths(values: Sequence[Sequence[float | None]], *, apart: bool) -> dict[str, str]:
    """Return an SVG path of rectangles for each colour: one for each cell, or for each run."""
    largest = max((value for line in values for value in line if value is not None), default=0.0)
    paths: dict[str, list[str]] = {}
    for y, line in enumerate(values):
        x = 0
        for colour, run in itertools.groupby(_colour(value, largest) for value in line):
            length = len(list(run))
            for start, wide in [(x + i, 1) for i in range(length)] if apart else [(x, length)]:
                paths.setdefault(colour, []).append(f"M{start} {y}h{wide}v1h-{wide}z")
            x += length
    return {colour: "".join(parts) for colour, parts in sorted(paths.items())}


def _colour(value: float | None, largest: float) -> str:
    if value is None:
        return "wrong"
    share = value / largest if largest else 0.0
    return str(sum(share > limit for limit in STEPS[:-1]))
