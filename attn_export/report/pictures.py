"""Pictures in SVG, and those of the HTML report: where the errors of the worst case sit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from attn_export.error_maps import Cells, ErrorMap, ErrorProfile
from attn_export.report.tables import graph_label, status_text
from attn_export.results import Report, Verdict

_PictureText = tuple[float, float, str, str]
"""_PictureText of a picture: where it starts, its class, and what it says."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """What `page/svg.j2` draws.

    Attributes:
        size: The width and height in CSS pixels.
        box: The width and height in the units of coordinates.
        paths: SVG paths by their class in the style sheet.
        title: The name of the picture.
        words: What the picture shows, for those who do not see it.
        apart: Whether there are lines between the parts of paths.
    """

    size: tuple[float, float]
    box: tuple[float, float]
    paths: Mapping[str, str]
    title: str
    words: str
    texts: tuple[_PictureText, ...] = ()
    apart: bool = False


def rectangle(x: float, y: float, width: float, height: float) -> str:
    """Return the path of a rectangle."""
    return f"M{x:g} {y:g}h{width:g}v{height:g}h{-width:g}z"


STEPS = (0.01, 0.1, 0.25, 0.5, 1.0)
"""Upper limits of the colours of a heat map, as fractions of its largest magnitude."""

SHOWN = 12
"""Largest number of figures on a page. report.json has all."""

_WIDE, _HIGH = 288, 192
"""Largest size of a heat map in CSS pixels, which fits on the screen of a phone."""

_SMALLEST, _LARGEST = 4, 18
"""Smallest and largest size of a cell in CSS pixels."""

_APART = 24
"""Largest number of rows or columns of a picture with lines between its cells."""

_LOWEST, _HIGHEST = -3, 6
"""Powers of ten at the ends of the log scale of error over the tolerance."""


def figures(report: Report) -> list[dict[str, object]]:
    """Return the figures of a report: failures first, then in the order of their errors.

    They are dicts of the values that `page/report.html.j2` names. Runtimes and graphs whose
    maps look the same share one.
    """
    verdicts = {(v.runtime, v.graph, v.case, v.output): v for v in report.verdicts}
    of_runs = []
    for run in report.runs:
        if run.maps:
            verdict = verdicts[run.runtime, run.graph, run.maps[0].case, run.maps[0].output]
            of_runs.append((verdict, run.maps, f"{run.runtime}, {graph_label(run.graph)}"))
    of_runs.sort(key=lambda item: (item[0].status == "passed", -_size(item[0])))
    found: list[tuple[dict[str, object], list[str]]] = []
    for verdict, maps, name in of_runs:
        figure = _figure(maps, verdict)
        same = next((names for known, names in found if known == figure), None)
        if same is None:
            found.append((figure, [name]))
        else:
            same.append(name)
    return [{"name": "; ".join(names), **figure} for figure, names in found]


def margin_bar(worst: float | None, *, failed: bool) -> Picture:
    """Return a bar of an error over the tolerance on a log scale, with a line at 1."""
    measured = worst is not None and math.isfinite(worst)
    long = _log_place(worst) if worst is not None and measured else float(failed)
    limit = _log_place(1)
    kind = "ebad" if failed else "e3"
    words = f"{worst:.3g} times the tolerance" if measured else "not measured"
    paths = {"e0": rectangle(0, 0, 1, 1), kind: rectangle(0, 0.2, long, 0.6),
             "limit": f"M{limit:g} 0v1"}  # fmt: skip
    return Picture(
        (120, 16), (1, 1), paths, "error ÷ tolerance, log scale, with a line at 1", words
    )


def loss_bar(share: float) -> Picture:
    """Return a bar of the power of a loss, as a share of the largest one."""
    paths = {"e0": rectangle(0, 0, 1, 1), "e3": rectangle(0, 0.2, round(min(share, 1), 3), 0.6)}
    return Picture((120, 16), (1, 1), paths, "share of the largest loss", f"{share:.1%}")


def _log_place(value: float) -> float:
    """Return the place of an error on the log scale, from 0 to 1."""
    power = math.log10(value) if value > 0 else _LOWEST
    return round(min(1.0, max(0.01, (power - _LOWEST) / (_HIGHEST - _LOWEST))), 3)


def _size(verdict: Verdict) -> float:
    """Return the error of a verdict as a sort key: infinity for NaN or none."""
    return math.inf if verdict.worst is None or math.isnan(verdict.worst) else verdict.worst


def _figure(maps: Sequence[ErrorMap], verdict: Verdict) -> dict[str, object]:
    share = ""
    if verdict.worst is not None and math.isfinite(verdict.worst):
        share = f", {verdict.worst:.3g} times the tolerance"
    return {
        "verdict": f"{maps[0].case}, {maps[0].output}: {status_text(verdict.status)}{share}",
        "passed": verdict.status == "passed",
        # Attention, where there is an output of it, tells more than what follows from it.
        "maps": [_map(error_map) for error_map in reversed(maps)],
    }


def _map(error_map: ErrorMap) -> dict[str, object]:
    at = [f"{name} {i}" for name, i in zip(error_map.axes, error_map.index, strict=True)]
    outer = ", ".join(at[:-2])
    scale = max(_largest(error_map.truth), _largest(error_map.runtime))
    most = _largest(error_map.difference)
    rows, columns = ("", "", *error_map.axes)[-2:]
    axes = ", ".join(f"{sign} {name}" for sign, name in (("↓", rows), ("→", columns)) if name)
    return {
        "of": f"{error_map.output} {list(error_map.shape)}",
        "place": f"worst at {', '.join(at) or 'its one element'}: actual {error_map.actual}, "
        f"expected {error_map.expected}",
        "axes": f"{axes or 'one element'}{f'; at {outer}' if outer else ''}",
        "pictures": [
            _heat_map("reference", error_map.truth, scale, error_map),
            _heat_map("runtime", error_map.runtime, scale, error_map),
            _heat_map("difference", error_map.difference, most, error_map),
            *(_profile(profile, error_map) for profile in error_map.profiles),
        ],
    }


def _largest(cells: Cells) -> float:
    return max((abs(value) for line in cells for value in line if value is not None), default=0.0)


def _heat_map(title: str, cells: Cells, largest: float, error_map: ErrorMap) -> Picture:
    """Return a heat map, whose coordinates are in units of a cell."""
    across, down = len(cells[0]), len(cells)
    apart = max(across, down) <= _APART
    row, column = error_map.cell
    wrong = sum(value is None for line in cells for value in line)
    rows, columns = (1, 1, *error_map.shape)[-2:]
    drawn = "" if (rows, columns) == (down, across) else f", drawn as {down} by {across} cells"
    unit = "times the tolerance" if title == "difference" else "in magnitude"
    words = (
        f"{title} of {error_map.output}: {rows} by {columns} elements{drawn}, up to {largest:g} "
        f"{unit}. The worst error is in row {row + 1}, column {column + 1} of the picture."
        + (f" Not finite or wrong in kind: {wrong}." if wrong else "")
    )
    mark = rectangle(column, row, 1, 1)
    paths = {**_paths(cells, largest, apart=apart), "mark halo": mark, "mark": mark}
    size = (across * _cell(across, _WIDE), down * _cell(down, _HIGH))
    return Picture(size, (across, down), paths, f"{title}, up to {largest:g}", words, apart=apart)


def _cell(count: int, pixels: int) -> int:
    return max(_SMALLEST, min(_LARGEST, pixels // count))


def _paths(cells: Cells, largest: float, *, apart: bool) -> dict[str, str]:
    """Return a path of rectangles for each colour: one for each cell, or for each run."""
    paths: dict[str, list[str]] = {}
    for y, line in enumerate(cells):
        x = 0
        for colour, run in itertools.groupby(_colour(value, largest) for value in line):
            length = len(list(run))
            for start, wide in [(x + i, 1) for i in range(length)] if apart else [(x, length)]:
                paths.setdefault(colour, []).append(rectangle(start, y, wide, 1))
            x += length
    return {colour: "".join(parts) for colour, parts in sorted(paths.items())}


def _colour(value: float | None, largest: float) -> str:
    if value is None:
        return "ewrong"
    share = abs(value) / largest if largest else 0.0
    step = sum(share > limit for limit in STEPS[:-1])
    return f"{'n' if value < 0 and step else 'e'}{step}"


def _profile(profile: ErrorProfile, error_map: ErrorMap) -> Picture:
    """Return bars of the error at each place of an axis, on a log scale with a line at 1."""
    values = profile.values
    paths: dict[str, str] = {"e0": rectangle(0, 0, len(values), 1)}
    for x, value in enumerate(values):
        kind = "ewrong" if value is None else "ebad" if value > 1 else "e3"
        high = 1.0 if value is None else _log_place(value)
        paths[kind] = paths.get(kind, "") + rectangle(x + 0.1, round(1 - high, 3), 0.8, high)
    limit = 1 - _log_place(1)
    paths["limit"] = f"M0 {limit:g}h{len(values)}"
    index = error_map.axes.index(profile.axis)
    sizes = [math.inf if value is None else value for value in values]
    worst = sizes.index(max(sizes))
    words = (
        f"Error ÷ tolerance along {profile.axis} ({error_map.shape[index]}): largest at bar "
        f"{worst + 1} of {len(values)}, "
        + (f"{sizes[worst]:g}." if sizes[worst] < math.inf else "where it cannot be measured.")
    )
    size = (max(64, len(values) * min(12, _WIDE // len(values))), 72)
    return Picture(size, (len(values), 1), paths, f"error by {profile.axis}", words)
