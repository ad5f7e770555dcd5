"""The action for jobs on GitHub, run as its service would: `composite` is the small interpreter."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import onnx
import pytest
import yaml
from composite import ActionResult, Composite
from conftest import ROOT

from attn_export.bundle.manifest import manifest_content, write_manifest
from attn_export.output_folder import sha256

ACTION = ROOT / "action"
UPLOAD = "actions/upload-artifact"
REPORTS = {"report.json", "junit.xml", "report.html"}
# A shell that reads this makes a file `seen`, or changes words of it.
HOSTILE = 'it\'s "a" $(touch seen) `touch seen`; touch seen & ${HOME} \\ %0A * é'

Act = Callable[..., ActionResult]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Return the folder of the job."""
    folder = tmp_path / "work space"
    folder.mkdir()
    return folder


@pytest.fixture
def act(workspace: Path, tmp_path: Path) -> Act:
    """Return a runner of the action; its pip only records its arguments, in `pip.json`."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    pip = tmp_path / "path" / "pip"
    pip.mkdir(parents=True)
    (pip / "__init__.py").touch()
    note = f"open({str(tmp_path / 'pip.json')!r}, 'w').write(json.dumps(sys.argv[1:]))"
    (pip / "__main__.py").write_text(f"import json, sys\n{note}\n")
    environment = {
        "PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": str(pip.parent),
        "PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1",  # if it were the real one after all
    }  # fmt: skip
    (tmp_path / "runner").mkdir()

    def run(**inputs: str) -> ActionResult:
        given = {name.replace("_", "-"): value for name, value in inputs.items()}
        return Composite(ACTION).run(given, workspace, tmp_path / "runner", environment)

    return run


def wrong(bundle: Path, folder: Path) -> Path:
    """Return a copy of a bundle with another scale and correct digests."""
    copy = Path(shutil.copytree(bundle, folder))
    model = onnx.load(copy / "model.onnx")
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    (scale,) = (attribute for attribute in node.attribute if attribute.name == "scale")
    scale.f *= 1.1
    onnx.save(model, copy / "model.onnx")
    write_manifest(copy, manifest_content(copy))
    return copy


def test_a_bundle_that_is_right_passes_with_summary_outputs_and_reports(
    act: Act, workspace: Path, bundle: Path
):
    shutil.copytree(bundle, workspace / "small")
    ran = act(bundle="small", runtimes="ort-cpu\nonnx-reference\n", require="onnx-reference")
    assert ran.code == 0, ran.log
    report = "attn-export-report/report.json"
    assert ran.outputs == {"exit-code": "0", "passed": "true", "report": report}
    assert ran.summary.startswith("## small: passed\n")
    assert "::error" not in ran.log
    said = json.loads((workspace / report).read_text())
    assert {run["runtime"] for run in said["runs"]} == {"ort-cpu", "onnx-reference"}
    uploaded = Path(ran.used[UPLOAD]["path"])
    assert {path.name for path in uploaded.iterdir()} == REPORTS
    assert ran.used[UPLOAD]["name"] == "attn-export-report"
    assert ran.used["actions/setup-python"] == {"python-version": "3.12"}


def test_the_first_example_of_its_page_runs_as_it_is_written(
    act: Act, workspace: Path, bundle: Path
):
    example, *_ = re.findall(r"```yaml\n(.*?)```", (ACTION / "README.md").read_text(), flags=re.S)
    (step,) = (
        step
        for step in yaml.safe_load(example)["jobs"]["parity"]["steps"]
        if "/attn-export/action@" in step["uses"]
    )
    shutil.copytree(bundle, workspace / step["with"]["bundle"])
    ran = act(**step["with"])
    assert ran.code == 0, ran.log
    assert ran.outputs["passed"] == "true"


def test_a_wrong_graph_is_exit_code_6_with_annotations_and_the_reports_are_there(
    act: Act, workspace: Path, bundle: Path
):
    wrong(bundle, workspace / "bad")
    stale = workspace / "out" / "junit.xml"
    stale.parent.mkdir()
    stale.write_text("of an earlier step")
    ran = act(bundle="bad", report_dir="out", artifact="bad report")
    assert ran.code == 6
    assert ran.outputs == {"exit-code": "6", "passed": "false", "report": "out/report.json"}
    assert "::error title=bad%3A ort-cpu%2C standard" in ran.log
    assert ran.summary.startswith("## bad: **failed** (exit code 6)")
    assert {path.name for path in Path(ran.used[UPLOAD]["path"]).iterdir()} == REPORTS
    assert ran.used[UPLOAD]["name"] == "bad report"
    assert int(ElementTree.parse(stale).getroot().get("failures", "0")) > 0


def test_it_builds_and_compares_with_a_baseline(act: Act, workspace: Path, bundle: Path):
    ran = act(
        build="--embed-dim=16\n--num-heads\n2\n\n--dialect=standard\n--output=out",
        runtimes="ort-cpu", python_version="", artifact="",
    )  # fmt: skip
    assert ran.code == 0, ran.log
    assert (workspace / "out" / "model.onnx").is_file()
    assert ran.used.keys() == {"actions/cache"}
    assert act(bundle="out", baseline="nothing.json").outputs["exit-code"] == "2"


@pytest.mark.parametrize(
    ("inputs", "code", "says"),
    [
        ({}, 2, "give either the input `bundle` or the input `build`"),
        ({"bundle": "b", "build": "--variant\nmqa"}, 2, "give either the input `bundle`"),
        ({"build": "--variant=mqa", "baseline": "f"}, 2, "`baseline` is for a `bundle`"),
        ({"bundle": "nothing"}, 2, "nothing is not a bundle"),
        ({"build": "--variant=large"}, 2, "large"),
        ({"bundle": "b", "report_dir": "a file/in"}, 2, "a file"),
    ],
    ids=str,
)
def test_an_error_before_the_report_is_one_annotation(
    inputs: dict[str, str], code: int, says: str, act: Act, workspace: Path
):
    (workspace / "a file").touch()
    ran = act(**inputs)
    assert ran.code == code
    # A bundle that cannot be read has a report with the error in it; wrong usage has none.
    report = "attn-export-report/report.json" if code == 7 else ""
    assert ran.outputs == {"exit-code": str(code), "passed": "false", "report": report}
    (line,) = (line for line in ran.log.splitlines() if line.startswith("::error"))
    assert says in line
    assert (UPLOAD in ran.used) == bool(report)


# -- inputs are data --------------------------------------------------------------------------


def test_paths_are_taken_as_they_are(act: Act, workspace: Path, bundle: Path):
    name = f"{HOSTILE}\nset-output=1".replace("/", "-")
    shutil.copytree(bundle, workspace / name)
    ran = act(bundle=name, report_dir=f"-{name}", artifact=HOSTILE)
    assert ran.code == 0, ran.log
    assert ran.outputs == {
        "exit-code": "0", "passed": "true", "report": f"-{name}/report.json",
    }  # fmt: skip
    assert {path.name for path in (workspace / f"-{name}").iterdir()} == REPORTS
    assert {path.name for path in workspace.iterdir()} == {name, f"-{name}"}
    assert ran.used[UPLOAD]["name"] == HOSTILE
    assert re.fullmatch(r"[\w/.-]+", Path(ran.used[UPLOAD]["path"]).name)


@pytest.mark.parametrize("input_", ["bundle", "build", "runtimes", "require", "baseline"])
@pytest.mark.every(3)
def test_no_input_is_read_by_a_shell_or_becomes_an_option(
    input_: str, act: Act, workspace: Path, bundle: Path
):
    shutil.copytree(bundle, workspace / "small")
    inputs = {"bundle": "small"} | {input_: HOSTILE} | ({"bundle": ""} if input_ == "build" else {})
    ran = act(**inputs)
    assert ran.code in (2, 5, 7), ran.log
    assert "$(touch seen) `touch seen`; touch seen & ${HOME}" in ran.log
    assert {path.name for path in workspace.iterdir()} == {"small", "attn-export-report"}
    if input_ != "build":
        inputs |= {input_: "--help"}
        assert act(**inputs).code in (2, 5, 7)


def test_pip_gets_the_named_packages_and_no_options(act: Act, tmp_path: Path, workspace: Path):
    def installed() -> list[str]:
        words: list[str] = json.loads((tmp_path / "pip.json").read_text())
        return words[words.index("--") + 1 :]

    act(bundle="nothing")
    assert installed() == [f"{ROOT}[cpu]"]
    act(bundle="nothing", require="ort-cuda")
    assert installed() == [f"{ROOT}[gpu]"]
    act(build="nothing")
    assert installed() == [f"{ROOT}[build,gpu]"]
    act(bundle="nothing", install=f"attn-export==0.1.0\n\n--index-url=x\n{HOSTILE}\n")
    assert installed() == ["attn-export==0.1.0", "--index-url=x", HOSTILE]
    assert not (workspace / "seen").exists()


def test_nothing_runs_if_nothing_can_be_installed(
    act: Act, tmp_path: Path, workspace: Path, bundle: Path
):
    (tmp_path / "path" / "pip" / "__main__.py").write_text("raise SystemExit(3)")
    ran = act(bundle=str(bundle))
    assert ran.code == 3
    assert ran.outputs == {"exit-code": "", "passed": "", "report": ""}
    assert list(workspace.iterdir()) == []


ATTEST = "actions/attest-build-provenance"
TOKEN = "ACTIONS_ID_TOKEN_REQUEST_URL"
BUILD = "--embed-dim=16\n--num-heads=2\n--dialect=standard\n--output=out"


def test_a_bundle_that_it_built_is_attested_by_its_digests(
    act: Act, workspace: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(TOKEN, "https://example.com")
    ran = act(build=BUILD, runtimes="ort-cpu", provenance="true")
    assert ran.code == 0, ran.log
    lines = Path(ran.used[ATTEST]["subject-checksums"]).read_text().splitlines()
    digests = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert digests.keys() == {"manifest.json", "model.onnx"}
    assert digests == {name: sha256(workspace / "out" / name) for name in digests}


@pytest.mark.extended
def test_a_build_that_failed_is_not_attested(
    act: Act, workspace: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(TOKEN, "https://example.com")
    gate = "\n--atol=0\n--rtol=0"
    ran = act(build=BUILD + gate, runtimes="ort-cpu", provenance="true")
    assert ran.code == 6
    assert ATTEST not in ran.used


@pytest.mark.parametrize(
    ("inputs", "token", "says"),
    [
        ({"build": BUILD, "provenance": "true"}, "", "needs `permissions: id-token: write"),
        ({"build": "--variant=mqa", "provenance": "true"}, "url", "with a line --output=DIR"),
        ({"bundle": "out", "provenance": "true"}, "url", "is for a `build`"),
        ({"build": BUILD, "provenance": "yes"}, "url", "is `true` or empty, and not 'yes'"),
    ],
    ids=["no permission", "no output", "a bundle", "another word"],
)
def test_provenance_that_cannot_be_had_is_refused_before_the_build(
    inputs: dict[str, str], token: str, says: str, act: Act, workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setenv(TOKEN, token)
    ran = act(**inputs)
    assert (ran.code, ran.log.count("::error")) == (2, 1)
    assert says in ran.log
    assert ATTEST not in ran.used
    assert not (workspace / "out").exists()
