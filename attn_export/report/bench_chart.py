"""Medians as a chart: a group of bars for each contest, on a logarithmic scale."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.bench.measurements import Contest
from attn_export.errors import OutputError, UsageError
from attn_export.output_folder import check_utf8, write_whole
from attn_export.system_info import check_installed

ENDINGS = (".svg", ".png")
OURS_COLORS = ("#c8372d", "#e8853a", "#8c1d40", "#f2b134")
PEER_COLORS = ("#9aa5b1", "#6b7a89", "#475569", "#b7c9c3", "#7d9d9c", "#c9c3d6")


def check_chart_file(file: Path | str) -> None:
    """Refuse early a chart that could not be drawn later.

    Raises:
        UsageError: If it ends with something else than .svg or .png, or matplotlib is missing.
        OutputError: If there is no such folder.
    """
    path = Path(file)
    check_utf8(path)
    if path.suffix not in ENDINGS:
        raise UsageError(f"{path} is to be a chart; end its name with {' or '.join(ENDINGS)}")
    check_installed("matplotlib")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no such folder")


def write_chart(panels: Mapping[str, Sequence[Contest]], file: Path | str) -> None:
    """Draw the median of every candidate but the rooflines.

    Args:
        panels: Contests by the title of the panel that they are in; panels are stacked.
        file: SVG or PNG, by its ending.

    Raises:
        UsageError: If the ending is another one.
        OutputError: If the file cannot be written.
    """
    check_chart_file(file)
    import matplotlib
    from matplotlib.figure import Figure

    # The same numbers give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "attn-export", "font.size": 8}):
        widest = max((len(contests) for contests in panels.values()), default=1)
        figure = Figure(
            figsize=(max(6.0, 1.2 * widest + 3), 3.6 * len(panels)), layout="constrained"
        )
        all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        colors = _colors([c for contests in panels.values() for c in contests])
        for axes, (title, contests) in zip(all_axes, panels.items(), strict=True):
            _draw(axes, title, contests, colors)
        metadata = {"Date": None} if Path(file).suffix == ".svg" else {}
        try:
            image = io.BytesIO()
            figure.savefig(image, format=Path(file).suffix[1:], dpi=150, metadata=metadata)
            write_whole(Path(file), image.getvalue())
        except OSError as error:
            raise OutputError(f"cannot write {file}: {error.strerror or error}") from error


def _colors(contests: Sequence[Contest]) -> dict[str, str]:
    """Return warm colours for ours, cool ones for peers."""
    found: dict[str, str] = {}
    for role, palette in (("ours", OURS_COLORS), ("peer", PEER_COLORS)):
        names = dict.fromkeys(m.name for c in contests for m in c.measured if m.role == role)
        for number, name in enumerate(names):
            found[name] = palette[number % len(palette)]
    return found


def _draw(axes: Any, title: str, contests: Sequence[Contest], colors: Mapping[str, str]) -> None:
    names = [n for n in colors if any(c.named(n) for c in contests)]
    width = 0.8 / max(len(names), 1)
    for number, name in enumerate(names):
        bars = [(place, c.named(name)) for place, c in enumerate(contests)]
        shown = [(place, m.median * 1e3) for place, m in bars if m is not None]
        axes.bar(
            [place + (number - (len(names) - 1) / 2) * width for place, _ in shown],
            [ms for _, ms in shown],
            width,
            label=name,
            color=colors[name],
        )
    axes.set_yscale("log")
    axes.set_ylabel("median ms (log)")
    axes.set_title(title)
    axes.set_xticks(range(len(contests)), [c.name.replace(", ", "\n") for c in contests])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if names:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
