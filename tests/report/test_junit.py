"""JUnit XML, as CI systems read it."""

from __future__ import annotations

import dataclasses
import html
import shlex
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import Cli
from reports import clean, mixed, run, verdict
from xmlschema import XMLSchema

from attn_export.report.ci import to_junit, to_markdown
from attn_export.report.html import to_html
from attn_export.results import Report, RuntimeRun, Verdict

SCHEMA = XMLSchema(Path(__file__).with_name("junit-10.xsd"))
"""That of Jenkins' xUnit plugin, as pytest's source distribution has it; its licence is in it."""


def only(runs: Sequence[RuntimeRun], *verdicts: Verdict) -> Report:
    return Report("one", tuple(runs), verdicts, {}, ())


REPORTS = {
    "mixed": mixed(),
    "passed": clean(),
    "failed": only([run("a")], verdict("a", "failed", 2.0, message="off")),
    "unusable": only([run("a")], verdict("a", "unusable", None, message="eager has NaN")),
    "an error in a case": only([run("a")], verdict("a", "error", None, output="", message="no")),
    "crashed": only([run("a", "crashed", "signal SIGSEGV")]),
    "hung": only([run("a", "hung", "after 2 s")], verdict("a", "passed", 0.1)),
    "not run, required": only([run("a", "not run", "it is not installed")]),
    "not run, skipped": only([run("a", "not run", "no GPU", required=False)]),
    "nothing": only([]),
    "no facts, odd characters": only(
        [run("a\x0b<&>", facts={"seconds": 0.1, "a\x00": None})],
        verdict("a\x0b<&>", "failed", None, case="\ud800 \"\n]]>", message="\x1b[31m\ufffe"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_it_is_what_the_schema_allows(report: Report):
    text = to_junit(report)
    assert [error.reason for error in SCHEMA.iter_errors(text.encode())] == []
    for case in ElementTree.fromstring(text).iter("testcase"):
        assert len(case) <= 1


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("<failure type=", "<failure kind="),
        (' failures="2"', ""),
        ('<testcase classname="', '<testcase x="'),
    ],
)
def test_the_schema_refuses_what_is_wrong(right: str, wrong: str):
    text = to_junit(mixed())
    assert right in text
    assert not SCHEMA.is_valid(text.replace(right, wrong).encode())


def test_a_test_case_for_each_runtime_graph_and_case():
    root = ElementTree.fromstring(to_junit(mixed()))
    results = {
        (suite.get("name"), case.get("name")): [child.tag for child in case]
        for suite in root
        for case in suite.iter("testcase")
    }
    name = "test & <more>."
    assert results == {
        (f"{name}good.model.onnx", "B2_L3"): [],
        (f"{name}good.model.ort.decode.onnx", "runs"): ["skipped"],
        (f"{name}bad.model.onnx", "B2_L3"): ["failure"],
        (f"{name}bad.model.onnx", "B1"): ["error"],
        (f"{name}bad.model.onnx", "far"): ["failure"],
        (f"{name}dead.model.onnx", "B2_L3"): [],
        (f"{name}dead.model.onnx", "runs"): ["error"],
        (f"{name}gone.model.onnx", "runs"): ["error"],
    }
    assert {key: root.get(key) for key in ("tests", "failures", "errors")} == {
        "tests": "8", "failures": "2", "errors": "3",
    }  # fmt: skip


def test_reasons_are_in_it_and_what_xml_cannot_hold_is_not():
    text = to_junit(mixed())
    root = ElementTree.fromstring(text)
    messages = [e.get("message") for e in root.iter() if e.tag in ("failure", "error", "skipped")]
    assert "not run: it has no TensorScatter" in messages
    assert "crashed: ended with signal SIGSEGV: <core> & 100 %" in messages
    failure = root.find("testsuite[3]/testcase/failure")
    assert failure is not None
    assert failure.text == (
        "output: relative error 1e-2 over <the> whole | output\npresent_key: a row?is off"
    )
    assert text.endswith("\n")


def test_the_command_line_writes_it_and_refuses_first_what_it_cannot(
    bundle: Path, tmp_path: Path, cli: Cli
):
    done = cli("verify", bundle, "--runtime", "ort-cpu", "--junit", "out.xml", "--quiet")
    assert (done.returncode, done.stdout) == (0, "")
    root = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert int(root.get("tests", "0")) > 30
    assert root.get("failures") == root.get("errors") == "0"
    done = cli("verify", bundle, "--junit", "nowhere/out.xml")
    assert done.returncode == 2
    assert "cannot write nowhere/out.xml: there is no such folder" in done.stderr


def test_a_failure_names_the_folder_that_reproduces_it_and_no_other_bundle():
    folder = Path("reports", "it's mine.explained")
    report = dataclasses.replace(REPORTS["failed"], reproduction=folder, model=Path("mine.onnx"))
    (failure,) = ElementTree.fromstring(to_junit(report)).iter("failure")
    command = f"python {shlex.quote(str(folder / 'reproduce.py'))}"
    assert f"reproduce: {command}" in str(failure.text).splitlines()
    page = html.unescape(to_html(report))
    assert command in page
    assert "In the folder of the bundle" not in page
    assert "Reproduce: python" in to_markdown(report)
