"""A runtime's process: each way in which it ends is one outcome with one reason."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from processes import gone, worker_after

from attn_export.bundle.golden import stored_cases
from attn_export.runtimes import process
from attn_export.runtimes.catalogue import all_runtimes, runtime
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Limits
from attn_export.tensorfile import write_tensors

pytestmark = pytest.mark.usefixtures("new_processes")
LIMITS = Limits(threads=1, seconds=60, memory_mib=None)


def model(path: Path, op: str, *, domain: str = "") -> Path:
    """Save a graph of one node from `x [n]` to `y`."""
    node = helper.make_node(op, ["x"], ["y"], domain=domain)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
    opsets = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, 1)] if domain else [])]
    proto = helper.make_model(
        helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=10
    )
    onnx.save(proto, path)
    return path


def one_case(folder: Path, array: np.ndarray) -> tuple[str, Path, Path]:
    """Write a case to disk; return its name, its inputs, and a folder for its outputs."""
    source = folder / "case"
    source.mkdir()
    write_tensors(source, "input", {"x": array})
    return ("case", source, folder / "out" / "case")


@pytest.mark.parametrize("name", ["ort-cpu", "onnx-reference"])
def test_each_engine_runs_every_case_through_one_loaded_graph(bundle: Path, name: str, tmp_path):
    inputs, cases = stored_cases(bundle / "golden")
    files = [(case.name, case.folder, tmp_path / case.name) for case in cases]
    with Worker(runtime(name), LIMITS) as worker:
        worker.send_job(bundle / "model.onnx", inputs, files)
        results = list(worker.results())
    assert [s.case for s in results] == [case.name for case in cases]
    assert (worker.outcome, worker.reason) == ("ran", "")
    assert {s.outputs for s in results} == {3}
    assert not any(s.error for s in results)


def test_a_process_that_is_killed_has_crashed_with_its_signal(bundle: Path, tmp_path: Path):
    with Worker(runtime("ort-cpu"), LIMITS) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        worker.send_job(bundle / "model.onnx", [], [])
        assert list(worker.results()) == []
    assert worker.outcome == "crashed"
    assert "SIGKILL" in worker.reason


def test_a_process_that_stands_still_has_hung_and_is_ended(bundle: Path):
    with Worker(runtime("ort-cpu"), Limits(threads=1, seconds=1.5, memory_mib=None)) as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        worker.send_job(bundle / "model.onnx", [], [])
        assert list(worker.results()) == []
        pid = worker.pid
    assert worker.outcome == "hung"
    assert "1.5 s" in worker.reason
    assert gone(pid)


def test_a_process_over_its_memory_is_out_of_memory_not_crashed(tmp_path: Path):
    big = np.zeros(40_000_000, np.float32)  # 160 MB in, 160 MB out, with 300 MiB to take
    case = one_case(tmp_path, big)
    with Worker(runtime("ort-cpu"), Limits(threads=1, seconds=60, memory_mib=300)) as worker:
        worker.send_job(model(tmp_path / "m.onnx", "Exp"), ["x"], [case])
        list(worker.results())
    assert worker.outcome == "out of memory"
    assert worker.facts["memory_limit_mib"] == 300


@pytest.mark.parametrize("name", ["ort-cpu", "onnx-reference"])
def test_a_graph_that_the_engine_does_not_know_is_refused_in_its_words(name: str, tmp_path: Path):
    graph = model(tmp_path / "m.onnx", "NoSuchOperator", domain="com.example")
    with Worker(runtime(name), LIMITS) as worker:
        worker.send_job(graph, ["x"], [one_case(tmp_path, np.zeros(3, np.float32))])
        results = list(worker.results())
    # The reference evaluator finds out at the first case, ONNX Runtime when it loads.
    reason = worker.reason or results[0].error
    assert worker.outcome == "refused" or results[0].error
    assert "NoSuchOperator" in reason
    assert "\n" not in reason


def test_a_case_that_fails_does_not_take_the_next_one_with_it(bundle: Path, tmp_path: Path):
    inputs, cases = stored_cases(bundle / "golden")
    broken = tmp_path / "broken"
    broken.mkdir()
    for number, (name, shape) in enumerate(
        [("query", (1, 2, 31)), ("attn_mask", (1, 1, 1, 2)), ("past_key", (1, 2, 0, 8)),
         ("past_value", (1, 2, 0, 8))]
    ):  # fmt: skip
        dtype = np.bool_ if name == "attn_mask" else np.float32
        write_tensors(broken, "scratch", {name: np.ones(shape, dtype)})
        (broken / "scratch_0.pb").rename(broken / f"input_{number}.pb")
    files = [("wrong", broken, tmp_path / "a"), (cases[0].name, cases[0].folder, tmp_path / "b")]
    with Worker(runtime("ort-cpu"), LIMITS) as worker:
        worker.send_job(bundle / "model.onnx", inputs, files)
        wrong, right = worker.results()
    assert "31" in wrong.error
    assert "\n" not in wrong.error
    assert not right.error


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('hello', flush=True)", "exit code 0"),
        ("import sys; sys.exit('libfoo.so is missing')", "libfoo.so is missing"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
def test_an_engine_that_prints_garbage_or_ends_is_a_crash_with_its_last_words(
    program: str, said: str, monkeypatch: pytest.MonkeyPatch, bundle: Path
):
    monkeypatch.setattr(process, "child_command", lambda *_: [sys.executable, "-c", program])
    with Worker(runtime("ort-cpu"), LIMITS) as worker:
        worker.send_job(bundle / "model.onnx", [], [])
        assert list(worker.results()) == []
    assert worker.outcome == "crashed"
    assert said in worker.reason
    assert "\n" not in worker.reason


def test_prints_of_an_engine_do_not_disturb_the_protocol(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    noisy = (
        "from attn_export.runtimes.engines import ort_cpu\n"
        "prepare = ort_cpu.OrtCpu.prepare\n"
        "ort_cpu.OrtCpu.prepare = lambda self: (os.write(1, b'noise\\n'), prepare(self))"
    )
    monkeypatch.setattr(process, "child_command", worker_after(noisy))
    inputs, cases = stored_cases(bundle / "golden")
    with Worker(runtime("ort-cpu"), LIMITS) as worker:
        worker.send_job(
            bundle / "model.onnx", inputs, [(cases[0].name, cases[0].folder, tmp_path / "out")]
        )
        assert len(list(worker.results())) == 1
    assert worker.outcome == "ran"


def test_a_process_ends_when_the_one_that_started_it_is_gone():
    script = (
        "import os, time; from attn_export.runtimes.process import Worker\n"
        "from attn_export.runtimes.protocol import Limits\n"
        "from attn_export.runtimes.catalogue import runtime\n"
        "worker = Worker(runtime('ort-cpu'), Limits(1, 60, None))\n"
        "print(worker.pid, flush=True); time.sleep(1); os.kill(os.getpid(), 9)"
    )
    import subprocess

    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    pid = int(said)
    deadline = time.monotonic() + 10
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)


@pytest.mark.parametrize("kind", all_runtimes(), ids=lambda kind: kind.name)
def test_every_runtime_says_its_version_and_why_it_cannot_run(kind):
    reason = kind.unavailable()
    assert "\n" not in reason
    assert reason or kind.version()
    assert not reason or kind.name not in {"ort-cpu", "onnx-reference"}


@pytest.mark.parametrize("name", ["ort-cpu", "onnx-reference"])
def test_a_full_temporary_folder_is_one_line_and_leaves_nothing(
    bundle: Path, name: str, tmp_path: Path
):
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    done = subprocess.run(
        [sys.executable, "-m", "attn_export", "verify", str(bundle), "--runtime", name],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=limit_files,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5
    lines = [line for line in done.stdout.splitlines() if "temporary folder" in line]
    assert len(lines) == 1
    assert "File too large; free space there, or name another by TMPDIR" in lines[0]
    assert list(tmp_path.iterdir()) == []
