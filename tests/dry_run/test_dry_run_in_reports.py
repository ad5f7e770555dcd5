"""Dry runs of CUDA as a section of a bundle's report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import Cli
from report_schema import validator

from attn_export import build, verify
from attn_export.errors import GraphError, RuntimeFailure
from attn_export.jobs import dry_run as job
from attn_export.report.dry_run_report import MEANING
from attn_export.report.progress import Progress
from attn_export.results import GraphFile
from attn_export.spec import AttentionSpec

SPEC = {
    "embed_dim": 64, "num_heads": 4, "causal": True, "cache": "in-place", "dtype": "float16",
}  # fmt: skip


@pytest.mark.usefixtures("need_dry_run")
def test_the_report_of_a_build_names_the_kernels_and_no_verdict_uses_them(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ATTN_EXPORT_DRY_RUN")  # which is the default of users
    spec = AttentionSpec.from_dict(SPEC)
    (tmp_path / "layer.toml").write_text(spec.to_toml())
    done = cli("build", "layer.toml", "--runtime", "ort-cpu", "--output", "b")
    assert done.returncode == 0, done.stderr
    assert MEANING in done.stdout

    report = json.loads((tmp_path / "b" / "report.json").read_text())
    validator().validate(report)
    seen = {(one["graph"], one["architecture"]) for one in report["dry_runs"]}
    graphs = {path.name for path in (tmp_path / "b").glob("*.onnx")}
    assert "model.cuda.decode.onnx" in graphs
    assert seen == {(graph, arch) for graph in graphs for arch in ("sm_80", "sm_90")}
    (decode,) = (
        step for one in report["dry_runs"] for step in one["steps"]
        if (one["graph"], one["architecture"]) == ("model.cuda.decode.onnx", "sm_80")
    )  # fmt: skip
    assert decode["attention"]
    assert {verdict["runtime"] for verdict in report["verdicts"]} == {"ort-cpu"}

    best = {(one["architecture"], one["step"]): one for one in report["best_graphs"]}
    assert best.keys() == {(a, s) for a in ("sm_80", "sm_90") for s in ("prefill", "decode")}
    assert best["sm_80", "decode"]["graph"] == "model.cuda.decode.onnx"

    page = (tmp_path / "b" / "report.html").read_text()
    assert "best by count on sm_80 A100, decode: model.cuda.decode.onnx, " in page
    assert '<h2 id="dry-run" class="dry">CUDA, in a dry run</h2>' in page
    assert decode["attention"][0] in page
    assert re.search(r"<li>model\.cuda\.decode\.onnx: device memory \d+ MiB at most</li>", page)
    assert verify(tmp_path / "b", runtimes=["ort-cpu"]).passed


def test_reports_have_no_such_section_where_it_is_not_wanted(bundle: Path):
    assert json.loads((bundle / "report.json").read_text())["dry_runs"] == []
    assert "dry run" not in (bundle / "report.html").read_text()


@pytest.mark.parametrize(("wish", "there", "runs"), [
    (None, True, True), (None, False, False), (True, True, True), (False, True, False),
])  # fmt: skip
def test_a_dry_run_is_made_where_it_is_possible_and_not_declined(
    wish: bool | None, there: bool, runs: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(job, "not_ready", lambda: "" if there else "it is not built")
    assert job.can_dry_run(required=wish) is runs


@pytest.mark.usefixtures("need_dry_run")
def test_a_process_that_ends_early_is_a_refusal_in_a_report(tmp_path: Path):
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    one = (tmp_path, [GraphFile("model.onnx")], None, Progress())
    with pytest.raises(GraphError):
        job.observe_all(*one)
    refused = {found.refused for found in job.observe_all(*one, for_report=True)}
    assert len(refused) == 1
    assert "model.onnx" in refused.pop()


def test_a_dry_run_without_the_stand_in_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(job, "not_ready", lambda: "it is not built; run scripts/setup_runtimes")
    spec = AttentionSpec.from_dict(SPEC)
    with pytest.raises(RuntimeFailure, match="no dry run of CUDA: it is not built"):
        build(spec, tmp_path / "b", dry_run=True)
    assert not (tmp_path / "b").exists()
