"""Matrix of runtimes and graphs over all models, as markdown and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from attn_export.report.data import finite
from attn_export.report.tables import UNMEASURED, MatrixCell, markdown_table, matrix, shown
from attn_export.results import Report
from attn_export.runtimes.catalogue import all_names


@dataclasses.dataclass
class _Sum:
    """Cells of one runtime and graph, by the name of the model."""

    cells: dict[str, MatrixCell] = dataclasses.field(default_factory=dict)

    def text(self) -> str:
        green = [cell for cell in self.cells.values() if cell.colour == "green"]
        red = [name for name, cell in self.cells.items() if cell.colour == "red"]
        if red:
            return f"**FAILED** ({', '.join(red)})"
        if not green:
            return UNMEASURED
        worst = max((cell.worst for cell in green if cell.worst is not None), default=None)
        return f"{shown(worst, '.2f')} ({len(green)}/{len(self.cells)})"


def matrix_block(reports: Sequence[Report], when: str) -> str:
    """Return the matrix: the worst error over the tolerance, by runtime and graph.

    Args:
        reports: The report of each model.
        when: The date.
    """
    sums, forms, versions = _sums(reports)
    order = all_names()
    runtimes = sorted({runtime for runtime, _ in sums}, key=order.index)
    rows = (
        (
            runtime,
            versions.get(runtime, UNMEASURED),
            *(sums.get((runtime, form), _Sum()).text() for form in forms),
        )
        for runtime in runtimes
    )
    lines = markdown_table(("runtime", "version", *forms), rows)
    return "\n".join([*lines, "", f"{len(reports)} models, {when}. `scripts/matrix` repeats it."])


def matrix_page(reports: Sequence[Report], left_out: Iterable[str], when: str) -> str:
    """Return the matrix, with the reasons for all cells that are not green.

    Args:
        reports: The report of each model.
        left_out: Models that were not built.
        when: The date.
    """
    sums, _, _ = _sums(reports)
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for (runtime, form), summed in sums.items():
        for model, cell in summed.cells.items():
            if cell.reason:
                reasons.setdefault((runtime, form, cell.reason), []).append(model)
    rows = (
        (runtime, form, reason, _models(models, len(reports)))
        for (runtime, form, reason), models in reasons.items()
    )
    out = sorted(left_out)
    return "\n".join(
        [
            "# Every runtime with every graph",
            "",
            "The worst error of any output in any case, as a share of the tolerance, and in how",
            "many of the models that have the graph.",
            "",
            matrix_block(reports, when),
            "",
            *([f"Left out of this run: {', '.join(out)}.", ""] if out else []),
            "## What is not run, and why",
            "",
            *markdown_table(("runtime", "graph", "reason", "models"), rows),
            "",
        ]
    )


def matrix_to_dict(reports: Sequence[Report], when: str) -> dict[str, Any]:
    """Return every cell of every model.

    Args:
        reports: One report for each model.
        when: The date.
    """
    return {
        "date": when,
        "models": {
            report.name: [
                {
                    "runtime": runtime,
                    "form": form,
                    **dataclasses.asdict(cell),
                    "worst": None if cell.worst is None else finite(cell.worst),
                }
                for (runtime, form), cell in matrix(report).cells.items()
            ]
            for report in reports
        },
    }


def _sums(
    reports: Sequence[Report],
) -> tuple[dict[tuple[str, str], _Sum], list[str], dict[str, str]]:
    sums: dict[tuple[str, str], _Sum] = {}
    versions: dict[str, str] = {}
    for report in reports:
        for key, cell in matrix(report).cells.items():
            sums.setdefault(key, _Sum()).cells[report.name] = cell
        for run in report.runs:
            version = run.facts.get("version")
            if version:
                versions[run.runtime] = str(version)
    forms = list(dict.fromkeys(form for _, form in sums))
    return sums, forms, versions


def _models(models: Sequence[str], total: int) -> str:
    return "all" if len(models) == total else ", ".join(models)
