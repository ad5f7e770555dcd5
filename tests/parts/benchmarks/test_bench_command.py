"""`attn-export bench` as a user meets it."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Cli
from msgspec.structs import replace
from shared import bundle_of

from attn_export.bundle.manifest import read_manifest
from attn_export.commands.main import run
from attn_export.errors import UsageError
from attn_export.interface import Input
from attn_export.parts.benchmarks import bench as job
from attn_export.parts.benchmarks import bundle_candidates, peers
from attn_export.parts.benchmarks.bundle_candidates import work_of
from attn_export.parts.benchmarks.feeds import Feed, feeds_of, output_feeds
from attn_export.runtimes.engines.ort_cpu import OrtCpu
from attn_export.schema import Manifest
from attn_export.spec import AttentionSpec

SMALL = ("--prefill", "16", "--decode", "24", "--rounds", "1", "--threads", "1")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small rooflines, short turns, and nothing that must be compiled."""
    monkeypatch.setattr(
        bundle_candidates,
        "gemm_rooflines",
        functools.partial(bundle_candidates.gemm_rooflines, sizes=(64, 64, 64)),
    )
    monkeypatch.setattr(
        bundle_candidates,
        "read_rooflines",
        functools.partial(bundle_candidates.read_rooflines, mib=4),
    )

    measure = job.measure

    def measured(candidates, **options):
        some = [c for c in candidates if c.name != "torch.compile"]
        return measure(some, **{**options, "turn_seconds": 0.01})

    monkeypatch.setattr(job, "measure", measured)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a system without torch."""
    for module in (bundle_candidates, peers):
        monkeypatch.setattr(module, "not_installed", lambda name: f"{name} is not installed")


def candidates(report: dict, number: int) -> dict:
    return {c["name"]: c for c in report["workloads"][number]["candidates"]}


@pytest.mark.usefixtures("quick")
def test_a_table_and_every_figure(bundle: Path, tmp_path: Path, capsys):
    files = ("--json", str(tmp_path / "b.json"))
    assert run(["bench", str(bundle), *SMALL, *files]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "\x1b" not in shown.out
    lines = [line for line in shown.out.splitlines() if not line.startswith("warning: ")]
    assert all(len(line) <= 80 for line in lines)
    for word in ("median ms", "p95 ms", "tokens/s", "MiB", "to peer", "of roof",
                 "prefill, B 1, L 16", "decode, B 1, S 24"):  # fmt: skip
        assert word in shown.out
    report = json.loads((tmp_path / "b.json").read_text())
    assert (report["format"], report["threads"], report["rounds"]) == ("attn-export-bench/1", 1, 1)
    decode = candidates(report, 1)
    assert report["workloads"][1]["sizes"]["past_len"] == 23
    assert {"torch SDPA", "torch static cache", "bare export, ORT"} <= decode.keys()
    ours = [c for c in decode.values() if c["role"] == "ours"]
    assert ours
    for candidate in (*ours, decode["bare export, ORT"]):
        assert candidate["outcome"] == "ran", candidate["reason"]
        for figure in ("median_ms", "p95_ms", "tokens_per_second", "ratio_to_best_peer",
                       "fraction_of_roof"):  # fmt: skip
            assert candidate[figure] > 0


@pytest.mark.usefixtures("quick", "no_torch")
def test_without_a_spec_or_torch_the_peers_are_not_run_with_the_reason(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    assert run(["bench", str(bundle), *SMALL]) == 0
    assert "torch SDPA not run: torch is not installed" in capsys.readouterr().out
    monkeypatch.setattr(job, "bundle_spec", lambda *_: None)
    assert run(["bench", str(bundle), *SMALL]) == 0
    assert "torch SDPA not run: the bundle has no spec.toml" in capsys.readouterr().out


@pytest.mark.usefixtures("quick", "no_torch")
def test_a_graph_that_does_not_run_is_exit_code_5(bundle: Path, monkeypatch, capsys):
    monkeypatch.setattr(bundle_candidates, "output_feeds", lambda *_: {"output": Feed((1, 1, 1))})
    assert run(["bench", str(bundle), "--quiet", *SMALL]) == 5
    assert "refused" in capsys.readouterr().err


def test_wrong_use_is_one_line_and_a_code(cli: Cli, bundle: Path, tmp_path: Path):
    for arguments, code, message in (
        (("nowhere",), 2, "not a bundle"),
        ((bundle, "--chart", "x.svg"), 2, "--chart was removed in 0.3.0"),
        ((bundle, "--json", "no/x.json"), 2, "no such folder"),
        ((bundle, "--prefill", "0"), 2, "0"),
        ((), 2, "BUNDLE"),
    ):
        done = cli("bench", *arguments)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.count("\n") == 1
        assert message in done.stderr
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    (copy / "model.onnx").write_bytes((copy / "model.onnx").read_bytes()[:-1])
    assert cli("bench", copy).returncode == 7


def test_decoding_needs_a_cache(capsys):
    assert run(["bench", str(bundle_of("no-cache")), "--decode", "8"]) == 2
    assert "no cache" in capsys.readouterr().err


def test_without_onnx_runtime_it_says_so_in_one_line(bundle: Path, monkeypatch, capsys):
    from attn_export.runtimes.engines import ort_cpu

    monkeypatch.setattr(ort_cpu, "find_spec", lambda _: None)
    assert run(["bench", str(bundle)]) == 5
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "onnxruntime is not installed" in said


def test_the_parent_never_imports_torch(bundle: Path):
    code = (
        "import sys, attn_export.parts.benchmarks.bench as job\n"
        "job.measure = lambda candidates, **_: ()\n"
        f"job.bench({str(bundle)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_feeds_hide_nothing_and_fill_the_past():
    inputs = {
        "query": Input(("batch", "query_len", 8)),
        "attn_mask": Input(("batch", 1, 1, "total_len"), "bool"),
        "past_length": Input(("batch",), "int64"),
        "ids": Input(("batch",), "int64"),
        "attention_mask": Input(("batch", "total_len"), "int64"),
    }
    sizes = {"batch": 2, "query_len": 1, "past_len": 6, "total_len": 7}
    found = feeds_of(inputs, sizes)
    assert found["query"] == Feed((2, 1, 8))
    assert (found["attn_mask"].shape, found["attn_mask"].fill) == ((2, 1, 1, 7), 1)
    assert found["attention_mask"] == Feed((2, 7), "int64", 1)
    assert (found["past_length"].fill, found["ids"].fill) == (6, 0)
    assert list(output_feeds({"a": ("batch", 3), "b": ("other",)}, sizes)) == ["a"]
    with pytest.raises(UsageError, match="'height'"):
        feeds_of({"image": Input(("batch", "height"))}, sizes)


def test_the_work_of_a_layer_is_that_of_its_projections_and_its_attention():
    sizes = {"batch": 2, "query_len": 1, "past_len": 9, "key_len": 10}
    spec = AttentionSpec(embed_dim=8, num_heads=2, num_kv_heads=1, causal=True, cache="append")
    weights = 8 * 8 * 2 + 8 * 4 * 2
    work = work_of(spec, sizes)
    assert work.flops == 2 * 2 * (10 * 2 * 8 + weights)
    assert work.bytes == 4 * (2 * 10 * 1 * 8 + weights)
    assert np.isclose(work.tokens, 2)
    windowed = AttentionSpec(embed_dim=8, num_heads=2, causal=True, window_left=3)
    assert work_of(windowed, sizes).flops == 0


def test_graphs_that_cannot_run_here_are_no_candidates(bundle: Path, tmp_path: Path):
    manifest = read_manifest(bundle)
    limit = next(iter(OrtCpu.unsupported))
    entry = replace(manifest.graphs["model.onnx"], features=tuple(limit.split(" with ")))
    changed = replace(manifest, graphs={**manifest.graphs, "model.onnx": entry})
    sizes = dict.fromkeys(("batch", "query_len", "past_len"), 1)
    sizes |= dict.fromkeys(("total_len", "key_len", "capacity"), 2)

    def ours(manifest: Manifest) -> set[str]:
        found = bundle_candidates.BundleCandidates(bundle, tmp_path, manifest, None)
        return {one.name for one in found.candidates(sizes, decode=True) if one.role == "ours"}

    assert ours(manifest) - ours(changed) == {"standard ort-cpu"}
    assert ours(changed) < ours(manifest)
