"""JUnit XML, as CI systems read it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import Cli
from reports import clean, mixed

from attn_export.report.junit import to_junit

# What the schema of Jenkins' xUnit plugin (junit-10.xsd) lets an element have: children, the
# attributes that it must have, those that it may have.
SCHEMA = {
    "testsuites": ({"testsuite"}, set(), {"name", "time", "tests", "failures", "errors"}),
    "testsuite": (
        {"properties", "testcase"},
        {"name", "tests", "failures", "errors"},
        {"group", "time", "skipped", "timestamp", "hostname", "id", "package", "file"},
    ),
    "properties": ({"property"}, set(), set()),
    "property": (set(), {"name", "value"}, set()),
    "testcase": ({"skipped", "error", "failure"}, {"name"}, {"time", "classname", "group"}),
    "failure": (set(), set(), {"type", "message"}),
    "error": (set(), set(), {"type", "message"}),
    "skipped": (set(), set(), {"type", "message"}),
}


@pytest.mark.parametrize("report", [mixed(), clean()], ids=["mixed", "clean"])
def test_it_is_what_the_schema_allows(report):
    root = ElementTree.fromstring(to_junit(report))
    assert root.tag == "testsuites"
    for element in root.iter():
        children, must, may = SCHEMA[element.tag]
        assert {child.tag for child in element} <= children
        assert must <= element.attrib.keys() <= must | may
    for case in root.iter("testcase"):
        assert len(case) <= 1


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
