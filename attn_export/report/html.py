"""Report as one HTML file without external resources, also for phones, print and screen readers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle.manifest import MANIFEST, PAGE, REPORT, write_manifest
from attn_export.report import pictures
from attn_export.report.data import to_json
from attn_export.report.tables import (
    Summary,
    graph_label,
    largest,
    reproduce_command,
    shown,
    summaries,
    verdicts_by_case,
)
from attn_export.results import Report, Verdict

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).with_name("page")
STEPS = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper limits of the heat map's colours, as an error divided by the error allowed."""

FIGURES = ("whole", "row", "max_abs", "max_rel")


def write_report(folder: Path, report: Report, manifest: Mapping[str, Any]) -> None:
    """Write the report of a bundle as JSON and as a page, and then the manifest, which lists them.

    `manifest`: Its content, as `write_manifest` takes it.
    """
    (folder / REPORT).write_text(to_json(report), encoding="utf-8")
    (folder / PAGE).write_text(to_html(report), encoding="utf-8")
    write_manifest(folder, manifest)


def to_html(report: Report) -> str:
    """Return the report as HTML."""
    all_summaries = summaries(report)
    ran = [summary for summary in all_summaries if summary.cases]
    cases = list(dict.fromkeys(verdict.case for verdict in report.verdicts))
    return render_page(
        "report.html.j2",
        report=report,
        steps=STEPS,
        rows=[_row(report, summary, cases) for summary in ran],
        cases=cases,
        absent=[summary.run for summary in all_summaries if not summary.ran],
        problems=report.failures,
        graph_label=graph_label,
        shown=shown,
        outputs=_outputs(report),
        figures=pictures.figures(report),
        shares=pictures.STEPS,
        most=pictures.SHOWN,
        reproduce=reproduce_command(report.reproduction),
        is_of_bundle=report.model is None or (report.model.parent / MANIFEST).is_file(),
    )


def render_page(template: str, folder: Path = TEMPLATES, **values: Any) -> str:
    """Return the text of a page, with all values escaped; a part has templates of its own."""
    return _environment(folder).get_template(template).render(**values)


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    """Return the environment of jinja2, which compiles each template once in a process."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _row(report: Report, summary: Summary, cases: list[str]) -> dict[str, Any]:
    """Return the row of a runtime with a graph: its figures, and a cell for each case."""
    run = summary.run
    by_case = verdicts_by_case(report, run)
    return {
        "summary": summary,
        "name": f"{run.runtime}, {graph_label(run.graph)}",
        "cells": [_cell(case, by_case.get(case)) for case in cases],
    }


def _cell(case: str, verdicts: list[Verdict] | None) -> dict[str, str]:
    if verdicts is None:
        return {"step": "none", "mark": "", "text": f"{case}: not run"}
    wrong = [v for v in verdicts if v.status != "passed"]
    worst = largest(verdicts, "worst")
    figure = shown(worst, ".3g")
    if wrong:
        return {"step": "failed", "mark": "✗", "text": f"{case}: {wrong[0].status}, {figure}"}
    step = sum((worst or 0.0) > limit for limit in STEPS[:-1])
    return {"step": str(step), "mark": "", "text": f"{case}: passed, {figure}"}


def _outputs(report: Report) -> list[dict[str, Any]]:
    """Return the largest errors for each runtime, graph and output, against float64 and eager."""
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for v in report.verdicts:
        if v.output:
            groups.setdefault((v.runtime, graph_label(v.graph), v.output), []).append(v)
    return [
        {"place": place, **{figure: shown(largest(group, figure), ".2e") for figure in FIGURES}}
        for place, group in groups.items()
    ]
