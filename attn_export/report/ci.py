"""Report for CI systems: JUnit XML, a summary in markdown, and annotations on GitHub.

JUnit XML has no standard. This module uses the subset that Jenkins' xUnit plugin (junit-10.xsd),
GitLab, Azure and pytest have in common: `testsuites`, `testsuite` with counts, `testcase` with one
of `failure`, `error` and `skipped`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from attn_export.errors import PARAGRAPH, AttnExportError, printable
from attn_export.quality import Quality
from attn_export.report.tables import (
    Styled,
    graph_label,
    markdown_table,
    reproduce_command,
    status_text,
    summaries,
    summary_table,
    verdicts_by_case,
)
from attn_export.results import Report, RuntimeRun, Verdict

# -- markdown: the summary of a job -------------------------------------------------------------

SHOWN = 20
"""Largest number of failed verdicts, and of outputs beyond a budget, that are listed."""


def to_markdown(report: Report) -> str:
    """Return the verdict, a table of runtimes and graphs, failures and incomplete runs."""
    verdict = "passed" if report.passed else f"**failed** (exit code {report.exit_code})"
    all_summaries = summaries(report)
    lines = [f"## {_escaped(report.name)}: {verdict}", ""]
    ran = [summary for summary in all_summaries if summary.cases]
    if ran:
        table = summary_table(ran)
        lines += markdown_table(table.columns, (map(_cell, row) for row in table.rows))
    not_ran = [_not_ran(summary.run) for summary in all_summaries if not summary.ran]
    failed = report.failures
    wrong = [
        f"- {status_text(v.status)}: {v.runtime}, {_escaped(graph_label(v.graph))}, "
        f"{_escaped(v.case)}, {_escaped(v.output)}: {_escaped(v.message)}"
        for v in failed[:SHOWN]
    ]
    missed = [f"- {_escaped(sentence)}" for sentence in _missed(report)[:SHOWN]]
    for listed, count in ((wrong, len(failed)), (missed, len(_missed(report)))):
        if count > SHOWN:
            listed.append(f"- and {count - SHOWN} more")
    sections = {
        "Why": [f"- {_escaped(sentence)}" for sentence in report.explanations],
        "Failed": wrong,
        "Beyond the budget": missed,
        "Not run to the end": not_ran,
        "Notes": [f"- {_escaped(note)}" for note in report.notes],
    }
    if report.signature is not None:
        lines += ["", f"Signature: {_escaped(str(report.signature))}"]
    if command := reproduce_command(report.reproduction):
        lines += ["", f"Reproduce: {_escaped(command)}"]
    for title, items in sections.items():
        if items:
            lines += ["", f"### {title}", "", *dict.fromkeys(items)]
    return "\n".join(lines) + "\n"


def github_annotations(report: Report) -> list[str]:
    """Return a GitHub workflow command for each failure, for a job's output."""
    errors = [
        (f"{v.runtime}, {graph_label(v.graph)}, {v.case}", f"{v.output}: {v.message}")
        for v in report.failures[:SHOWN]
    ]
    errors += [("beyond the budget", sentence) for sentence in _missed(report)[:SHOWN]]
    errors += [
        (f"{run.runtime}, {graph_label(run.graph)}", f"{run.outcome}: {run.reason}")
        for run in report.runs
        if run.required and run.outcome != "ran"
    ]
    return [
        f"::error title={_property(f'{report.name}: {title}')}::{_data(message)}"
        for title, message in errors
    ]


def _missed(report: Report) -> tuple[str, ...]:
    return report.quality.missed if report.quality is not None else ()


def _cell(cell: str | Styled) -> str:
    if isinstance(cell, str):
        return _escaped(cell)
    return f"**{_escaped(cell.text)}**" if cell.style == "red" and cell.text else cell.text


def _not_ran(run: RuntimeRun) -> str:
    need = "**required**" if run.required else "not required"
    return (
        f"- {run.runtime}, {graph_label(run.graph)}: {run.outcome}, {need}: {_escaped(run.reason)}"
    )


def _escaped(text: str) -> str:
    """Escape text, so that markdown shows it literally, on one line."""
    line = printable(text, PARAGRAPH)
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#" else char for char in line)


def _data(text: str) -> str:
    # Line breaks, which end a command, are removed by `printable`. See "escapeData" in
    # https://github.com/actions/toolkit.
    return printable(text, PARAGRAPH).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# -- JUnit XML: one test case for each runtime, graph and case ----------------------------------

ELEMENTS = {"failed": "failure", "unusable": "failure", "error": "error"}
"""JUnit element of each verdict that did not pass."""

_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold."""


def to_junit(report: Report) -> str:
    """Return the report as JUnit XML, with a newline at the end."""
    root = ElementTree.Element("testsuites", name=_text(report.name))
    for run in report.runs:
        root.append(_suite_of_run(report, run))
    if report.quality is not None:
        root.append(_budgets(report.name, report.quality))
    if report.error is not None:
        root.append(_refused(report.name, report.error))
    for count in ("tests", "failures", "errors"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, "unicode", xml_declaration=True) + "\n"


def _suite(name: str, cases: Sequence[ElementTree.Element]) -> ElementTree.Element:
    """Return a suite of test cases, with its counts."""
    suite = ElementTree.Element("testsuite", name=_text(name), tests=str(len(cases)))
    for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(sum(case.find(tag) is not None for case in cases)))
    suite.extend(cases)
    return suite


def _refused(name: str, error: AttnExportError) -> ElementTree.Element:
    """Return the suite of a job that an error ended before there was a verdict."""
    case = ElementTree.Element("testcase", classname=_text(name), name="runs")
    ElementTree.SubElement(case, "error", type=type(error).__name__, message=_text(str(error)))
    return _suite(name, [case])


def _budgets(name: str, quality: Quality) -> ElementTree.Element:
    """Return the suite of a quantised model. An output beyond its budget is a failed test case."""
    cases = []
    for output in quality.outputs:
        case = ElementTree.Element("testcase", classname=f"{_text(name)}.budget")
        case.set("name", _text(output.part))
        missed = [line for line in quality.missed if line.startswith(f"{output.part}: ")]
        if missed:
            ElementTree.SubElement(case, "failure", type="beyond", message=_text(missed[0]))
        cases.append(case)
    return _suite(f"{name}.budget", cases)


def _suite_of_run(report: Report, run: RuntimeRun) -> ElementTree.Element:
    name = f"{report.name}.{run.runtime}.{run.graph}"
    suite = _suite(name, list(_cases(report, run, name)))
    if run.seconds:
        suite.set("time", f"{sum(run.seconds.values()):.3f}")
    properties = ElementTree.Element("properties")
    facts = {**run.facts, **({"signature": report.signature} if report.signature else {})}
    for fact, value in facts.items():
        ElementTree.SubElement(properties, "property", name=_text(fact), value=_text(str(value)))
    suite.insert(0, properties)
    return suite


def _cases(report: Report, run: RuntimeRun, suite: str) -> Iterator[ElementTree.Element]:
    prefix = f"{run.runtime}, {run.graph}: "
    why = [f"why: {sentence}" for sentence in report.explanations if sentence.startswith(prefix)]
    if command := reproduce_command(report.reproduction):
        why.append(f"reproduce: {command}")
    for name, verdicts in verdicts_by_case(report, run).items():
        yield _case(suite, name, verdicts, why, run.seconds.get(name))
    if run.outcome != "ran":
        # An incomplete run is a test case of its own, because its missing cases have no verdicts.
        element = ElementTree.Element("testcase", classname=_text(suite), name="runs")
        tag = "error" if run.required else "skipped"
        result = ElementTree.SubElement(element, tag, message=_text(f"{run.outcome}: {run.reason}"))
        if tag == "error":
            result.set("type", run.outcome)
        yield element


def _case(
    suite: str, name: str, verdicts: list[Verdict], why: list[str], seconds: float | None
) -> ElementTree.Element:
    element = ElementTree.Element("testcase", classname=_text(suite), name=_text(name))
    if seconds is not None:
        element.set("time", f"{seconds:.3f}")
    wrong = [verdict for verdict in verdicts if verdict.status != "passed"]
    if wrong:
        # The schema allows one result per test case.
        first = wrong[0]
        lines = [f"{v.output}: {v.message}" if v.output else v.message for v in wrong]
        result = ElementTree.SubElement(
            element, ELEMENTS.get(first.status, "error"), type=first.status, message=_text(lines[0])
        )
        result.text = _text("\n".join([*why, *lines]))
    return element


def _text(text: str) -> str:
    return _NOT_XML.sub("?", text)
