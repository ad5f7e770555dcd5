"""No report shows a figure for what was not measured, and NaN is NaN in each of them."""

from __future__ import annotations

import io
import json
import math

import pytest
from measuring.matrix_page import matrix_block, matrix_to_dict
from reports import ENVIRONMENT, run, verdict
from rich.console import Console

from attn_export.report.ci import to_junit, to_markdown
from attn_export.report.data import to_json
from attn_export.report.html import to_html
from attn_export.report.pictures import figures
from attn_export.report.tables import UNMEASURED, largest, matrix, shown, shown_share
from attn_export.report.terminal import print_report
from attn_export.results import Report, Verdict

GOOD = verdict("ort-cpu", "passed", 0.39, max_abs=3e-7)
NAN = verdict("ort-cpu", "failed", math.nan, output="other", max_abs=math.nan)
FAR = verdict("ort-cpu", "failed", 7.0, output="far", max_abs=2.0)
MISSING = verdict("ort-cpu", "failed", None, output="missing")
ERROR = verdict("ort-cpu", "error", None, output="")
WHOLE = verdict("ort-cpu", "passed", None, output="integers", max_abs=0.0)

SETS: dict[str, tuple[tuple[Verdict, ...], str, str]] = {
    "all passed": ((GOOD, WHOLE), "0.390", "3.0e-07"),
    "a NaN beside what passed": ((GOOD, NAN), "NaN", "NaN"),
    "a NaN before what is far off": ((NAN, FAR), "NaN", "NaN"),
    "a NaN after what is far off": ((FAR, NAN), "NaN", "NaN"),
    "a missing output beside what passed": ((GOOD, MISSING), UNMEASURED, UNMEASURED),
    "a missing output beside what is far off": ((FAR, MISSING), "7.000", "2.0e+00"),
    "errors alone": ((ERROR,), UNMEASURED, UNMEASURED),
    "integers alone": ((WHOLE,), UNMEASURED, "0.0e+00"),
}
"""Verdicts of one runtime, with its worst error over allowed and its largest from eager."""


@pytest.fixture(params=SETS)
def unmeasured(request: pytest.FixtureRequest) -> tuple[Report, str, str]:
    verdicts, worst, max_abs = SETS[request.param]
    return Report("one", (run("ort-cpu"),), verdicts, ENVIRONMENT, ()), worst, max_abs


def printed(report: Report) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    return out.getvalue()


def test_the_largest_is_that_of_what_was_measured(unmeasured: tuple[Report, str, str]):
    report, worst, max_abs = unmeasured
    assert shown_share(largest(report.verdicts, "worst")) == worst
    assert shown(largest(report.verdicts, "max_abs"), ".1e") == max_abs


def test_the_terminal_shows_it(unmeasured: tuple[Report, str, str]):
    report, worst, max_abs = unmeasured
    (row,) = (line for line in printed(report).splitlines() if "model.onnx" in line)
    assert row.split()[3:5] == [worst, max_abs]


def test_markdown_and_the_page_show_it(unmeasured: tuple[Report, str, str]):
    report, worst, max_abs = unmeasured
    assert f"| {worst} | {max_abs} |" in to_markdown(report)
    worst = shown(largest(report.verdicts, "worst"), ".3g")
    page = to_html(report)
    assert f'<td class="number">{worst}</td>' in page
    status = next((v.status for v in report.verdicts if v.status != "passed"), "passed")
    assert f'"says">B2_L3: {status}, {worst}' in page


def test_the_matrices_show_it(unmeasured: tuple[Report, str, str]):
    report, worst, _ = unmeasured
    (cell,) = matrix(report).cells.values()
    assert cell.text == (worst if report.passed else f"FAILED {worst}")
    short = worst if worst == UNMEASURED else worst[:-1]
    summed = f"{short} (1/1)" if report.passed else "**FAILED** (one)"
    assert f"| {summed} |" in matrix_block([report], "today")
    (figures_of_cell,) = matrix_to_dict([report], "today")["models"]["one"]
    assert json.loads(json.dumps(figures_of_cell, allow_nan=False))["text"] == cell.text


def test_json_has_null_and_junit_no_figure():
    report = Report("one", (run("ort-cpu"),), (GOOD, NAN, ERROR), ENVIRONMENT, ())
    shares = [v["worst"] for v in json.loads(to_json(report))["verdicts"]]
    assert shares == [0.39, None, None]
    assert "0.39" not in to_junit(report)


def test_a_map_of_a_nan_states_no_share_and_comes_first(error_maps: Report):
    first, second = figures(error_maps)
    assert (first["name"], first["verdict"]) == ("nan, standard", "B2_L3, output: failed")
    assert second["verdict"] == "B2_L3, output: failed, 7 times the tolerance"


@pytest.fixture
def error_maps() -> Report:
    from reports import error_map

    runs = (run("far", maps=(error_map(),)), run("nan", maps=(error_map(),)))
    verdicts = (verdict("far", "failed", 7.0), verdict("nan", "failed", math.nan))
    return Report("maps", runs, verdicts, ENVIRONMENT, ())
