"""Dry runs of CUDA beside a build: `dry-run BUNDLE` makes them, `build` does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import shared
from conftest import Cli

from attn_export import verify
from attn_export.errors import RuntimeFailure
from attn_export.parts.cuda_dry_run.dry_run import dry_run
from attn_export.parts.cuda_dry_run.dry_run_report import MEANING
from attn_export.parts.installing import VARIABLE
from attn_export.spec import AttentionSpec

SPEC = {
    "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "causal": True, "cache": "in-place",
    "dtype": "float16", "rotary": "half", "window_left": 4,
}  # fmt: skip
"""That of tests/parts/cuda_dialect, whose bundle is shared."""


@pytest.mark.usefixtures("need_dry_run")
def test_a_dry_run_of_a_bundle_shows_each_graph_and_the_best_and_changes_nothing(
    cli: Cli, tmp_path: Path
):
    bundle = shared.passed_bundle(AttentionSpec.from_dict(SPEC))
    before = {path: path.stat().st_mtime_ns for path in bundle.rglob("*")}
    done = cli("dry-run", bundle, "--json", tmp_path / "seen.json")
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    found = {(one["graph"], one["architecture"]): one for one in seen["graphs"]}
    graphs = {path.name for path in bundle.glob("*.onnx")}
    assert "model.cuda.decode.onnx" in graphs
    assert found.keys() == {(graph, arch) for graph in graphs for arch in ("sm_80", "sm_90")}
    (decode,) = found["model.cuda.decode.onnx", "sm_80"]["steps"]
    assert decode["attention"]
    best = {(one["architecture"], one["step"]): one for one in seen["best_graphs"]}
    assert best.keys() == {(a, s) for a in ("sm_80", "sm_90") for s in ("prefill", "decode")}
    assert best["sm_80", "decode"]["graph"] == "model.cuda.decode.onnx"

    assert MEANING in done.stdout
    assert decode["attention"][0] in done.stdout
    assert "best by count on sm_80 A100, decode: model.cuda.decode.onnx, " in done.stdout
    line = r"^model\.cuda\.decode\.onnx: device memory \d+ MiB at most"
    assert re.search(line, done.stdout, re.MULTILINE)
    assert {path: path.stat().st_mtime_ns for path in bundle.rglob("*")} == before
    assert verify(bundle, runtimes=["ort-cpu"]).passed


@pytest.mark.usefixtures("need_dry_run")
def test_a_build_makes_no_dry_run_where_the_libraries_are_there(cli: Cli, tmp_path: Path):
    small = ("--embed-dim", "32", "--num-heads", "4", "--dialect", "standard")
    done = cli("build", "--variant", "mqa", *small, "--runtime", "ort-cpu")
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, *map(Path.read_text, tmp_path.glob("models/mqa/report.*"))):
        assert "dry run" not in text
        assert "dry_run" not in text


def test_without_the_stand_in_a_dry_run_is_refused(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeFailure, match="no dry run of CUDA: the stand-in libraries of CUDA"):
        dry_run(bundle)
