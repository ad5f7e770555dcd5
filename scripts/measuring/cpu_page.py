"""Table of the worst errors of models on emulated processors, as markdown, and its JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attn_export.report.data import finite
from attn_export.report.tables import UNMEASURED, markdown_table, matrix, shown
from attn_export.results import Report

Cells = dict[str, dict[str, Any]]
"""Cells of a model by runtime: `colour`, `text`, `reason`, `worst`, `cases`, `host`."""


def cells_of(report: Report, host: str) -> Cells:
    """Return the cell of each runtime of a report on one graph.

    Args:
        report: The report.
        host: The processor of the machine that it was made on.
    """
    cells: Cells = {}
    for (runtime, _), cell in matrix(report).cells.items():
        cases = {verdict.case for verdict in report.verdicts if verdict.runtime == runtime}
        figures = {"worst": None if cell.worst is None else finite(cell.worst), "cases": len(cases)}
        cells[runtime] = dataclasses.asdict(cell) | figures | {"host": host}
    return cells


def read_cells(path: Path, versions: Mapping[str, str]) -> dict[str, Cells]:
    """Return the cells of a file by model, or {} if it is missing or of other versions.

    Args:
        path: The file.
        versions: The versions of the packages in use.
    """
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if content.get("versions") != dict(versions):
        return {}
    models: dict[str, Cells] = content["models"]
    return models


def cpu_page(models: Mapping[str, Cells], left_out: Iterable[str], when: str) -> str:
    """Return the table, with the reasons for all cells that are not green.

    Args:
        models: Cells by model.
        left_out: Models that were not run.
        when: The date.
    """
    runtimes = list(dict.fromkeys(name for cells in models.values() for name in cells))
    reasons = [
        f"- {model}, {name}: {cell['reason']}"
        for model, cells in models.items()
        for name, cell in cells.items()
        if cell["reason"]
    ]
    out = sorted(left_out)
    return "\n".join(
        [
            "# Every model on other processors",
            "",
            "The worst error of any output in any case, as a share of the tolerance: the",
            "`standard` graph in ONNX Runtime, on a host and on emulated processors.",
            "",
            *(f"- Host {host}: {', '.join(names)}" for host, names in _hosts(models).items()),
            "",
            *markdown_table(
                ("model", "cases", *runtimes),
                (_row(model, models[model], runtimes) for model in sorted(models)),
            ),
            "",
            f"{len(models)} models, {when}.",
            "",
            *([f"Not run: {', '.join(out)}.", ""] if out else []),
            *(["## What did not pass", "", *reasons, ""] if reasons else []),
        ]
    )


def _hosts(models: Mapping[str, Cells]) -> dict[str, list[str]]:
    """Return the models of which at least one cell was run on each host."""
    hosts: dict[str, list[str]] = {}
    for model in sorted(models):
        for host in sorted({cell["host"] for cell in models[model].values()}):
            hosts.setdefault(host, []).append(model)
    return hosts


def _row(model: str, cells: Cells, runtimes: Iterable[str]) -> tuple[object, ...]:
    count = max(cell["cases"] for cell in cells.values())
    texts = (_text(cells[name]) if name in cells else UNMEASURED for name in runtimes)
    return model, count, *texts


def _text(cell: Mapping[str, Any]) -> str:
    return shown(cell["worst"], ".2f") if cell["colour"] == "green" else f"**{cell['text']}**"
