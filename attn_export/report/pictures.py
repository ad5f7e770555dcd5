"""Pictures of the HTML report: error maps, and a diagram of the nodes around attention."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attn_export.errors import counted
from attn_export.report.tables import graph_label
from attn_export.results import ErrorMap, ErrorMapPanel, Report, Verdict

if TYPE_CHECKING:
    from attn_export.graph.neighbourhood import DrawnStep, Lane, Neighbourhood


# -- error maps ---------------------------------------------------------------------------------

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


# -- diagram of the nodes around attention ------------------------------------------------------

# The diagram is a CSS grid. Each input of `Attention` has a column, in which the steps that compute
# it follow each other from top to bottom. Equal steps of adjacent columns are merged into one box.

BELOW = {"output": "key", "present_key": "past_key", "present_value": "past_value"}
"""Input in whose column each output is drawn, so that a cache stands below what it extends."""


@dataclasses.dataclass(frozen=True)
class Box:
    """A step in the grid.

    Attributes:
        row: The first row, counted from 1 as in CSS.
        step: The step; None for a vertical line without a box.
    """

    row: int
    column: int
    rows: int
    columns: int
    step: DrawnStep | None


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The grid of an attention node and its surroundings.

    Attributes:
        inputs: The columns of the inputs, in their order.
        outputs: The columns of the outputs, in their order.
        boxes: The steps above and below the node, and lines where a column has fewer of them.
    """

    columns: int
    row: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    boxes: tuple[Box, ...]


def draw_attention(neighbourhood: Neighbourhood) -> Drawing:
    """Return the grid of the surroundings of an attention node."""
    outputs = _output_columns(neighbourhood)
    node_row = 1 + max((len(lane.steps) for lane in neighbourhood.before), default=0)
    # Graph outputs have boxes of their own below the node, so its steps do not name them.
    below = [
        Box(node_row + number, column, 1, 1, dataclasses.replace(step, gives=()))
        for lane, column in zip(neighbourhood.after, outputs, strict=True)
        for number, step in enumerate(lane.steps, start=1)
    ]
    inputs = tuple(range(1, len(neighbourhood.before) + 1))
    return Drawing(
        max((*inputs, *outputs)),
        node_row,
        inputs,
        outputs,
        (*_above(neighbourhood.before, node_row), *below),
    )


def _above(lanes: Sequence[Lane], node_row: int) -> Iterator[Box]:
    for row in range(node_row - 1):
        for first, last in _runs(lanes, row):
            yield Box(row + 1, first + 1, 1, last - first + 1, lanes[first].steps[row])
    for column, lane in enumerate(lanes, start=1):
        if missing := node_row - 1 - len(lane.steps):
            yield Box(len(lane.steps) + 1, column, missing, 1, None)


def _runs(lanes: Sequence[Lane], row: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last index of lanes with equal steps up to a row: they share a box."""
    first = 0
    for column in range(1, len(lanes) + 1):
        same = column < len(lanes) and (
            lanes[first].steps[: row + 1] == lanes[column].steps[: row + 1]
        )
        if not same:
            if row < len(lanes[first].steps):
                yield first, column - 1
            first = column


def _output_columns(neighbourhood: Neighbourhood) -> tuple[int, ...]:
    """Return the column of each output: that of its input by `BELOW`, or the first free one."""
    inputs = {lane.role: column for column, lane in enumerate(neighbourhood.before, start=1)}
    taken: list[int] = []
    for lane in neighbourhood.after:
        preferred = inputs.get(BELOW.get(lane.role, ""), 1)
        taken.append(next(c for c in (preferred, *range(1, len(taken) + 2)) if c not in taken))
    return tuple(taken)
