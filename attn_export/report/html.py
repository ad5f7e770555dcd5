"""Report as one HTML file without external resources, also for phones, print and screen readers."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle.manifest import MANIFEST, PAGE, REPORT, write_manifest
from attn_export.report import pictures
from attn_export.report.data import to_json
from attn_export.report.tables import (
    Summary,
    advice,
    failure_groups,
    graph_label,
    largest,
    phase_of,
    reproduce_command,
    shown,
    status_text,
    summaries,
    verdicts_by_case,
)
from attn_export.results import Detail, Report, Verdict

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).with_name("page")
STEPS = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Upper limits of the colours of cells, as an error divided by the tolerance."""

_LAYER = re.compile(r"(?:present|cache|layer|hidden)\D*(\d+)")
"""Pattern of the outputs that belong to a layer, by the names that exporters give them."""

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
        layers=[row for summary in ran if (row := _layers(report, summary))],
        alone=_alone(report),
        absent=[summary.run for summary in all_summaries if not summary.ran],
        problems=failure_groups(report.failures),
        advice=advice(report),
        untried=[note for note in report.notes if not isinstance(note, Detail)],
        engines=", ".join(dict.fromkeys(_engine(summary) for summary in ran)),
        graph_label=graph_label,
        phase_of=phase_of,
        status_text=status_text,
        shown=shown,
        outputs=_outputs(report),
        figures=pictures.figures(report),
        shares=pictures.STEPS,
        most=pictures.SHOWN,
        loss_bar=pictures.loss_bar,
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


def _engine(summary: Summary) -> str:
    return f"{summary.run.runtime} {summary.run.facts.get('version', '')}".strip()


def _name(summary: Summary) -> str:
    return f"{summary.run.runtime}, {graph_label(summary.run.graph)}"


def _row(report: Report, summary: Summary, cases: list[str]) -> dict[str, Any]:
    """Return the row of a runtime with a graph: its figures, and a cell for each case."""
    by_case = verdicts_by_case(report, summary.run)
    return {
        "summary": summary,
        "margin": pictures.margin_bar(summary.worst, failed=summary.passed < summary.cases),
        **_cells(_name(summary), {"": {case: by_case.get(case) for case in cases}}),
    }


def _layers(report: Report, summary: Summary) -> dict[str, Any] | None:
    """Return cells of each layer and each other output, by phase; None below two layers.

    Cases of one phase have one name, apart from their sizes.
    """
    layers: dict[int, str] = {}
    others: dict[str, None] = {}
    phases: dict[str, dict[str, list[Verdict]]] = {}
    for case, verdicts in verdicts_by_case(report, summary.run).items():
        phase = phases.setdefault(phase_of(case), {})
        for verdict in verdicts:
            if found := _LAYER.search(verdict.output):
                name = layers.setdefault(int(found[1]), f"layer {int(found[1])}")
            elif name := verdict.output:
                others[name] = None
            if name:
                phase.setdefault(name, []).append(verdict)
    if len(layers) < 2:
        return None
    names = [*(layers[layer] for layer in sorted(layers)), *others]
    lines = {phase: {name: of.get(name) for name in names} for phase, of in phases.items()}
    heads = [name.removeprefix("layer ") for name in names]
    return {**_cells(_name(summary), lines), "heads": heads}


def _alone(report: Report) -> list[dict[str, Any]]:
    """Return cells of the layers of each wrong graph, each on what it takes in the reference."""
    by_graph: dict[str, list[dict[str, Any]]] = {}
    for layer in report.layers:
        step = sum(layer.error > layer.right * limit for limit in STEPS[:-1])
        cell = {
            "step": "failed" if layer.is_wrong else str(step),
            "mark": "✗" if layer.is_wrong else "",
            "text": f"{layer.name}: off by {layer.error:.1e}, {layer.value}",
            "size": math.inf if math.isnan(layer.error) else layer.error,
            "chosen": False,
        }
        by_graph.setdefault(graph_label(layer.graph), []).append(cell)
    return [_with_choice(graph, {"": cells}) for graph, cells in by_graph.items()]


def _cells(name: str, lines: Mapping[str, Mapping[str, list[Verdict] | None]]) -> dict[str, Any]:
    """Return lines of cells by title, of verdicts."""
    return _with_choice(name, {
        title: [_cell(f"{title}, {of}".removeprefix(", "), some) for of, some in line.items()]
        for title, line in lines.items()
    })  # fmt: skip


def _with_choice(name: str, cells: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return lines of cells by title, with the first failure or else the largest error chosen.

    The first failure is the one of the first name, in whichever line.
    """
    columns = [cell for column in zip(*cells.values(), strict=True) for cell in column]
    failed = [cell for cell in columns if cell["step"] == "failed"]
    if columns:
        (failed or [max(columns, key=lambda cell: cell["size"])])[0]["chosen"] = True
    return {"name": name, "lines": cells, "heads": ()}


def _cell(name: str, verdicts: list[Verdict] | None) -> dict[str, Any]:
    cell = {"step": "none", "mark": "", "text": f"{name}: not run", "size": -1.0, "chosen": False}
    if verdicts is None:
        return cell
    wrong = [v for v in verdicts if v.status != "passed"]
    worst = largest(verdicts, "worst")
    size, figure = worst or 0.0, shown(worst, ".3g")
    cell["size"] = math.inf if math.isnan(size) else size
    if wrong:
        of = f" ({wrong[0].output})" if not f", {name}".endswith(f", {wrong[0].output}") else ""
        text = f"{name}: {status_text(wrong[0].status)}, {figure}{of}"
        return {**cell, "step": "failed", "mark": "✗", "text": text}
    step = sum(size > limit for limit in STEPS[:-1])
    return {**cell, "step": str(step), "text": f"{name}: passed, {figure}"}


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
