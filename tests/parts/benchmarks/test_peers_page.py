"""The workloads with their goals, who takes part, and the page that says what was reached."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from conftest import ROOT
from measuring import workload_candidates as candidates_module
from measuring.goals import OURS, workloads
from measuring.peers_page import peers_page, unmet
from measuring.workload_candidates import workload_candidates

from attn_export.parts.benchmarks import peers
from attn_export.parts.benchmarks.measurements import (
    BenchReport,
    Candidate,
    Measured,
    Work,
    WorkloadResult,
)
from attn_export.parts.benchmarks.peers import BARE, STATIC
from attn_export.report.tables import UNMEASURED

BY_NAME = {workload.name: workload for workload in workloads()}
MADE = {"versions": {"torch": "x"}, "processor": "a processor", "cores": 2, "system": "Linux",
        "python": "3"}  # fmt: skip
TIMES = {"lower": 0.01, "torch.onnx.export": 1.0}


def result(workload, growth: int = 10 << 20, **medians: float) -> WorkloadResult:
    roof = Measured(Candidate("sgemm", "roof", "roof", {}, Work(flops=1e9)), (0.01,))
    found = [
        Measured(
            Candidate(name, "ours" if name == OURS else "peer", "graph", {}, workload.dims.work),
            (seconds,), growth,
        )
        for name, seconds in medians.items()
    ]  # fmt: skip
    return WorkloadResult(workload.name, workload.dims.sizes, (*found, roof))


def report(*results: WorkloadResult) -> BenchReport:
    return BenchReport("peers", results, 2, 7, MADE)


def test_every_workload_is_there_for_attention_alone_and_for_the_layer():
    assert len(BY_NAME) == 22
    assert sum(workload.of_layer for workload in BY_NAME.values()) == 11
    mqa = BY_NAME["decode MQA, B 8, S 8192"]
    assert [(g.against, g.limit) for g in mqa.goals] == [(STATIC, 0.35), (BARE, 0.08)]
    assert mqa.dims.past_len == 8191
    long = BY_NAME["prefill full, L 8192"]
    assert [g.text for g in long.goals] == ["≤ 0.85", "≤ 300 MiB"]
    assert [g.limit for g in BY_NAME["prefill causal, L 8192"].goals] == [1.03, 320]


def test_the_work_of_attention_is_two_products_and_one_read_of_the_cache():
    dims = BY_NAME["decode GQA, B 8, S 4096"].dims
    assert dims.work.flops == 2 * 2 * 8 * 16 * 4096 * 64
    assert dims.work.bytes == 2 * 8 * 4 * 4096 * 64 * 4
    assert dims.work.tokens == 8
    full, causal = (BY_NAME[f"prefill {kind}, L 2048"].dims.work for kind in ("full", "causal"))
    assert causal.flops / full.flops == pytest.approx(0.5, abs=1e-3)


def test_a_goal_that_is_not_met_keeps_its_row_and_its_number():
    workload = BY_NAME["decode MQA, B 8, S 8192"]
    slow = result(workload, **{OURS: 0.003, STATIC: 0.006, BARE: 0.05})
    page = peers_page(report(slow), [workload], TIMES, "scripts/bench_peers")
    assert f"| {workload.name} | {STATIC} | 3.00 ms | 6.00 ms | 0.500 | ≤ 0.35 | **no** |" in page
    assert f"| {workload.name} | {BARE} | 3.00 ms | 50.0 ms | 0.0600 | ≤ 0.08 | yes |" in page
    assert "| 10.0 ms | 1000 ms | 0.0100 | ≤ 0.05 | yes |" in page
    assert unmet(report(slow), [workload], TIMES) == [f"{workload.name}, {STATIC}: 0.5, ≤ 0.35"]


def test_an_unmeasured_goal_is_not_met_and_has_a_reason():
    workload = BY_NAME["decode MHA, B 8, S 4096"]
    ran = result(workload, **{OURS: 0.003, STATIC: 0.006})
    absent = Measured(
        Candidate(BARE, "peer", "graph", {}, Work()), outcome="crashed", reason="SIGKILL"
    )
    some = dataclasses.replace(ran, measured=(*ran.measured, absent))
    page = peers_page(report(some), [workload], {}, "scripts/bench_peers")
    unmeasured = f"{UNMEASURED} ms | {UNMEASURED}"
    assert f"| {BARE} | 3.00 ms | {unmeasured} | ≤ 0.40 | not measured |" in page
    assert f"- {BARE} crashed: SIGKILL ({workload.name})" in page
    assert math.isnan(workload.goals[1].figure(some))
    assert not workload.goals[1].met(some)


def test_memory_and_roofs_are_goals_too():
    long, short = BY_NAME["prefill full, L 8192"], BY_NAME["short prefill, L 256"]
    big = result(long, growth=400 << 20, **{OURS: 1.0, "torch SDPA": 1.0})
    assert [goal.met(big) for goal in long.goals] == [False, False]
    small = result(long, growth=200 << 20, **{OURS: 0.8, "torch SDPA": 1.0, BARE: 0.9})
    assert [goal.figure(small) for goal in long.goals] == [pytest.approx(0.8 / 0.9), 200]
    # The roofline is 100 GFLOP/s.
    quick = result(short, **{OURS: short.dims.work.flops / 95e9})
    assert short.goals[0].figure(quick) == pytest.approx(0.95)
    assert short.goals[0].met(quick)
    assert "95.0 GFLOP/s | 100 GFLOP/s | 0.950 | ≥ 0.90 | yes |" in peers_page(
        report(quick), [short], {}, "x"
    )


def test_large_peers_live_alone_and_a_missing_package_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peers, "not_installed", lambda name: f"{name} is not installed")
    found = {c.name: c for c in workload_candidates(BY_NAME["prefill causal, L 8192"], tmp_path)}
    alone = {name for name, c in found.items() if c.alone}
    assert {BARE, "OpenVINO f32"} <= alone <= found.keys() - {OURS, "torch SDPA", "torch.compile"}
    assert found["OpenVINO f32"].reason == "openvino is not installed"
    assert found["torch SDPA"].reason == "torch is not installed"
    assert found[OURS].reason == ""
    decode = {
        c.name: c for c in workload_candidates(BY_NAME["decode GQA, B 8, S 4096"], tmp_path / "d")
    }
    assert "OpenVINO f32" not in decode
    assert decode[OURS].options["bound"]
    assert not any(c.alone for c in decode.values())


def test_a_graph_that_cannot_be_lowered_is_not_run(tmp_path: Path, monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("no graph")

    monkeypatch.setattr(candidates_module, "lowered_graphs", refuse)
    ours = workload_candidates(BY_NAME["prefill full, L 2048"], tmp_path)[0]
    assert (ours.name, ours.reason) == (OURS, "RuntimeError: no graph")


@pytest.mark.extended
def test_the_script_measures_a_workload_and_writes_page_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    loader = SourceFileLoader("bench_peers", str(ROOT / "scripts" / "bench_peers"))
    spec = importlib.util.spec_from_loader("bench_peers", loader)
    script = importlib.util.module_from_spec(spec)
    loader.exec_module(script)
    workload = BY_NAME["short prefill, L 128"]
    dims = dataclasses.replace(workload.dims, query_len=16, key_len=16)
    monkeypatch.setattr(script, "workloads", lambda: [dataclasses.replace(workload, dims=dims)])
    monkeypatch.setattr(
        script, "workload_candidates", without("torch.compile", script.workload_candidates)
    )
    monkeypatch.setattr(script, "dialect_times", lambda *_: TIMES)
    monkeypatch.setattr(script, "TURN_SECONDS", 0.01)
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")  # which the script sets
    monkeypatch.setattr("sys.argv", ["bench_peers", "--rounds", "1", "--threads", "1"])
    script.main()
    assert "ours: " in capsys.readouterr().err
    figures = json.loads((tmp_path / "peers.json").read_text())
    assert [goal["against"] for goal in figures["goals"]] == ["sgemm roof"]
    ran = {c["name"]: c["median_ms"] for c in figures["workloads"][0]["candidates"]}
    # OpenVINO is a candidate too, where it is installed.
    assert all(ran[name] > 0 for name in (OURS, "torch SDPA", BARE))
    assert "short prefill, L 128" in (tmp_path / "peers.md").read_text()


def without(name: str, call):
    """Return the candidates without one candidate, which takes long."""
    return lambda *given: [c for c in call(*given) if c.name != name]
