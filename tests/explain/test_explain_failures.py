"""Explanations of failures in every output: terminal, JSON, page, summary and tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import ROOT, Cli, command, on
from graph_faults import bundle_of
from graph_surgery import Graph
from hard_faults import row_beyond_the_end

from attn_export import verify
from attn_export.commands import explain_bundle as job
from attn_export.commands import explain_failures
from attn_export.commands.assert_parity import failure
from attn_export.commands.explain_bundle import explain
from attn_export.explain.graph_run import GoldenCase, GraphRun
from attn_export.results import Case, Golden
from attn_export.runtimes.process import RunResult

CAUSE = "the graph is wrong: the causal mask is not applied"


@pytest.fixture(scope="module")
def wrong(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle's graph without its causal mask."""
    path = tmp_path_factory.mktemp("wrong") / "wrong.onnx"
    model = onnx.load(bundle / "model.onnx")
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    next(a for a in node.attribute if a.name == "is_causal").i = 0
    onnx.save(model, path)
    return path


def test_verify_says_why_everywhere(bundle: Path, wrong: Path, tmp_path: Path):
    summary = tmp_path / "summary.md"
    options = ("--runtime", "ort-cpu", "--json", "report.json", "--html", "report.html")
    got = subprocess.run(
        command(("verify", bundle, "--graph", wrong, *options)),
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "GITHUB_STEP_SUMMARY": str(summary)},
    )  # fmt: skip
    assert got.returncode == 6
    assert f"why: ort-cpu, wrong.onnx: {CAUSE}" in got.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert CAUSE in report["explanations"][0]
    assert "<h2>Why</h2>" in (tmp_path / "report.html").read_text()
    assert "### Why" in summary.read_text()


def test_a_graph_too_large_for_float64_is_not_explained(bundle: Path, wrong: Path, monkeypatch):
    report = verify(bundle, runtimes=["ort-cpu"], graph=wrong)
    monkeypatch.setattr(job, "_TIMES_LARGER", 2**40)
    (says,) = explain_failures.explain_failures(report, bundle, wrong).explanations
    assert says.startswith("ort-cpu: not explained: ")
    assert "in float64, and at most" in says


def test_a_gate_that_the_rule_would_let_pass_is_not_explained(bundle: Path):
    report = verify(bundle, runtimes=["ort-cpu"], atol=0.0, rtol=0.0)
    assert not report.passed
    assert explain_failures.explain_failures(report, bundle).explanations == ()


def test_an_explanation_ends_when_its_work_is_done(bundle: Path, wrong: Path):
    report = verify(bundle, graph=wrong, runtimes=["ort-cpu"])
    assert len(explain_failures.explain_failures(report, bundle, wrong).explanations) == 1
    assert explain_failures.explain_failures(report, bundle, wrong, seconds=0.0).explanations == ()


def test_the_report_is_there_after_an_interrupted_explanation(
    bundle: Path, wrong: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    report = verify(bundle, graph=wrong, runtimes=["ort-cpu"])
    monkeypatch.setattr(job, "explain", interrupted)
    said = explain_failures.explain_failures(report, bundle, wrong)
    assert said.explanations == ("ort-cpu: not explained: interrupted",)
    assert said.verdicts == report.verdicts


def test_an_assertion_message_begins_with_the_cause(bundle: Path, wrong: Path):
    report = verify(bundle, graph=wrong, runtimes=["ort-cpu"])
    said = failure(explain_failures.explain_failures(report, bundle, wrong))
    assert said.startswith(f"no parity: ort-cpu, wrong.onnx: {CAUSE}")
    assert "array(" not in said


def test_the_command_prints_the_sentence_first_and_json_alone(
    bundle: Path, wrong: Path, cli: Cli, tmp_path: Path
):
    shared = ("explain", bundle, "--runtime", "ort-cpu", "--graph", wrong, "--output", "folder")
    got = cli(*shared)
    assert got.returncode == 6, got.stderr
    first, *rest = got.stdout.splitlines()
    assert CAUSE in first
    assert "reproduce: python folder/reproduce.py" in rest
    assert "\x1b" not in got.stdout
    got = cli(*shared, "--json", "-", "--case", "base")
    content = json.loads(got.stdout)
    assert content["format"] == "attn-export-explanation/1"
    assert (content["fault"], content["cases"]) == ("graph", 1)
    assert content["first"]["operator"] == "Attention"


def test_a_node_that_nothing_can_compute_is_a_cause_with_code_and_json(cli: Cli, tmp_path: Path):
    graph = Graph(onnx.load(bundle_of("gqa") / "model.onnx"))
    row_beyond_the_end(graph)
    onnx.save(graph.model, tmp_path / "changed.onnx")
    options = ("--runtime", "ort-cpu", "--graph", "changed.onnx", "--json", "-")
    got = cli("explain", bundle_of("gqa"), *options, "--output", "folder")
    assert got.returncode == 6, got.stderr
    content = json.loads(got.stdout)
    (cause,) = [c for c in content["causes"] if c["kind"] == "cannot be computed"]
    assert cause["node"] == "planted_row"
    assert "index 3 is out of bounds" in content["sentence"]
    report = verify(bundle_of("gqa"), graph=tmp_path / "changed.onnx", runtimes=["ort-cpu"])
    (sentence,) = explain_failures.explain_failures(
        report, bundle_of("gqa"), tmp_path / "changed.onnx"
    ).explanations
    assert "Gather planted_row cannot be computed" in sentence


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--runtime", "ort"), 2, "unknown runtime 'ort'"),
        (("--runtime", "ort-cpu", "--option", "x"), 2, "--option is KEY=VALUE; got 'x'"),
        (("--runtime", "ort-cpu", "--graph", "none.onnx"), 2, "cannot read none.onnx"),
        (("--runtime", "ort-cpu", "--case", "x"), 2, "there is no case 'x'"),
        ((), 2, "Missing option '--runtime'"),
    ],
)
def test_wrong_usage_is_one_line(
    bundle: Path, cli: Cli, options: tuple[str, ...], code: int, says: str
):
    got = cli("explain", bundle, *options)
    assert (got.returncode, got.stdout) == (code, "")
    assert says in got.stderr
    assert got.stderr.count("\n") == 1


def test_a_healthy_bundle_gives_0_and_no_folder(bundle: Path, cli: Cli, tmp_path: Path):
    got = cli("explain", bundle, "--runtime", "ort-cpu", "--output", "folder")
    assert got.returncode == 0
    assert "nothing to explain" in got.stdout
    assert not (tmp_path / "folder").exists()


def test_the_reproducer_is_not_named_after_a_path_of_this_machine(
    bundle: Path, wrong: Path, tmp_path: Path
):
    explain(bundle, on("ort-cpu"), graph=wrong, output=tmp_path / "folder")
    for path in (tmp_path / "folder").iterdir():
        assert str(ROOT).encode() not in path.read_bytes()


def test_failing_cases_are_grouped_by_the_size_of_their_errors():
    reference = np.ones((2, 3))

    def case(name: str) -> GoldenCase:
        made = Case(name, "shape", {}, {}, "")
        return GoldenCase(name, {}, {}, Golden(made, {"y": reference}, {}, {}, {}))

    errors = {"all": 1e-4, "left": 0.3, "other": 2e-4, "padded": 0.2, "other shape": None}
    outputs = {n: {"y": reference[:1] if e is None else reference + e} for n, e in errors.items()}
    ran = RunResult("ran", "", outputs, {}, {})
    failed = tuple(map(case, outputs))
    groups = GraphRun(ran, failed, ()).groups()
    assert [[case.name for case in group] for group in groups] == [
        ["left", "padded", "other shape"], ["all", "other"],
    ]  # fmt: skip
    assert GraphRun(ran, failed[:1], ()).groups() == [[failed[0]]]
