"""Tables and figures of all reports: one model for the terminal, for markdown and for pages.

Summaries of a runtime with a graph, which most of the tables are about, are here too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from attn_export.dialect_names import STANDARD
from attn_export.errors import counted
from attn_export.results import Report, RuntimeRun, Verdict

if TYPE_CHECKING:
    from attn_export.bench.measurements import Measured

# -- tables -------------------------------------------------------------------------------------

Style = Literal["", "bold", "dim", "green", "red", "yellow"]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        right: Whether its cells are aligned to the right, as figures are.
        width: The number of characters of a column that is folded; None for one that never is.
        wraps: Whether a cell may be broken between words where the terminal is narrow.
    """

    name: str
    right: bool = False
    width: int | None = None
    wraps: bool = False


@dataclasses.dataclass(frozen=True)
class Styled:
    """The text of a cell with the style that it has in the terminal."""

    text: str
    style: Style = ""


Row = Sequence[str | Styled]


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns and rows of plain text: each renderer escapes what it shows.

    Attributes:
        columns: The columns.
        rows: For each row a cell of every column.
        gap: The number of spaces between two columns in the terminal.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    gap: int = 2


def markdown_table(columns: Iterable[str | Column], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table in markdown.

    Args:
        columns: The headings, as markdown; of a `Column` its alignment as well.
        rows: For each row its cells, as markdown.
    """
    known = [Column(each) if isinstance(each, str) else each for each in columns]
    rules = ("---:" if column.right else "---" for column in known)
    lines = [_line(column.name for column in known), f"|{'|'.join(rules)}|"]
    return lines + [_line(row) for row in rows]


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


# -- figures ------------------------------------------------------------------------------------

UNMEASURED = "–"  # noqa: RUF001 (a dash is what it is)


def shown(figure: float | None, digits: str) -> str:
    """Return a figure as text: what was not measured is a dash, and NaN is NaN.

    Args:
        figure: As `largest` gives it.
        digits: The format of a finite one: ``".3g"``.
    """
    if figure is None:
        return UNMEASURED
    return "NaN" if math.isnan(figure) else f"{figure:{digits}}"


def shown_share(figure: float | None) -> str:
    """Return an error over the error allowed as text, in a column of such."""
    return shown(figure, ".3f" if figure is None or figure < 1000 else ".1e")


def three_digits(value: float) -> str:
    """Format a number with about three digits, without an exponent; NaN is a dash."""
    if not math.isfinite(value):
        return UNMEASURED
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 4)}f}"


def in_ms(m: Measured | None) -> str:
    """Format the median in milliseconds with three digits, or a dash."""
    return UNMEASURED if m is None or not m.ran else three_digits(m.median * 1e3)


def in_mib(size: int | None) -> str:
    """Format bytes as MiB, or a dash."""
    return UNMEASURED if size is None else f"{size / 2**20:.0f}"


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
