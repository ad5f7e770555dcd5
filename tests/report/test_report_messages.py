"""Causes before symptoms, in every form of a report."""

from __future__ import annotations

import dataclasses
import html
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from reports import clean, mixed, run, verdict

from attn_export.errors import GraphError, ParityError, RuntimeFailure, counted
from attn_export.judge.judge import judge
from attn_export.report.ci import to_junit
from attn_export.report.data import to_json
from attn_export.report.html import to_html
from attn_export.report.terminal import to_text
from attn_export.results import Case, Golden, Report, Signature
from attn_export.schema import Tolerance

CAUSE = "bad, model.onnx: the graph is wrong: its scale is 0.3"


def explained() -> Report:
    return dataclasses.replace(mixed(), explanations=(CAUSE,))


def test_the_cause_comes_first_in_the_terminal():
    text = to_text(explained(), "--json FILE")
    assert 0 == text.index("why: bad") < text.index("failed bad")


def test_each_junit_failure_of_an_explained_runtime_carries_the_cause():
    root = ElementTree.fromstring(to_junit(explained()))
    found = {
        (suite.get("name"), (result.text or "").startswith(f"why: {CAUSE}"))
        for suite in root
        for case in suite.iter("testcase")
        for result in case
        if result.tag in ("failure", "error") and result.text
    }
    assert found == {("test & <more>.bad.model.onnx", True)}


def test_junit_has_the_seconds_of_a_run():
    report = Report(
        "one",
        (run("a", seconds={"B2_L3": 1.25, "B1": 0.5}),),
        (verdict("a", "passed", 0.1),),
        {},
        (),
    )
    (suite,) = ElementTree.fromstring(to_junit(report))
    assert suite.get("time") == "1.750"
    assert suite.find("testcase").get("time") == "1.250"  # type: ignore[union-attr]


def refused() -> Report:
    error = GraphError("a.onnx: <it> is no graph; export it again")
    return Report("one", (), (), {"versions": {}}, (), error=error)


def test_the_error_that_ended_the_job_is_in_every_form_of_a_report():
    report = refused()
    assert report.exit_code == GraphError.exit_code
    root = ElementTree.fromstring(to_junit(report))
    (found,) = root.iter("error")
    assert (found.get("type"), found.get("message")) == ("GraphError", str(report.error))
    assert root.get("errors") == "1"
    assert json.loads(to_json(report))["error"] == str(report.error)
    assert "&lt;it&gt; is no graph" in to_html(report)
    assert "is no graph" in str(report)
    with pytest.raises(GraphError, match="is no graph"):
        report.raise_if_failed()


def test_a_notebook_shows_the_page_in_a_frame():
    frame = mixed()._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts" srcdoc="')
    assert html.unescape(frame.split('"')[3]) == mixed().to_html()


def test_a_report_shows_itself_on_one_line_and_its_failures():
    report = dataclasses.replace(mixed(), name="a\nb")
    assert repr(report) == "<Report a b: failed (exit 6), 6 verdicts, 4 not passed>"
    assert {v.status for v in report.failures} == {"failed", "unusable", "error"}
    assert report.to_json() == to_json(report)
    assert report.to_markdown().startswith("## a b: **failed**")


def test_runtimes_that_were_not_named_are_listed_once_at_the_end():
    absent = [run("ort-cuda", "not run", "no GPU", graph=g, required=False) for g in "ab"]
    report = dataclasses.replace(clean(), runs=(*absent, *clean().runs), notes=("a note",))
    lines = to_text(report, "--json FILE").splitlines()
    assert lines[-3:] == ["note: a note", "ort-cuda not run: no GPU", "clean: passed"]
    assert sum("ort-cuda" in line for line in lines) == 1
    assert "ort-cuda" not in str(report)
    assert "ort-cuda" in str(dataclasses.replace(report, runs=tuple(absent)))


def test_dimensions_and_the_date_are_on_the_page():
    made = {"versions": {}, "date": "2026-01-02 03:04 UTC"}
    page = to_html(
        dataclasses.replace(clean(), dimensions={"query": "float32 [B, 8]"}, environment=made)
    )
    assert "query: float32 [B, 8]" in page
    assert "2026-01-02 03:04 UTC. Exit code 0" in page


def test_the_last_line_names_the_runtimes_that_failed():
    runs = (run("ort-cpu"), run("ort-cpu@n1", "not run", "no emulator"), run("tract", "crashed"))
    verdicts = (verdict("ort-cpu", "passed", 0.1),)
    report = Report("mqa", runs, verdicts, {}, ())
    says = "mqa: failed: ort-cpu@n1 could not run, tract crashed (exit 5)"
    assert to_text(report, "--json FILE").splitlines()[-1] == says


def test_a_report_as_text_has_at_most_20_lines_and_the_cause_second():
    lines = str(explained()).splitlines()
    assert lines[0] == "test & <more>: failed (exit 6)"
    assert lines[1] == f"why: {CAUSE}"
    assert "good, model.onnx: 0 of 1 case failed" in lines
    many = dataclasses.replace(mixed(), runs=tuple(run(f"r{n}") for n in range(40)))
    assert len(str(many).splitlines()) == 20
    assert str(many).endswith("… 22 more")


@pytest.mark.parametrize(
    ("report", "error", "says"),
    [
        (explained(), ParityError, CAUSE),
        (Report("one", (run("a", "crashed", "signal"),), (), {}, ()), RuntimeFailure, "signal"),
    ],
)
def test_a_failed_report_raises_the_error_of_its_exit_code(report, error, says):
    with pytest.raises(error, match=says) as caught:
        report.raise_if_failed()
    assert "\n" not in str(caught.value)


def test_a_passed_report_raises_nothing():
    clean().raise_if_failed()


def test_values_that_differ_are_shown_with_digits_that_differ():
    reference = np.array([[0.132120001, 5.0]])
    golden = Golden(
        Case("one", "shape", {}, {}, ""),
        {"y": reference},
        {"y": reference},
        {"y": Tolerance(1e-9, 1e-9)},
        {},
    )
    (found,) = judge("r", "g", golden, {"y": reference + np.array([[2e-8, 0.0]])})
    assert found.status == "failed"
    assert "actual 0.132120021, expected 0.132120001" in found.message


@pytest.mark.parametrize(("number", "says"), [(0, "0 cases"), (1, "1 case"), (2, "2 cases")])
def test_a_count_agrees_with_its_word(number, says):
    assert counted(number, "case") == says


SIGNED, CLAIMED = Signature("verified", "Ann"), Signature("not checked", "Bob")
JOINED = {
    "none was looked at": ([None, None], None),
    "all are signed": ([SIGNED, SIGNED], SIGNED),
    "two sign": ([SIGNED, Signature("verified", "Bob")], Signature("verified", "Ann, Bob")),
    "one is a claim": ([SIGNED, CLAIMED], Signature("not checked", "Ann, Bob")),
    "the last is unsigned": ([SIGNED, Signature("unsigned")], Signature("unsigned")),
    "one has no signature": ([SIGNED, None], Signature("unsigned")),
}


@pytest.mark.parametrize("name", JOINED)
def test_a_joined_report_is_signed_as_its_parts_are(name: str):
    signatures, wanted = JOINED[name]
    parts = [dataclasses.replace(clean(), signature=each) for each in signatures]
    parts[1] = dataclasses.replace(parts[1], reproduction=Path("b.explained"))
    joined = Report.joined("all", dict(zip("ab", parts, strict=True)))
    assert (joined.signature, joined.reproduction) == (wanted, Path("b.explained"))
