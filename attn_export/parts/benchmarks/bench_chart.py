"""Bar chart of a benchmark's medians, grouped by workload, on a logarithmic scale."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import OutputError, UsageError
from attn_export.output_folder import check_utf8, write_errors, write_whole
from attn_export.parts.benchmarks.measurements import WorkloadResult
from attn_export.system_info import check_installed

_ENDINGS = (".svg", ".png")
_OUR_COLOURS = ("#c8372d", "#e8853a", "#8c1d40", "#f2b134")
_PEER_COLOURS = ("#9aa5b1", "#6b7a89", "#475569", "#b7c9c3", "#7d9d9c", "#c9c3d6")


def check_chart_file(file: Path | str) -> None:
    """Check before a benchmark that its chart can be written afterwards."""
    path = Path(file)
    check_utf8(path)
    if path.suffix not in _ENDINGS:
        raise UsageError(f"{path} is to be a chart; end its name with {' or '.join(_ENDINGS)}")
    check_installed("matplotlib")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no such folder")


def write_chart(panels: Mapping[str, Sequence[WorkloadResult]], file: Path | str) -> None:
    """Draw the medians of all candidates except rooflines."""
    check_chart_file(file)
    import matplotlib
    from matplotlib.figure import Figure

    # The salt makes the identifiers in an SVG file, and so the file, reproducible.
    with matplotlib.rc_context({"svg.hashsalt": "attn-export", "font.size": 8}):
        widest = max((len(workloads) for workloads in panels.values()), default=1)
        figure = Figure(
            figsize=(max(6.0, 1.2 * widest + 3), 3.6 * len(panels)), layout="constrained"
        )
        all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        colours = _colours([workload for workloads in panels.values() for workload in workloads])
        for axes, (title, workloads) in zip(all_axes, panels.items(), strict=True):
            _draw(axes, title, workloads, colours)
        metadata = {"Date": None} if Path(file).suffix == ".svg" else {}
        with write_errors(file):
            image = io.BytesIO()
            figure.savefig(image, format=Path(file).suffix[1:], dpi=150, metadata=metadata)
            write_whole(Path(file), image.getvalue())


def _colours(workloads: Sequence[WorkloadResult]) -> dict[str, str]:
    """Return a colour for each candidate: warm ones for our graphs, cool ones for peers."""
    colours: dict[str, str] = {}
    for role, palette in (("ours", _OUR_COLOURS), ("peer", _PEER_COLOURS)):
        measured = (candidate for workload in workloads for candidate in workload.measured)
        names = dict.fromkeys(m.name for m in measured if m.role == role)
        for number, name in enumerate(names):
            colours[name] = palette[number % len(palette)]
    return colours


def _draw(
    axes: Any, title: str, workloads: Sequence[WorkloadResult], colours: Mapping[str, str]
) -> None:
    names = [name for name in colours if any(workload.named(name) for workload in workloads)]
    width = 0.8 / max(len(names), 1)
    for number, name in enumerate(names):
        measured = [(position, load.named(name)) for position, load in enumerate(workloads)]
        bars = [(position, m.median * 1e3) for position, m in measured if m is not None]
        axes.bar(
            [position + (number - (len(names) - 1) / 2) * width for position, _ in bars],
            [ms for _, ms in bars],
            width,
            label=name,
            color=colours[name],
        )
    axes.set_yscale("log")
    axes.set_ylabel("median ms (log)")
    axes.set_title(title)
    axes.set_xticks(range(len(workloads)), [load.name.replace(", ", "\n") for load in workloads])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if names:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
