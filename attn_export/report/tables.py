"""Model of the tables in reports, which the terminal, markdown and HTML render.

It includes figures as text, and the summary of a runtime with a graph.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from attn_export.dialect_names import STANDARD
from attn_export.errors import counted
from attn_export.results import Report, RuntimeRun, Verdict

# -- tables -------------------------------------------------------------------------------------

Style = Literal["", "bold", "dim", "green", "red", "yellow"]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: The head, in one or more lines.
        right: Whether cells are aligned to the right, as for figures.
        width: The fixed width in characters, at which cells are folded; None: as wide as needed.
        wraps: Whether cells may be broken between words in a narrow terminal.
    """

    name: str
    right: bool = False
    width: int | None = None
    wraps: bool = False


@dataclasses.dataclass(frozen=True)
class Styled:
    """The text of a cell and its style in the terminal."""

    text: str
    style: Style = ""


_TableRow = Sequence[str | Styled]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of plain text, which renderers must escape.

    Attributes:
        rows: The rows, each with a cell for every column.
        gap: The number of spaces between two columns in the terminal.
    """

    columns: tuple[Column, ...]
    rows: tuple[_TableRow, ...]
    gap: int = 2


def markdown_table(columns: Iterable[str | Column], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table in markdown."""
    as_columns = [Column(col) if isinstance(col, str) else col for col in columns]
    rules = ("---:" if column.right else "---" for column in as_columns)
    lines = [_line(column.name.replace("\n", " ") for column in as_columns), f"|{'|'.join(rules)}|"]
    return lines + [_line(row) for row in rows]


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


# -- figures ------------------------------------------------------------------------------------

UNMEASURED = "–"  # noqa: RUF001 (a dash is meant)


def shown(figure: float | None, digits: str) -> str:
    """Return a figure as text: a dash if it was not measured, ``NaN`` for NaN."""
    if figure is None:
        return UNMEASURED
    return "NaN" if math.isnan(figure) else f"{figure:{digits}}"


def shown_share(figure: float | None) -> str:
    """Format an error divided by the tolerance, as text of a table's column."""
    return shown(figure, ".3f" if figure is None or figure < 1000 else ".1e")


def in_mib(size: int | None) -> str:
    """Format bytes as MiB, or a dash."""
    return UNMEASURED if size is None else f"{size / 2**20:.0f}"


# -- summary of one runtime with one graph ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Summary:
    """Summary of the verdicts on one runtime with one graph.

    Attributes:
        passed: The number of cases of which every output passed.
        worst: The largest error divided by the tolerance, from `largest`.
        max_abs: The largest absolute difference from eager, from `largest`.
        max_rel: The largest relative difference from eager, from `largest`.
    """

    run: RuntimeRun
    cases: int
    passed: int
    worst: float | None
    max_abs: float | None
    max_rel: float | None

    @property
    def ran(self) -> bool:
        """Return whether the run was complete."""
        return self.run.outcome == "ran"


def summaries(report: Report) -> list[Summary]:
    """Return one summary for each runtime and graph."""
    return [_summary(run, verdicts_by_case(report, run)) for run in report.runs]


def reproduce_command(folder: Path | None) -> str:
    """Return the command that repeats a failure, or "" if no folder for it was written."""
    if folder is None:
        return ""
    from attn_export.code_templates import shell

    return f"python {shell(str(folder / 'reproduce.py'))}"


def verdicts_by_case(report: Report, run: RuntimeRun) -> dict[str, list[Verdict]]:
    """Return the verdicts of one runtime and graph, by case."""
    by_case: dict[str, list[Verdict]] = {}
    for verdict in report.verdicts:
        if (verdict.runtime, verdict.graph) == (run.runtime, run.graph):
            by_case.setdefault(verdict.case, []).append(verdict)
    return by_case


_PHASE = re.compile(r"(_L?\d+)+$|(?<=changed)[_.].*")
"""Pattern of what names of cases have behind that of a phase: sizes, and an input that changed."""

_SIZE = re.compile(r"_([^\W\d_]+)(\d+)(?=_|$)")
"""Pattern of the size of an axis in the name of a case of a layer or a module: ``_P17``."""


def phase_of(case: str) -> str:
    """Return the phase that cases have in common; "" for those of a layer without a past."""
    sizes = dict(_SIZE.findall(case))
    if sizes.keys() <= {"L"}:
        phase = _PHASE.sub("", case)
        return "special" if phase == case else phase
    if int(sizes.get("P", 0)) == 0:
        return "prefill" if "P" in sizes else ""
    return "decode" if sizes.get("L") == "1" else "chunk"


def failure_groups(failures: Iterable[Verdict]) -> list[list[Verdict]]:
    """Return failures of a runtime, a graph and a phase together, the worst first."""
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for v in failures:
        key = (v.status, v.runtime, v.graph, phase_of(v.case))
        groups.setdefault(key, []).append(v)

    def share(verdict: Verdict) -> float:
        return -math.inf if verdict.worst is None or math.isnan(verdict.worst) else -verdict.worst

    return [sorted(group, key=share) for group in groups.values()]


def advice(report: Report) -> str:
    """Return what to do about the causes of a report."""
    said = " ".join(report.explanations)
    parts = []
    if "graph is wrong" in said:
        parts.append("correct the export at the place named above, and compare again")
    if "fusion is wrong" in said:
        parts.append("export without the fusion")
    if "graph is right" in said:
        parts.append("run another graph of the model, or another release or runtime")
    if report.reproduction is not None:
        parts.append("repeat the smallest case that fails by the command below")
    return "; ".join(parts or ["see what failed below"]) + "."


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
    """Return the largest figure of some verdicts, or NaN if one of them is NaN.

    Return None if no verdict has the figure. Return None as well if verdicts failed and none of
    those has it: a figure of verdicts that passed would be misleading there.
    """

    def values(some: Sequence[Verdict]) -> list[float]:
        fields = (getattr(verdict, figure) for verdict in some)
        return [float(value) for value in fields if value is not None]

    wrong = [verdict for verdict in verdicts if verdict.status != "passed"]
    if not values(wrong or verdicts):
        return None
    return max(values(verdicts), key=lambda value: (math.isnan(value), value))


_SUMMARY = (
    Column("runtime"), Column("graph"), Column("passed", right=True),
    Column("error /\ntolerance", right=True), Column("max abs\n(informational)", right=True),
    Column(""),
)  # fmt: skip


def summary_table(ran: Sequence[Summary]) -> Table:
    """Return a row of figures for each runtime and graph that ran."""
    return Table(_SUMMARY, tuple(_row(summary) for summary in ran))


def _row(summary: Summary) -> _TableRow:
    all_passed = summary.passed == summary.cases
    return (
        summary.run.runtime,
        summary.run.graph,
        Styled(f"{summary.passed}/{summary.cases}", "green" if all_passed else "red"),
        shown_share(summary.worst),
        shown(summary.max_abs, ".1e"),
        Styled("" if all_passed else "FAILED", "red"),
    )


# -- matrix of runtimes and graphs --------------------------------------------------------------

_Colour = Literal["green", "red", "grey"]


@dataclasses.dataclass(frozen=True)
class MatrixCell:
    """Cell of the matrix: one runtime with one graph.

    Attributes:
        colour: Green if all cases passed, grey if a runtime that is not required did not run.
        text: The worst error over the tolerance, the outcome of a run that failed, or a dash.
        reason: The reason that it is not green, or "".
        worst: The error in a green or failed cell, if there is one.
    """

    colour: _Colour
    text: str
    reason: str
    worst: float | None = None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Matrix of runtimes and graphs, in the order of the report."""

    runtimes: tuple[str, ...]
    graphs: tuple[str, ...]
    cells: dict[tuple[str, str], MatrixCell]

    def reasons(self, *colours: _Colour) -> dict[str, list[str]]:
        """Return the graphs of each ``"runtime: reason"``; by default of red and grey cells."""
        graphs: dict[str, list[str]] = {}
        for (runtime, graph), cell in self.cells.items():
            if cell.colour in (colours or ("red", "grey")):
                graphs.setdefault(f"{runtime}: {cell.reason}", []).append(graph)
        return graphs


def matrix(report: Report) -> Matrix:
    """Return the matrix of a report."""
    of_runs = summaries(report)
    return Matrix(
        tuple(dict.fromkeys(s.run.runtime for s in of_runs)),
        tuple(dict.fromkeys(graph_label(s.run.graph) for s in of_runs)),
        {(s.run.runtime, graph_label(s.run.graph)): _cell(s) for s in of_runs},
    )


def status_text(status: str) -> str:
    """Return the status of a verdict as readers see it; JSON has the name."""
    return "not compared" if status == "unusable" else status


def graph_label(graph: str) -> str:
    """Return the column name of a graph: ``ort.decode`` for ``model.ort.decode.onnx``."""
    if not graph.startswith("model.") or not graph.endswith("onnx"):
        return graph
    return graph.removeprefix("model.").removesuffix("onnx").strip(".") or STANDARD


def _cell(summary: Summary) -> MatrixCell:
    run = summary.run
    if run.outcome == "not run":
        return MatrixCell("red" if run.required else "grey", UNMEASURED, run.reason)
    if run.outcome != "ran":
        return MatrixCell("red", run.outcome, run.reason)
    share = shown_share(summary.worst)
    if summary.passed == summary.cases:
        return MatrixCell("green", share, "", summary.worst)
    failed = summary.cases - summary.passed
    return MatrixCell("red", f"FAILED {share}", f"{counted(failed, 'case')} failed", summary.worst)
