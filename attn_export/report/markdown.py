"""A report as markdown, as the summary of a CI job."""

from __future__ import annotations

from attn_export.errors import PARAGRAPH, printable
from attn_export.report.matrix import Summary, form_name, problems, summaries, summary_table
from attn_export.report.tables import Styled, markdown_table
from attn_export.results import Report

SHOWN = 20
"""Number of failed verdicts that are written out."""


def to_markdown(report: Report) -> str:
    """Return the verdict, a table of runtimes and graphs, failures and runs that are missing."""
    verdict = "passed" if report.passed else f"**failed** (exit code {report.exit_code})"
    found = summaries(report)
    lines = [f"## {_escaped(report.name)}: {verdict}", ""]
    ran = [summary for summary in found if summary.cases]
    if ran:
        table = summary_table(ran)
        lines += markdown_table(table.columns, (map(_cell, row) for row in table.rows))
    not_ran = [_not_ran(summary) for summary in found if summary.run.outcome != "ran"]
    failed = problems(report)
    wrong = [
        f"- {v.status}: {v.runtime}, {_escaped(form_name(v.graph))}, {_escaped(v.case)}, "
        f"{_escaped(v.output)}: {_escaped(v.message)}"
        for v in failed[:SHOWN]
    ]
    if len(failed) > SHOWN:
        wrong.append(f"- and {len(failed) - SHOWN} more")
    beyond = [f"- {_escaped(said)}" for said in _missed(report)]
    notes = [f"- {_escaped(note)}" for note in report.notes]
    why = [f"- {_escaped(sentence)}" for sentence in report.explanations]
    parts = {
        "Why": why,
        "Failed": wrong,
        "Beyond the budget": beyond,
        "Not run to the end": not_ran,
        "Notes": notes,
    }
    if report.signature is not None:
        lines += ["", f"Signature: {_escaped(str(report.signature))}"]
    for title, part in parts.items():
        if part:
            lines += ["", f"### {title}", "", *dict.fromkeys(part)]
    return "\n".join(lines) + "\n"


def github_annotations(report: Report) -> list[str]:
    """Return a GitHub workflow command for each failure, for a job's output."""
    lines = []
    for v in problems(report)[:SHOWN]:
        title = f"{report.name}: {v.runtime}, {form_name(v.graph)}, {v.case}"
        lines.append(f"::error title={_property(title)}::{_data(f'{v.output}: {v.message}')}")
    for said in _missed(report):
        title = _property(f"{report.name}: beyond the budget")
        lines.append(f"::error title={title}::{_data(said)}")
    for run in report.runs:
        if run.required and run.outcome != "ran":
            title = f"{report.name}: {run.runtime}, {form_name(run.graph)}"
            said = _data(f"{run.outcome}: {run.reason}")
            lines.append(f"::error title={_property(title)}::{said}")
    return lines


def _missed(report: Report) -> tuple[str, ...]:
    return report.quality.missed if report.quality is not None else ()


def _cell(cell: str | Styled) -> str:
    if isinstance(cell, str):
        return _escaped(cell)
    return f"**{_escaped(cell.text)}**" if cell.style == "red" and cell.text else cell.text


def _not_ran(summary: Summary) -> str:
    run = summary.run
    kind = "**required**" if run.required else "not required"
    return f"- {run.runtime}, {form_name(run.graph)}: {run.outcome}, {kind}: {_escaped(run.reason)}"


def _escaped(text: str) -> str:
    """Escape text, so that markdown shows it literally, on one line."""
    one = printable(text, PARAGRAPH)
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#" else char for char in one)


def _data(text: str) -> str:
    # https://github.com/actions/toolkit: these three end a command early.
    return printable(text, PARAGRAPH).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
