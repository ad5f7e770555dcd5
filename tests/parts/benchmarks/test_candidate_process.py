"""A candidate's process: prepared, given turns, and however it ends one outcome with a reason."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from attn_export.parts.benchmarks import bench as process_module
from attn_export.parts.benchmarks.bench import CandidateProcess, measure, progress_steps
from attn_export.parts.benchmarks.bundle_candidates import gemm_rooflines, read_rooflines
from attn_export.parts.benchmarks.measurements import Candidate, Work
from attn_export.runtimes.protocol import Limits
from attn_export.system_info import FOR_TORCH

LIMITS = Limits(threads=1, seconds=120, memory_mib=None)
TURN = 0.01


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def gemm(tmp_path: Path) -> Candidate:
    """Return a small product in ONNX Runtime."""
    return gemm_rooflines(tmp_path, (32, 32, 32))[1]


def test_candidates_take_turns_and_give_the_times_of_every_run(tmp_path: Path):
    reported: list[str] = []
    candidates = [*gemm_rooflines(tmp_path, (256, 256, 256)), *read_rooflines(tmp_path, mib=8)]
    found = measure(
        candidates, rounds=2, turn_seconds=TURN, limits=LIMITS, advance=reported.append
    )  # fmt: skip
    assert [m.name for m in found] == [c.name for c in candidates]
    assert {m.outcome for m in found} == {"ran"}
    assert all(len(m.seconds) >= 2 and min(m.seconds) > 0 for m in found)
    assert len(reported) == progress_steps(candidates, 2)
    # Every round has all of them in the same order.
    turns = [line.split(":")[0] for line in reported if "round" in line]
    assert turns == [c.name for c in candidates] * 2
    # No machine computes slower or faster than that.
    assert all(1e8 < m.flops_per_second < 1e14 for m in found[:2])
    assert all(1e8 < m.bytes_per_second < 1e13 for m in found[2:])
    assert all(m.growth is not None and 0 <= m.growth < 1 << 30 for m in found)


def test_between_its_turns_a_process_takes_no_time(gemm: Candidate):
    process = CandidateProcess(gemm, Limits(threads=2, seconds=60, memory_mib=None))
    try:
        process.prepare()
        process.turn(TURN)
        time.sleep(0.3)  # threads of ONNX Runtime spin for a while after a run
        assert process.pid is not None
        before = cpu_seconds(process.pid)
        time.sleep(1)
        assert cpu_seconds(process.pid) - before < 0.1
    finally:
        process.close()


def test_a_refused_graph_does_not_stop_the_others(gemm: Candidate, tmp_path: Path):
    absent = Candidate(
        "absent", "peer", "graph", {**gemm.options, "file": str(tmp_path / "no.onnx")}, Work()
    )
    found = measure([absent, gemm], rounds=1, turn_seconds=TURN, limits=LIMITS)
    assert found[0].outcome == "refused"
    assert "no.onnx" in found[0].reason
    assert found[0].seconds == ()
    assert found[1].ran


@pytest.mark.parametrize("alone", [False, True])
def test_a_process_that_crashes_is_not_run_with_the_reason(
    alone: bool, gemm: Candidate, monkeypatch: pytest.MonkeyPatch
):
    program = "import sys; sys.stdin.readline(); sys.exit('libfoo.so is missing')"
    monkeypatch.setattr(process_module, "child_command", lambda *_: [sys.executable, "-c", program])
    crashing = Candidate("crashing", "peer", "graph", gemm.options, Work(), alone=alone)
    (found,) = measure([crashing], rounds=2, turn_seconds=TURN, limits=LIMITS)
    assert (found.ran, found.outcome) == (False, "crashed")
    assert "libfoo.so is missing" in found.reason


def test_killed_between_its_turns_it_has_no_times(gemm: Candidate):
    process = CandidateProcess(gemm, LIMITS)
    process.prepare()
    process.turn(TURN)
    assert process.measured().ran
    os.kill(process.pid or 0, signal.SIGKILL)
    process.turn(TURN)
    found = process.measured()
    assert (found.ran, found.outcome) == (False, "crashed")
    assert "SIGKILL" in found.reason


def test_an_impossible_candidate_has_no_process_and_a_reason():
    process = CandidateProcess(
        Candidate("x", "peer", "spec", {}, Work(), reason="no torch"), LIMITS
    )
    process.prepare()
    process.turn(TURN)
    found = process.measured()
    assert (process.pid, found.outcome, found.reason) == (None, "not run", "no torch")


def test_a_large_one_lives_for_its_own_turns_only(gemm: Candidate):
    alone = Candidate(gemm.name, "peer", "graph", gemm.options, Work(), alone=True)
    process = CandidateProcess(alone, LIMITS)
    assert process.pid is None
    for _ in range(2):
        process.turn(TURN)
        assert process.pid is None
    assert len(process.measured().seconds) >= 2


def test_a_candidate_has_the_environment_that_users_have(gemm: Candidate, monkeypatch):
    for name, value in FOR_TORCH.items():
        monkeypatch.setenv(name, value)
    process = CandidateProcess(gemm, LIMITS)
    try:
        until = time.monotonic() + 30
        while not (environment := Path(f"/proc/{process.pid}/environ").read_bytes()):
            assert time.monotonic() < until
            time.sleep(0.01)  # the new program is being loaded
    finally:
        process.close()
    assert b"PATH=" in environment
    assert not any(name.encode() in environment for name in FOR_TORCH)
