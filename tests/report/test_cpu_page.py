"""The page of models on emulated processors, as scripts/matrix --cpu writes it."""

from __future__ import annotations

import json
from pathlib import Path

from measuring.cpu_page import cells_of, cpu_page, read_cells
from reports import run, verdict

from attn_export.report.tables import UNMEASURED
from attn_export.results import Report

HERE, ARM, OLD = "ort-cpu", "ort-cpu@neoverse-n1", "ort-cpu@westmere"
VERSIONS = {"onnxruntime": "1.31.1"}


def report(*runtimes: str, status: str = "passed") -> Report:
    verdicts = tuple(
        verdict(name, status, 0.254, case=f"B{n}") for name in runtimes for n in (1, 2)
    )
    return Report("mqa", tuple(run(name) for name in runtimes), verdicts, {}, ())


def test_each_model_has_a_row_with_the_worst_share_on_every_processor():
    dead = Report("gqa", (run(OLD, "crashed", "ended with signal SIGILL"),), (), {}, ())
    wrong = cells_of(report(ARM, status="failed"), "one")
    models = {"mqa": cells_of(report(HERE, ARM), "one"), "gqa": wrong | cells_of(dead, "other")}
    page = cpu_page(models, ["falcon-7b"], "2026-11-23", "a machine")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows == [
        f"| model | cases | {HERE} | {ARM} | {OLD} |",
        "|---|---|---|---|---|",
        f"| gqa | 2 | {UNMEASURED} | **FAILED 0.254** | **crashed** |",
        f"| mqa | 2 | 0.25 | 0.25 | {UNMEASURED} |",
    ]
    assert f"- gqa, {OLD}: ended with signal SIGILL" in page
    assert "Not run: falcon-7b." in page
    assert "- Host one: gqa, mqa\n- Host other: gqa\n" in page


def test_figures_of_other_versions_are_not_taken_up(tmp_path: Path):
    path = tmp_path / "cpus.json"
    assert read_cells(path, VERSIONS) == {}
    models = {"mqa": cells_of(report(ARM), "one")}
    path.write_text(json.dumps({"versions": VERSIONS, "models": models}))
    assert read_cells(path, VERSIONS) == models
    assert read_cells(path, {"onnxruntime": "1.32.0"}) == {}
