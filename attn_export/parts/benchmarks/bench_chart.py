"""Bar chart of a benchmark's medians as SVG, grouped by workload, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import OutputError, UsageError
from attn_export.output_folder import check_utf8, write_errors, write_whole
from attn_export.parts.benchmarks.bench_terminal import three_digits
from attn_export.report.pictures import Picture, PictureText, rectangle

_WIDTH, _BARS, _ROW, _TOP = 440, 250, 14, 48
"""Pixels: the width of a panel and of its bars, the height of a bar, and the space above both."""

_Workload = Mapping[str, Any]
"""A workload as `workload_to_dict` returns it and JSON files store it."""


def check_chart_file(file: Path | str) -> None:
    """Check before a benchmark that its chart can be written afterwards."""
    path = Path(file)
    check_utf8(path)
    if path.suffix != ".svg":
        raise UsageError(f"{path} is to be a chart; end its name with .svg")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no such folder")


def write_chart(panels: Mapping[str, Sequence[_Workload]], file: Path | str) -> None:
    """Draw the medians of all candidates except rooflines, with a panel beside the other."""
    from attn_export.report.html import render_page

    check_chart_file(file)
    page = render_page("chart.svg.j2", Path(__file__).with_name("page"), picture=_chart(panels))
    with write_errors(file):
        write_whole(Path(file), page.strip().encode() + b"\n")


def _measured(workload: _Workload) -> list[Mapping[str, Any]]:
    return [c for c in workload["candidates"] if c["role"] != "roof" and c["median_ms"]]


def _chart(panels: Mapping[str, Sequence[_Workload]]) -> Picture:
    times = [c["median_ms"] for some in panels.values() for w in some for c in _measured(w)] or [1]
    scale = (math.floor(math.log10(min(times))), math.floor(math.log10(max(times))) + 1)
    drawn = [
        _draw(number * _WIDTH, title, workloads, scale)
        for number, (title, workloads) in enumerate(panels.items())
    ]
    paths: dict[str, str] = {}
    for of_panel, _, _ in drawn:
        for name, path in of_panel.items():
            paths[name] = paths.get(name, "") + path
    size = (_WIDTH * max(1, len(drawn)), max((high for *_, high in drawn), default=0))
    words = "; ".join(
        f"{workload['name']}: "
        + ", ".join(f"{c['name']} {three_digits(c['median_ms'])} ms" for c in _measured(workload))
        for workloads in panels.values()
        for workload in workloads
    )
    texts = tuple(text for _, of_panel, _ in drawn for text in of_panel)
    return Picture(size, size, paths, "Median ms, log scale", words, texts)


def _draw(
    left: int, title: str, workloads: Sequence[_Workload], scale: tuple[int, int]
) -> tuple[dict[str, str], list[PictureText], int]:
    """Return the paths and texts of a panel, and its height.

    `scale`: The powers of ten at its ends.
    """
    low, high = scale
    decade = _BARS / (high - low)
    texts: list[PictureText] = [(left + 14, 18, "title", f"{title}: median ms (log)")]
    paths, y = {"grid": "", "ours": "", "peer": ""}, _TOP
    for workload in workloads:
        texts.append((left + 14, y + 11, "head", workload["name"]))
        y += _ROW + 2
        for candidate in _measured(workload):
            long = round((math.log10(candidate["median_ms"]) - low) * decade, 1)
            kind = "ours" if candidate["role"] == "ours" else "peer"
            paths[kind] += rectangle(left + 14, y + 2, max(long, 1), _ROW - 4)
            says = f"{three_digits(candidate['median_ms'])} {candidate['name']}"
            texts.append((left + 18 + long, y + 11, kind + "-name", says))
            y += _ROW
        y += 6
    for power in range(low, high + 1, -(-(high - low) // 8)):
        x = round(left + 14 + (power - low) * decade, 1)
        paths["grid"] += f"M{x:g} {_TOP - 4}V{y}"
        texts.append((x, _TOP - 8, "scale", f"{10.0**power:g}"))
    return paths, texts, y
