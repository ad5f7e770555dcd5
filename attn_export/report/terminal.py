"""A report in the terminal: 80 columns, plain where it is piped."""

from __future__ import annotations

import io
import re

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from attn_export.errors import PARAGRAPH, printable
from attn_export.quality import Quality
from attn_export.report.matrix import (
    Cell,
    Matrix,
    Summary,
    form_name,
    matrix,
    problems,
    shown,
    shown_share,
    summaries,
)
from attn_export.results import Report

# -- foreign text for rich's consoles and tables ------------------------------------------------


def as_text(foreign: object) -> str:
    """Return markup that shows a foreign text as it is, with escapes for what is not printable."""
    return escape(printable(foreign, PARAGRAPH))


# -- A report in the terminal: 80 columns, plain where it is piped ------------------------------


FEW = 2
"""More runtimes than that are shown as a matrix."""

WIDEST = 1000
"""The most columns of a table."""

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
        _say(f"why: {as_text(sentence)}", console)
    found = summaries(report)
    ran = [summary for summary in found if summary.cases]
    few = len({summary.run.runtime for summary in ran}) <= FEW
    if not few:
        _print_matrix(matrix(report), console)
    else:
        if ran:
            print_wide(_table(ran), console)
        # The same reason holds for all graphs.
        for line in dict.fromkeys(_not_ran(s) for s in found if s.run.required and not s.ran):
            _say(line, console)
    if report.quality is not None:
        _print_quality(report.quality, console)
    # What a whole run failed of is said once, above.
    said = {run.reason for run in report.runs if run.outcome != "ran"}
    failed = [verdict for verdict in problems(report) if verdict.message not in said]
    for verdict in failed[:SHOWN]:
        form = form_name(verdict.graph)
        where = f"{verdict.runtime} {form} {verdict.case} {verdict.output}".strip()
        _say(f"[red]{verdict.status}[/] {as_text(where)}: {as_text(verdict.message)}", console)
    if len(failed) > SHOWN:
        _say(f"… and {len(failed) - SHOWN} more; {option} has all", console)
    _print_notes(report, console)
    # Nobody asked for these: a line each at the end.
    optional = (s for s in found if few and not s.run.required and not s.ran)
    for line in dict.fromkeys(_not_ran(summary) for summary in optional):
        _say(line, console)
    verdict_line = "[green]passed[/]" if report.passed else f"[red]failed[/] ({report.exit_code})"
    _say(f"{as_text(report.name)}: {verdict_line}", console)


def _print_notes(report: Report, console: Console) -> None:
    if report.signature is not None:
        _say(f"signature: {as_text(report.signature)}", console)
    for note in report.notes:
        _say(f"note: {as_text(note)}", console)


def to_text(report: Report, option: str) -> str:
    """Return the plain text of `print_report`, 100 columns wide, without trailing spaces.

    Args:
        report: The report.
        option: The option that shows the whole report.
    """
    out = io.StringIO()
    print_report(report, Console(file=out, width=100, color_system=None), option)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _say(line: str, console: Console) -> None:
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


def _print_matrix(found: Matrix, console: Console) -> None:
    _say("worst error / allowed", console)
    table = _empty_table(
        ("runtime", "left"), *((as_text(graph), "right") for graph in found.graphs)
    )
    for column in table.columns[1:]:
        column.no_wrap = False  # where most failed, FAILED stands above its figure
    for runtime in found.runtimes:
        cells = (found.cells.get((runtime, graph)) for graph in found.graphs)
        table.add_row(runtime, *(_coloured(cell) for cell in cells))
    console.print(table)
    for reason, graphs in found.reasons().items():
        _say(f"{as_text(reason)} ({as_text(', '.join(graphs))})", console)


def _coloured(cell: Cell | None) -> str:
    if cell is None:
        return ""
    style = {"green": "green", "red": "red", "grey": "dim"}[cell.colour]
    return f"[{style}]{cell.text}[/]"


def _table(ran: list[Summary]) -> Table:
    table = _empty_table(
        ("runtime", "left"), ("graph", "left"), ("passed", "right"),
        ("error/allowed", "right"), ("max abs", "right"), ("max rel", "right"), ("", "left"),
    )  # fmt: skip
    for summary in ran:
        table.add_row(*_row(summary))
    return table


def _print_quality(quality: Quality, console: Console) -> None:
    """Print the distances of a quantised model from the model in float, apart from the verdicts."""
    budgets = ", ".join(map(str, quality.budgets)) or "none"
    _say(f"quantised against float weights, budget {as_text(budgets)}", console)
    table = _empty_table(
        ("part", "left"), ("SQNR dB", "right"), ("cosine", "right"), ("worst row", "right")
    )
    for title, each in quality.shown():
        figures = f"{each.sqnr:.1f}", f"{each.cosine:.6f}", f"{each.row:.1e}"
        table.add_row(as_text(f"{title}{each.part}"), *figures)
    console.print(table)
    if quality.logits:
        _say(as_text(quality.logits_sentence), console)
    for sentence in quality.missed:
        _say(f"[red]beyond the budget[/] {as_text(sentence)}", console)


def print_wide(table: Table, console: Console) -> None:
    """Print a table, wider than the console where names are long: they are copied from it.

    Args:
        table: The table.
        console: The console.
    """
    unbounded = console.options.update(max_width=WIDEST)
    if console.measure(table, options=unbounded).maximum > console.width:
        table.padding = (0, 1, 0, 0)
    before = console.width
    console.width = max(before, console.measure(table, options=unbounded).maximum)
    console.print(table)
    console.width = before


def _empty_table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column, justify in columns:
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _row(summary: Summary) -> list[str]:
    good = summary.passed == summary.cases
    color = "green" if good else "red"
    return [
        summary.run.runtime,
        as_text(summary.run.graph),
        f"[{color}]{summary.passed}/{summary.cases}[/]",
        shown_share(summary.worst),
        shown(summary.max_abs, ".1e"),
        shown(summary.max_rel, ".1e"),
        "" if good else "[red]FAILED[/]",
    ]


def _not_ran(summary: Summary) -> str:
    color = "red" if summary.run.required else "yellow"
    run = summary.run
    return f"{run.runtime} [{color}]{run.outcome}[/]: {as_text(run.reason)}"
