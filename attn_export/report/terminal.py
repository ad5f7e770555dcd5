"""A report in the terminal: 80 columns, plain where it is piped."""

from __future__ import annotations

import io
import re

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid
from rich.text import Text

from attn_export.errors import PARAGRAPH, printable
from attn_export.quality import Quality
from attn_export.report.tables import (
    Cell,
    Column,
    Matrix,
    Styled,
    Summary,
    Table,
    form_name,
    matrix,
    problems,
    summaries,
    summary_table,
)
from attn_export.results import Report

# -- lines and tables of all reports ------------------------------------------------------------

WIDEST = 1000
"""The most columns of a table."""


def as_text(foreign: object) -> str:
    """Return markup that shows a foreign text as it is, with escapes for what is not printable."""
    return escape(printable(foreign, PARAGRAPH))


def say(line: str, console: Console) -> None:
    """Print a line of markup.

    Args:
        line: The markup; foreign texts went through `as_text`.
        console: The console to print on.
    """
    # Broken between words for eyes, never within names; in a file each message is on one line.
    text = Text.from_markup(line)
    parts = text.divide(_breaks(text.plain, console.width)) if console.is_terminal else [text]
    for part in parts:
        part.rstrip()
        console.print(part, highlight=False, soft_wrap=True)


def _breaks(text: str, width: int) -> list[int]:
    """Return the offsets of the words that begin a new line of at most so many columns."""
    found, start = [], 0
    for word in re.finditer(r"\S+", text):
        if word.end() - start > width and word.start() > start:
            start = word.start()
            found.append(start)
    return found


def print_table(table: Table, console: Console, header: str = "") -> None:
    """Print a table, wider than the console where names are long: they are copied from it.

    Args:
        table: The table.
        console: The console.
        header: The style of its headings; rich's own by default.
    """
    shown = Grid(
        box=None,
        pad_edge=False,
        padding=(0, table.gap, 0, 0),
        header_style=header or "table.header",
    )
    for column in table.columns:
        shown.add_column(
            as_text(column.name), justify="right" if column.right else "left",
            width=column.width, no_wrap=not column.wraps and column.width is None,
            overflow="fold" if column.width else "ellipsis",
        )  # fmt: skip
    for row in table.rows:
        shown.add_row(*map(_markup, row))
    if any(column.wraps or column.width for column in table.columns):
        console.print(shown, highlight=False)
        return
    unbounded = console.options.update(max_width=WIDEST)
    if console.measure(shown, options=unbounded).maximum > console.width:
        shown.padding = (0, 1, 0, 0)
    before = console.width
    console.width = max(before, console.measure(shown, options=unbounded).maximum)
    console.print(shown, highlight=False)
    console.width = before


def _markup(cell: str | Styled) -> str:
    if isinstance(cell, str):
        return as_text(cell)
    return f"[{cell.style}]{as_text(cell.text)}[/]" if cell.style else as_text(cell.text)


# -- A report in the terminal: 80 columns, plain where it is piped ------------------------------

QUALITY = (
    Column("part"), Column("SQNR dB", right=True), Column("cosine", right=True),
    Column("worst row", right=True),
)  # fmt: skip

FEW = 2
"""More runtimes than that are shown as a matrix."""

SHOWN = 8
"""Number of failed verdicts that are written out; the rest is in report.json."""


def print_report(report: Report, console: Console, option: str = "--json FILE") -> None:
    """Print the table, what failed, the notes and the verdict.

    Args:
        report: The report.
        console: The console to print on.
        option: The option that shows the whole report.
    """
    for sentence in report.explanations:
        say(f"why: {as_text(sentence)}", console)
    found = summaries(report)
    ran = [summary for summary in found if summary.cases]
    few = len({summary.run.runtime for summary in ran}) <= FEW
    if not few:
        _print_matrix(matrix(report), console)
    else:
        if ran:
            print_table(summary_table(ran), console)
        # The same reason holds for all graphs.
        for line in dict.fromkeys(_not_ran(s) for s in found if s.run.required and not s.ran):
            say(line, console)
    if report.quality is not None:
        _print_quality(report.quality, console)
    # What a whole run failed of is said once, above.
    said = {run.reason for run in report.runs if run.outcome != "ran"}
    failed = [verdict for verdict in problems(report) if verdict.message not in said]
    for verdict in failed[:SHOWN]:
        form = form_name(verdict.graph)
        where = f"{verdict.runtime} {form} {verdict.case} {verdict.output}".strip()
        say(f"[red]{verdict.status}[/] {as_text(where)}: {as_text(verdict.message)}", console)
    if len(failed) > SHOWN:
        say(f"… and {len(failed) - SHOWN} more; {option} has all", console)
    _print_notes(report, console)
    # Nobody asked for these: a line each at the end.
    optional = (s for s in found if few and not s.run.required and not s.ran)
    for line in dict.fromkeys(_not_ran(summary) for summary in optional):
        say(line, console)
    verdict_line = "[green]passed[/]" if report.passed else f"[red]failed[/] ({report.exit_code})"
    say(f"{as_text(report.name)}: {verdict_line}", console)


def _print_notes(report: Report, console: Console) -> None:
    if report.signature is not None:
        say(f"signature: {as_text(report.signature)}", console)
    for note in report.notes:
        say(f"note: {as_text(note)}", console)


def to_text(report: Report, option: str) -> str:
    """Return the plain text of `print_report`, 100 columns wide, without trailing spaces.

    Args:
        report: The report.
        option: The option that shows the whole report.
    """
    out = io.StringIO()
    print_report(report, Console(file=out, width=100, color_system=None), option)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _print_matrix(found: Matrix, console: Console) -> None:
    say("worst error / allowed", console)
    # Where most failed, FAILED stands above its figure.
    columns = (Column(graph, right=True, wraps=True) for graph in found.graphs)
    rows = (
        (runtime, *(_coloured(found.cells.get((runtime, graph))) for graph in found.graphs))
        for runtime in found.runtimes
    )
    print_table(Table((Column("runtime"), *columns), tuple(rows)), console)
    for reason, graphs in found.reasons().items():
        say(f"{as_text(reason)} ({as_text(', '.join(graphs))})", console)


def _coloured(cell: Cell | None) -> str | Styled:
    if cell is None:
        return ""
    return Styled(cell.text, "dim" if cell.colour == "grey" else cell.colour)


def _print_quality(quality: Quality, console: Console) -> None:
    """Print the distances of a quantised model from the model in float, apart from the verdicts."""
    budgets = ", ".join(map(str, quality.budgets)) or "none"
    say(f"quantised against float weights, budget {as_text(budgets)}", console)
    rows = (
        (f"{title}{each.part}", f"{each.sqnr:.1f}", f"{each.cosine:.6f}", f"{each.row:.1e}")
        for title, each in quality.shown()
    )
    print_table(Table(QUALITY, tuple(rows)), console)
    if quality.logits:
        say(as_text(quality.logits_sentence), console)
    for sentence in quality.missed:
        say(f"[red]beyond the budget[/] {as_text(sentence)}", console)


def _not_ran(summary: Summary) -> str:
    color = "red" if summary.run.required else "yellow"
    run = summary.run
    return f"{run.runtime} [{color}]{run.outcome}[/]: {as_text(run.reason)}"
