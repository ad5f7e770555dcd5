"""Pictures of the HTML report: error maps, and the graph's attention part as a grid."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attn_export.report.tables import form_name
from attn_export.results import ErrorMap, ErrorMapPanel, Report, Verdict

if TYPE_CHECKING:
    from attn_export.graph.neighbourhood import Lane, Neighbourhood, Step


# -- error maps: cells by colour, and a description of each in words ----------------------------

STEPS = (0.01, 0.1, 0.25, 0.5, 1.0)
"""Share of the largest error of a picture: where a step of its colours ends."""

SHOWN = 12
"""Number of maps on a page; report.json has all."""

WIDE, HIGH = 288, 192
"""Largest size of a picture in CSS pixels: it fits on the screen of a phone."""

SMALLEST, LARGEST = 4, 18
"""CSS pixels of a cell."""

APART = 24
"""Largest number of rows and columns at which a line parts the cells."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A panel as it is drawn, in units of a cell.

    Attributes:
        width: The width of the whole, in CSS pixels.
        height: Likewise.
        across: Columns of cells.
        down: Rows of cells.
        paths: Each colour's name with the cells that have it, as an SVG path.
        worst: Left and top of the cell of the worst element.
        apart: Whether a line parts the cells.
        axes: The vertical and the horizontal axis, for the label.
        words: A description of its content.
    """

    width: int
    height: int
    across: int
    down: int
    paths: tuple[tuple[str, str], ...]
    worst: tuple[int, int]
    apart: bool
    axes: str
    words: str


@dataclasses.dataclass(frozen=True)
class Figure:
    """The pictures of a runtime with a graph, or of several that have the same.

    Attributes:
        name: Of them.
        of: Case, output and its shape.
        place: The position of the worst element, in words.
        verdict: The verdict on that output.
        passed: Whether it passed.
    """

    name: str
    of: str
    place: str
    verdict: str
    passed: bool
    pictures: tuple[Picture, ...]


def figures(report: Report) -> list[Figure]:
    """Return a figure for each map: first failures, then the largest errors."""
    verdicts = {(v.runtime, v.graph, v.case, v.output): v for v in report.verdicts}
    ranked = []
    for run in report.runs:
        found = run.worst
        if found is not None:
            verdict = verdicts[run.runtime, run.graph, found.case, found.output]
            ranked.append((verdict, run, _figure(found, verdict)))
    ranked.sort(key=lambda one: (one[0].status == "passed", -_size(one[0])))
    names: dict[Figure, list[str]] = {}
    for _, run, figure in ranked:
        names.setdefault(figure, []).append(f"{run.runtime}, {form_name(run.graph)}")
    return [dataclasses.replace(figure, name="; ".join(of)) for figure, of in names.items()]


def _size(verdict: Verdict) -> float:
    """Return the sort key of a verdict: a NaN is worse than any number."""
    return math.inf if verdict.worst is None or math.isnan(verdict.worst) else verdict.worst


def _figure(found: ErrorMap, verdict: Verdict) -> Figure:
    at = ", ".join(f"{name} {i}" for name, i in zip(found.axes, found.index, strict=True))
    share = ""
    if verdict.worst is not None and math.isfinite(verdict.worst):
        share = f", {verdict.worst:.3g} times the error allowed"
    return Figure(
        "",
        f"{found.case}, {found.output} {list(found.shape)}",
        f"worst at {at or 'its one element'}: actual {found.actual}, expected {found.expected}",
        verdict.status + share,
        verdict.status == "passed",
        tuple(_picture(panel, found) for panel in found.panels),
    )


def _picture(panel: ErrorMapPanel, found: ErrorMap) -> Picture:
    across, down = len(panel.values[0]), len(panel.values)
    apart = max(across, down) <= APART
    axes = [
        f"{sign} {name} ({size})"
        for sign, name, size in zip("↓→", (panel.rows, panel.columns), panel.sizes, strict=True)
        if name
    ]
    return Picture(
        across * _cell(across, WIDE),
        down * _cell(down, HIGH),
        across,
        down,
        _paths(panel.values, apart=apart),
        (panel.worst[1], panel.worst[0]),
        apart,
        ", ".join(axes) or "one element",
        _words(panel, found),
    )


def _words(panel: ErrorMapPanel, found: ErrorMap) -> str:
    (rows, columns), (row, column) = panel.sizes, panel.worst
    down, across = len(panel.values), len(panel.values[0])
    together = "" if (down, across) == (rows, columns) else f", drawn as {down} by {across} cells"
    wrong = sum(value is None for line in panel.values for value in line)
    named = f" of {panel.rows}" if panel.rows else ""
    return (
        f"Error of {found.output}: {rows} {_plural('row', rows)}{named} by {columns} "
        f"{_plural('column', columns)}{f' of {panel.columns}' if panel.columns else ''}{together}. "
        f"The worst is in row {row + 1}, column {column + 1} of the picture."
        + (f" {wrong} {_plural('cell', wrong)} cannot be measured." if wrong else "")
    )


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _cell(count: int, pixels: int) -> int:
    return max(SMALLEST, min(LARGEST, pixels // count))


def _paths(values: Sequence[Sequence[float | None]], *, apart: bool) -> tuple[tuple[str, str], ...]:
    """Return rectangles by colour, of one cell, or of equal consecutive cells in a row."""
    largest = max((value for line in values for value in line if value is not None), default=0.0)
    paths: dict[str, list[str]] = {}
    for y, line in enumerate(values):
        x = 0
        for colour, run in itertools.groupby(_colour(value, largest) for value in line):
            length = len(list(run))
            for start, wide in [(x + i, 1) for i in range(length)] if apart else [(x, length)]:
                paths.setdefault(colour, []).append(f"M{start} {y}h{wide}v1h-{wide}z")
            x += length
    return tuple((colour, "".join(parts)) for colour, parts in sorted(paths.items()))


def _colour(value: float | None, largest: float) -> str:
    if value is None:
        return "wrong"
    share = value / largest if largest else 0.0
    return str(sum(share > limit for limit in STEPS[:-1]))


# -- the graph's attention part as a grid, which the browser lays out ---------------------------

# A column for each input of `Attention`, from top to bottom. Steps that neighbouring columns have
# in common are one wide box.

BELOW = {"output": "key", "present_key": "past_key", "present_value": "past_value"}
"""Input under whose column an output stands."""


@dataclasses.dataclass(frozen=True)
class Box:
    """A step in the grid; rows and columns count from 1, as in CSS.

    Attributes:
        rows: The number of rows that it covers: a line leads through those after its own.
        columns: The number of columns that it covers.
        step: The step; None for a line without a box.
    """

    row: int
    column: int
    rows: int
    columns: int
    step: Step | None


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The grid: boxes, and the node between those above and below.

    Attributes:
        columns: The number of columns.
        row: The row of the node.
        inputs: The columns of the inputs, in their order.
        outputs: The columns of the outputs, in their order.
        boxes: The steps, and lines from a short lane down to the node.
    """

    columns: int
    row: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    boxes: tuple[Box, ...]


def draw_attention(found: Neighbourhood) -> Drawing:
    """Return the grid of the surroundings of an attention node."""
    outputs = _output_columns(found)
    node = 1 + max((len(lane.steps) for lane in found.before), default=0)
    below = [
        Box(node + number, column, 1, 1, dataclasses.replace(step, gives=()))
        for lane, column in zip(found.after, outputs, strict=True)
        for number, step in enumerate(lane.steps, start=1)
    ]
    inputs = tuple(range(1, len(found.before) + 1))
    return Drawing(
        max((*inputs, *outputs)), node, inputs, outputs, (*_above(found.before, node), *below)
    )


def _above(lanes: Sequence[Lane], node: int) -> Iterator[Box]:
    for row in range(node - 1):
        for first, last in _runs(lanes, row):
            yield Box(row + 1, first + 1, 1, last - first + 1, lanes[first].steps[row])
    for column, lane in enumerate(lanes, start=1):
        if missing := node - 1 - len(lane.steps):
            yield Box(len(lane.steps) + 1, column, missing, 1, None)


def _runs(lanes: Sequence[Lane], row: int) -> Iterator[tuple[int, int]]:
    """Yield first and last column of each box in a row: equal columns are merged."""
    first = 0
    for column in range(1, len(lanes) + 1):
        same = column < len(lanes) and (
            lanes[first].steps[: row + 1] == lanes[column].steps[: row + 1]
        )
        if not same:
            if row < len(lanes[first].steps):
                yield first, column - 1
            first = column


def _output_columns(found: Neighbourhood) -> tuple[int, ...]:
    inputs = {lane.role: column for column, lane in enumerate(found.before, start=1)}
    taken: list[int] = []
    for lane in found.after:
        wanted = inputs.get(BELOW.get(lane.role, ""), 1)
        taken.append(next(c for c in (wanted, *range(1, len(taken) + 3)) if c not in taken))
    return tuple(taken)
