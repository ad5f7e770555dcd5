"""Runtime × graph: the worst error of each as a share of what is allowed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from attn_export.dialect_names import STANDARD
from attn_export.errors import counted
from attn_export.report.tables import UNMEASURED, Column, Row, Styled, Table, shown, shown_share
from attn_export.results import Report, RuntimeRun, Verdict

# -- summary of one runtime with one graph, in a few figures ------------------------------------


@dataclasses.dataclass(frozen=True)
class Summary:
    """One row of the table.

    Attributes:
        cases: The number of cases tried.
        passed: The number of them that passed with every output.
        worst: The largest error as a share of what is allowed, as `largest` has it.
        max_abs: The largest absolute difference from eager, likewise.
        max_rel: The largest relative difference from eager, likewise.
    """

    run: RuntimeRun
    cases: int
    passed: int
    worst: float | None
    max_abs: float | None
    max_rel: float | None

    @property
    def ran(self) -> bool:
        """Return whether it ran to its end."""
        return self.run.outcome == "ran"


def summaries(report: Report) -> list[Summary]:
    """Return one summary for each runtime and graph."""
    return [_summary(run, verdicts_by_case(report, run)) for run in report.runs]


def problems(report: Report) -> list[Verdict]:
    """Return the verdicts that did not pass."""
    return [verdict for verdict in report.verdicts if verdict.status != "passed"]


def verdicts_by_case(report: Report, run: RuntimeRun) -> dict[str, list[Verdict]]:
    """Return the verdicts of one runtime and graph, by case.

    Args:
        report: The report.
        run: The runtime and graph.
    """
    found: dict[str, list[Verdict]] = {}
    for verdict in report.verdicts:
        if (verdict.runtime, verdict.graph) == (run.runtime, run.graph):
            found.setdefault(verdict.case, []).append(verdict)
    return found


def _summary(run: RuntimeRun, by_case: dict[str, list[Verdict]]) -> Summary:
    verdicts = [verdict for of_case in by_case.values() for verdict in of_case]
    return Summary(
        run,
        cases=len(by_case),
        passed=sum(all(v.status == "passed" for v in of_case) for of_case in by_case.values()),
        worst=largest(verdicts, "worst"),
        max_abs=largest(verdicts, "max_abs"),
        max_rel=largest(verdicts, "max_rel"),
    )


def largest(verdicts: Sequence[Verdict], figure: str) -> float | None:
    """Return the largest figure of some verdicts; NaN where one is NaN.

    None where none was measured. It is not that of what passed where all that failed has none.

    Args:
        verdicts: The verdicts to consider.
        figure: The name of a field of them: ``"worst"``.
    """
    wrong = [verdict for verdict in verdicts if verdict.status != "passed"]
    of_wrong, of_all = (
        [float(value) for verdict in some if (value := getattr(verdict, figure)) is not None]
        for some in (wrong or verdicts, verdicts)
    )
    if not of_wrong:
        return None
    return max(of_all, key=lambda value: (math.isnan(value), value))


SUMMARY = (
    Column("runtime"), Column("graph"), Column("passed", right=True),
    Column("error/allowed", right=True), Column("max abs", right=True),
    Column("max rel", right=True), Column(""),
)  # fmt: skip


def summary_table(ran: Sequence[Summary]) -> Table:
    """Return a row of figures for each runtime and graph that ran."""
    return Table(SUMMARY, tuple(_row(summary) for summary in ran))


def _row(summary: Summary) -> Row:
    good = summary.passed == summary.cases
    return (
        summary.run.runtime,
        summary.run.graph,
        Styled(f"{summary.passed}/{summary.cases}", "green" if good else "red"),
        shown_share(summary.worst),
        shown(summary.max_abs, ".1e"),
        shown(summary.max_rel, ".1e"),
        Styled("" if good else "FAILED", "red"),
    )


# -- runtime × graph: the worst error of each as a share of what is allowed ---------------------


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
    return graph.removeprefix("model.").removesuffix("onnx").strip(".") or STANDARD


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
    return Cell("red", f"FAILED {share}", f"{counted(failed, 'case')} failed", summary.worst)
