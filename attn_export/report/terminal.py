"""A report in the terminal: 80 columns, plain where it is piped."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attn_export.nouns import Report
from attn_export.report.summary import Summary, problems, summaries

SHOWN = 8
"""How many failed verdicts are written out; the rest is in report.json."""


def print_report(report: Report, console: Console) -> None:
    """Print the table, what failed, the notes and the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column, justify in (
        ("runtime", "left"), ("graph", "left"), ("passed", "right"),
        ("error/allowed", "right"), ("max abs", "right"), ("max rel", "right"), ("", "left"),
    ):  # fmt: skip
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    ran = [summary for summary in summaries(report) if summary.cases]
    for summary in ran:
        table.add_row(*_row(summary))
    if ran:
        console.print(table)
    # The same reason holds for all graphs.
    for line in dict.fromkeys(_not_ran(s) for s in summaries(report) if s.run.outcome != "ran"):
        console.print(line, highlight=False, soft_wrap=True)
    failed = problems(report)
    for verdict in failed[:SHOWN]:
        where = f"{verdict.runtime} {verdict.case} {verdict.output}".strip()
        console.print(
            f"[red]{verdict.status}[/] {escape(where)}: {escape(verdict.message)}",
            highlight=False,
            soft_wrap=True,
        )
    if len(failed) > SHOWN:
        console.print(f"… and {len(failed) - SHOWN} more; --json FILE has all", highlight=False)
    for note in report.notes:
        console.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    verdict_line = "[green]passed[/]" if report.passed else f"[red]failed[/] ({report.exit_code})"
    console.print(f"{escape(report.name)}: {verdict_line}", highlight=False, soft_wrap=True)


def _row(summary: Summary) -> list[str]:
    good = summary.passed == summary.cases
    color = "green" if good else "red"
    return [
        summary.run.runtime,
        summary.run.graph,
        f"[{color}]{summary.passed}/{summary.cases}[/]",
        f"{summary.worst:.3f}" if summary.worst < 1000 else f"{summary.worst:.1e}",
        f"{summary.max_abs:.1e}",
        f"{summary.max_rel:.1e}",
        "" if good else "[red]FAILED[/]",
    ]


def _not_ran(summary: Summary) -> str:
    color = "red" if summary.run.required else "yellow"
    run = summary.run
    return f"{run.runtime} [{color}]{run.outcome}[/]: {escape(run.reason)}"
