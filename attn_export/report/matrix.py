"""Runtime × graph: the worst error of each as a share of what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Literal

from attn_export.report.summary import UNMEASURED, Summary, shown_share, summaries
from attn_export.results import Report

Colour = Literal["green", "red", "grey"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One runtime with one graph.

    Attributes:
        text: The worst error as a share of what is allowed; how it failed; a dash for
            what was not run or not measured.
        reason: Why it is not green; empty where it is.
        worst: The error of the text, if there is one.
    """

    colour: Colour
    text: str
    reason: str
    worst: float | None = None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """All of them, in the order of the report."""

    runtimes: tuple[str, ...]
    graphs: tuple[str, ...]
    cells: dict[tuple[str, str], Cell]

    def reasons(self, *colours: Colour) -> dict[str, list[str]]:
        """Return the graphs by runtime and reason, in the order of the report.

        Args:
            colours: The colours of the cells; all but green by default.
        """
        found: dict[str, list[str]] = {}
        for (runtime, graph), cell in self.cells.items():
            if cell.colour in (colours or ("red", "grey")):
                found.setdefault(f"{runtime}: {cell.reason}", []).append(graph)
        return found


def matrix(report: Report) -> Matrix:
    """Return the matrix of a report."""
    found = summaries(report)
    return Matrix(
        tuple(dict.fromkeys(s.run.runtime for s in found)),
        tuple(dict.fromkeys(form_name(s.run.graph) for s in found)),
        {(s.run.runtime, form_name(s.run.graph)): _cell(s) for s in found},
    )


def form_name(graph: str) -> str:
    """Return the column name of a graph: ``ort.decode`` for ``model.ort.decode.onnx``."""
    if not graph.startswith("model.") or not graph.endswith("onnx"):
        return graph
    return graph.removeprefix("model.").removesuffix("onnx").strip(".") or "standard"


def _cell(summary: Summary) -> Cell:
    run = summary.run
    if run.outcome == "not run":
        return Cell("red" if run.required else "grey", UNMEASURED, run.reason)
    if run.outcome != "ran":
        return Cell("red", run.outcome, run.reason)
    share = shown_share(summary.worst)
    if summary.passed == summary.cases:
        return Cell("green", share, "", summary.worst)
    failed = summary.cases - summary.passed
    return Cell("red", f"FAILED {share}", f"{failed} cases failed", summary.worst)
