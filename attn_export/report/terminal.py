"""Reports and explanations in the terminal, without colours where it is piped."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from textwrap import shorten
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid
from rich.text import Text

from attn_export.errors import PARAGRAPH, counted, first_few, printable
from attn_export.quality import Quality
from attn_export.report.tables import (
    Column,
    Matrix,
    MatrixCell,
    Styled,
    Summary,
    Table,
    advice,
    failure_groups,
    graph_label,
    matrix,
    phase_of,
    reproduce_command,
    status_text,
    summaries,
    summary_table,
)
from attn_export.results import Detail, Report, Verdict

if TYPE_CHECKING:
    from attn_export.explain.explanation import Explanation

# -- lines and tables of all reports ------------------------------------------------------------

_WIDEST = 1000
"""Largest width of a table in characters."""


def as_text(foreign: object) -> str:
    """Return rich markup that shows a foreign text literally, non-printable characters escaped."""
    return escape(printable(foreign, PARAGRAPH))


def say(line: str, console: Console) -> None:
    """Print a line of markup. A terminal gets line breaks between words, a file none."""
    text = Text.from_markup(line)
    lines = text.divide(_breaks(text.plain, console.width)) if console.is_terminal else [text]
    for wrapped in lines:
        wrapped.rstrip()
        console.print(wrapped, highlight=False, soft_wrap=True)


def _breaks(text: str, width: int) -> list[int]:
    """Return the offsets of the words before which a text must be broken to fit into a width."""
    offsets, start = [], 0
    for word in re.finditer(r"\S+", text):
        if word.end() - start > width and word.start() > start:
            start = word.start()
            offsets.append(start)
    return offsets


def print_table(table: Table, console: Console, header: str = "") -> None:
    """Print a table.

    A table without columns that may be folded is printed wider than the console if necessary, so
    that users can copy whole names from it.
    """
    grid = Grid(
        box=None,
        pad_edge=False,
        padding=(0, table.gap, 0, 0),
        header_style=header or "table.header",
    )
    for column in table.columns:
        grid.add_column(
            "\n".join(map(as_text, column.name.splitlines())), vertical="bottom",
            justify="right" if column.right else "left",
            width=column.width, no_wrap=not column.wraps and column.width is None,
            overflow="fold" if column.width else "ellipsis",
        )  # fmt: skip
    for row in table.rows:
        grid.add_row(*map(_markup, row))
    if any(column.wraps or column.width for column in table.columns):
        console.print(grid, highlight=False)
        return
    unbounded = console.options.update(max_width=_WIDEST)
    if console.measure(grid, options=unbounded).maximum > console.width:
        grid.padding = (0, 1, 0, 0)
    console_width = console.width
    console.width = max(console_width, console.measure(grid, options=unbounded).maximum)
    console.print(grid, highlight=False)
    console.width = console_width


def _markup(cell: str | Styled) -> str:
    if isinstance(cell, str):
        return as_text(cell)
    return f"[{cell.style}]{as_text(cell.text)}[/]" if cell.style else as_text(cell.text)


# -- the report ---------------------------------------------------------------------------------

QUALITY = (
    Column("part"), Column("SQNR dB", right=True), Column("cosine", right=True),
    Column("worst row", right=True),
)  # fmt: skip

FEW = 2
"""Largest number of runtimes with a row of figures for each graph; more are shown as a matrix."""

SHOWN = 8
"""Largest number of groups of failed verdicts that are printed."""

LONGEST_NOTE = 120
"""Largest number of characters of a note that are printed. Reports have all."""


def print_report(
    report: Report, console: Console, option: str = "--verbose", *, verbose: bool = False
) -> None:
    """Print the causes, the table, failures, notes and the verdict.

    `option`: What shows the rest.
    `verbose`: Whether each failure is printed, and each note as a whole.
    """
    if report.error is not None:
        say(f"[red]{as_text(report.error)}[/]", console)
    causes = [f"why: {as_text(sentence)}" for sentence in report.explanations]
    for line in [*causes, f"next: {as_text(advice(report))}"] if causes else ():
        say(line, console)
    all_summaries = summaries(report)
    ran = [summary for summary in all_summaries if summary.cases]
    few = len({summary.run.runtime for summary in ran}) <= FEW
    if not few:
        _print_matrix(matrix(report), console)
    else:
        if ran:
            print_table(summary_table(ran), console)
        required = (s for s in all_summaries if s.run.required and not s.ran)
        # Graphs of a runtime often have the same reason, which is printed once.
        for line in dict.fromkeys(_not_ran(summary) for summary in required):
            say(line, console)
    if report.quality is not None:
        _print_quality(report.quality, console, option, verbose=verbose)
    # The reason that a whole run failed is already printed above.
    printed = {run.reason for run in report.runs if run.outcome != "ran"}
    failed = [verdict for verdict in report.failures if verdict.message not in printed]
    groups = [[verdict] for verdict in failed] if verbose else failure_groups(failed)
    for group in groups if verbose else groups[:SHOWN]:
        say(_failures(group), console)
    if not verbose and len(groups) > SHOWN:
        rest = sum(map(len, groups[SHOWN:]))
        say(f"… and {rest} more failures; {option} has all", console)
    _print_notes(report, console, option, verbose=verbose)
    # Runtimes that the user did not name come last.
    optional = (s for s in all_summaries if few and not s.run.required and not s.ran)
    for line in dict.fromkeys(_not_ran(summary) for summary in optional):
        say(line, console)
    say(f"{as_text(report.name)}: {_result(report)}", console)


def _failures(group: Sequence[Verdict]) -> str:
    """Return a line of markup on a group of failures, of which the first is the worst."""
    worst, cases = group[0], {v.case for v in group}
    status = f"[red]{status_text(worst.status)}[/]"
    where = f"{worst.runtime} {graph_label(worst.graph)}"
    what = f"{worst.case} {worst.output}".strip()
    if len(group) > 1:
        outputs = sorted({v.output for v in group})
        where = f"{where} {phase_of(worst.case)}".rstrip()
        where += f", {counted(len(cases), 'case')}, {first_few(outputs)}"
        what = f"worst {what}"
        return f"{status} {as_text(where)}: {as_text(what)}: {as_text(worst.message)}"
    return f"{status} {as_text(f'{where} {what}')}: {as_text(worst.message)}"


def _result(report: Report) -> str:
    if report.passed:
        return "[green]passed[/]"
    why = ": ".join(filter(None, ("[red]failed[/]", as_text(_failure(report)))))
    return f"{why} (exit {report.exit_code})"


_STATES: Mapping[str, str] = {
    "failed": "gives wrong outputs", "unusable": "has cases that were not compared",
    "error": "gives no output", "refused": "refuses a graph", "crashed": "crashed",
    "hung": "hung", "out of memory": "ran out of memory", "not run": "could not run",
}  # fmt: skip
"""What a runtime does, by the status of a verdict or the outcome of a run."""


def _failure(report: Report) -> str:
    """Return the runtimes that were wrong or did not run to their end."""
    wrong = {v.runtime: v.status for v in report.failures}
    ended = {r.runtime: r.outcome for r in report.runs if r.required and r.outcome != "ran"}
    parts = [f"{runtime} {_STATES[state]}" for runtime, state in {**wrong, **ended}.items()]
    parts += ["the error is beyond the budget"] if report.quality and report.quality.missed else []
    return ", ".join(parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _print_notes(report: Report, console: Console, option: str, *, verbose: bool) -> None:
    if report.signature is not None:
        say(f"signature: {as_text(report.signature)}", console)
    for note in report.notes:
        if verbose or not isinstance(note, Detail):
            text = note if verbose else shorten(note, LONGEST_NOTE, placeholder=" …")
            say(f"note: {as_text(text)}", console)
    if not verbose:
        more = sum(isinstance(n, Detail) or len(n) > LONGEST_NOTE for n in report.notes)
        if more:
            say(f"{counted(more, 'note')} in full: {option}", console)
    if command := reproduce_command(report.reproduction):
        say(f"reproduce: {as_text(command)}", console)


def to_text(report: Report, option: str) -> str:
    """Return the plain text of `print_report`, 100 columns wide, without trailing spaces."""
    out = io.StringIO()
    print_report(report, Console(file=out, width=100, color_system=None), option)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _print_matrix(cells: Matrix, console: Console) -> None:
    say("worst error / tolerance", console)
    # In a narrow terminal "FAILED" is above its figure instead of beside it.
    columns = (Column(graph, right=True, wraps=True) for graph in cells.graphs)
    rows = (
        (runtime, *(_coloured(cells.cells.get((runtime, graph))) for graph in cells.graphs))
        for runtime in cells.runtimes
    )
    print_table(Table((Column("runtime"), *columns), tuple(rows)), console)
    for reason, graphs in cells.reasons().items():
        say(f"{as_text(reason)} ({as_text(', '.join(graphs))})", console)


def _coloured(cell: MatrixCell | None) -> str | Styled:
    if cell is None:
        return ""
    return Styled(cell.text, "dim" if cell.colour == "grey" else cell.colour)


_DEAREST = 4
"""The number of layers that are named."""


def _print_quality(quality: Quality, console: Console, option: str, *, verbose: bool) -> None:
    """Print the distance of a quantised model from the float model, which is no verdict."""
    budgets = ", ".join(map(str, quality.budgets)) or "none"
    say(f"quantised against float weights, budget {as_text(budgets)}", console)
    rows = (
        (
            distance.part,
            f"{distance.sqnr:.1f}",
            f"{distance.cosine:.6f}",
            f"{distance.row:.1e}",
        )
        for distance in quality.shown()
    )
    print_table(Table(QUALITY, tuple(rows)), console)
    if quality.logits:
        say(as_text(quality.logits_sentence), console)
    for name, losses in (("loss", quality.causes), ("dearest", quality.layers[:_DEAREST])):
        shown = (f"{loss.part} {loss.sqnr:.1f} dB, top1 {loss.top1:.1%}" for loss in losses)
        if losses:
            say(as_text(f"{name}: {'; '.join(shown)}"), console)
    missed = quality.missed
    for sentence in missed if verbose else missed[:SHOWN]:
        say(f"[red]beyond the budget[/] {as_text(sentence)}", console)
    if not verbose and len(missed) > SHOWN:
        say(f"… and {len(missed) - SHOWN} more beyond it; {option} has all", console)


def _not_ran(summary: Summary) -> str:
    run = summary.run
    colour = "red" if run.required else "yellow"
    return f"{run.runtime} [{colour}]{run.outcome}[/]: {as_text(run.reason)}"


# -- explanations ----------------------------------------------------------------------------

_MORE_CAUSES = 3
"""Largest number of alternative causes that are printed."""


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print the sentence of an explanation, then its evidence."""
    colour = "green" if explanation.fault == "none" else "red"
    say(f"[{colour}]{as_text(explanation.sentence)}[/]", console)
    for line in _evidence(explanation):
        say(as_text(line), console)


def _evidence(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of the evidence of an explanation."""
    for cause in explanation.causes[1 : 1 + _MORE_CAUSES]:
        yield f"or: {cause.sentence}"
    if (first := explanation.first) is not None:
        says = "".join(f"; {text}" for text in (first.relation, first.says) if text)
        size = f", relative error {first.error:.1e}" if isfinite(first.error) else ""
        yield f"first wrong node: {first.location}{size}{says}"
    for pattern in explanation.pattern:
        yield f"pattern: {pattern}"
    for experiment in explanation.experiments:
        failure = "could not be run: " if experiment.passed is None else ""
        yield f"tried: {experiment.name}: {failure}{experiment.result}"
    if explanation.smallest:
        sizes = ", ".join(f"{axis} {size}" for axis, size in explanation.smallest.items())
        yield f"smallest case: {sizes}"
    for part in explanation.distance:
        yield f"distance from the float model: {part}"
    for note in explanation.notes:
        yield f"note: {note}"
    if explanation.folder is not None and explanation.smallest:
        yield f"reproduce: {reproduce_command(explanation.folder)}"
