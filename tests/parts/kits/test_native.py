"""The runtimes `c` and `cpp`, and programs that are killed, send invalid lines or are missing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
from processes import gone
from shared import bundle_of

from attn_export import verify
from attn_export.bundle.golden import stored_cases
from attn_export.parts import installing
from attn_export.parts.kits.native import install, program_of
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Limits
from attn_export.tensorfile import read_tensors

NAMES = ["c", "cpp"]
LIMITS = Limits(threads=1, seconds=60, memory_mib=None)


@pytest.fixture(autouse=True)
def _here(need) -> None:
    for name in NAMES:
        need(name)


@contextlib.contextmanager
def loaded(name: str, graph: Path) -> Iterator[Any]:
    """Yield an engine, whose program must end by itself with its input."""
    engine: Any = runtime(name).load(graph, 1)
    try:
        yield engine
    finally:
        engine._process.communicate(timeout=10)
    assert engine._process.returncode == 0


@pytest.mark.parametrize("name", ["no-cache", "bfloat16"])  # another test runs "append"
def test_they_run_every_dialect_of_every_case(name: str):
    report = verify(bundle_of(name), runtimes=NAMES)
    assert report.passed
    ran = {(run.runtime, run.graph) for run in report.runs if run.outcome == "ran"}
    graphs = {verdict.graph for verdict in report.verdicts}
    assert graphs
    assert {(runtime, graph) for runtime in NAMES for graph in graphs} <= ran
    (version,) = {str(run.facts["version"]) for run in report.runs if run.outcome == "ran"}
    assert version == runtime("c").version()


@pytest.mark.parametrize("name", NAMES)
def test_a_bound_output_is_what_an_unbound_one_is(name: str):
    folder = bundle_of("in-place")
    names, cases = stored_cases(folder / "golden")
    with loaded(name, folder / "model.onnx") as engine:
        for case in cases[:4]:
            inputs = read_tensors(case.folder, "input", names)
            free = engine.run(inputs, {})
            bound = engine.run(inputs, {"present_key": "past_key", "present_value": "past_value"})
            assert list(free) == list(bound) == ["output", "present_key", "present_value"]
            for output, array in free.items():
                np.testing.assert_array_equal(bound[output], array)
        with pytest.raises(RuntimeError, match="no output nothing"):
            engine.run(inputs, {"nothing": "past_key"})


@pytest.mark.parametrize("name", [*NAMES, "ort-cpu"])
def test_a_bound_output_lies_in_the_memory_of_its_input(name: str, tmp_path: Path):
    """Check that a later node that reads the input finds the output there."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    ends = {n: helper.make_tensor_value_info(n, kind, ["n"]) for n in ("past", "present", "later")}
    nodes = [
        helper.make_node("Neg", ["past"], ["present"]),
        helper.make_node("Mul", ["present", "past"], ["later"]),
    ]
    graph = helper.make_graph(nodes, "in place", [ends["past"]], [ends["present"], ends["later"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    past = np.array([2.0, 3.0], np.float32)
    engine = runtime(name).load(tmp_path / "m.onnx", 1)
    free, bound = (engine.run({"past": past}, to) for to in ({}, {"present": "past"}))
    np.testing.assert_array_equal(free["later"], -past * past)
    np.testing.assert_array_equal(bound["present"], -past)
    np.testing.assert_array_equal(bound["later"], past * past)


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_is_the_text_of_the_engine_on_one_line(name: str, tmp_path: Path):
    (tmp_path / "m.onnx").write_bytes(b"no graph")
    with Worker(runtime(name), LIMITS) as worker:
        worker.send_job(tmp_path / "m.onnx", ["x"], [])
        assert not list(worker.results())
    assert worker.outcome == "refused"
    assert "m.onnx" in worker.reason
    assert "\n" not in worker.reason


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_input_fails_its_case_alone(name: str, bundle: Path):
    names, cases = stored_cases(bundle / "golden")
    inputs = read_tensors(cases[0].folder, "input", names)
    with loaded(name, bundle / "model.onnx") as engine:
        for wrong in (inputs["query"][..., :-1], inputs["query"][None]):
            with pytest.raises(RuntimeError, match="query"):
                engine.run({**inputs, "query": wrong}, {})
        assert len(engine.run(inputs, {})) == 3


# -- programs that end, hang or talk nonsense -----------------------------------------------


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def program_under(worker: Worker) -> int:
    """Return the process of the program that a worker has started."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in psutil.Process(worker.pid).children():
            if Path(f"/proc/{process.pid}/exe").resolve().name == "serve":
                return process.pid
        time.sleep(0.002)
    raise AssertionError("the program was not started")


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(pid)


def start(worker: Worker, bundle: Path, out: Path) -> None:
    names, cases = stored_cases(bundle / "golden")
    files = [(f"{case.name}{i}", case.folder, out / f"{i}{case.name}")
             for i in range(20) for case in cases]  # fmt: skip
    worker.send_job(bundle / "model.onnx", names, files)


def test_a_program_that_is_killed_has_crashed(name: str, bundle: Path, tmp_path: Path):
    with Worker(runtime(name), LIMITS) as worker:
        start(worker, bundle, tmp_path)
        results = worker.results()
        next(results)  # it is in the midst of its cases
        pid = program_under(worker)
        os.kill(pid, signal.SIGKILL)
        list(results)
        assert worker.outcome == "crashed"
        assert "signal 9" in worker.reason
        assert "serve" in worker.reason
        assert "\n" not in worker.reason
    wait_until_gone(pid)


def test_a_program_ends_with_the_process_that_started_it(name: str, bundle: Path, tmp_path: Path):
    with Worker(runtime(name), LIMITS) as worker:
        start(worker, bundle, tmp_path)
        pid = program_under(worker)
        os.kill(worker.pid, signal.SIGKILL)
        wait_until_gone(pid)


def test_a_program_that_stands_still_has_hung_and_is_ended(name: str, bundle: Path, tmp_path: Path):
    with Worker(runtime(name), Limits(threads=1, seconds=2, memory_mib=None)) as worker:
        start(worker, bundle, tmp_path)
        pid = program_under(worker)
        os.kill(pid, signal.SIGSTOP)
        list(worker.results())
        assert worker.outcome == "hung"
    wait_until_gone(pid)


@pytest.mark.parametrize(
    "heard",
    [b"walk 1 0\n", b"run x 0\n", b"run 1 0\n1 2 3\n", b"run 1 0\n1 1 2 x\n1234", b"run 0 1\nab\n",
     b"run 1 0\n99 1 2 x\n12345678", b"run 1 0\n1 2 4611686018427387904 8 x\n1"],
)  # fmt: skip
def test_a_program_that_hears_nonsense_ends_with_a_line(heard: bytes, name: str, bundle: Path):
    command = [str(program_of(name)), str(bundle / "model.onnx"), "1"]
    done = subprocess.run(command, input=heard, capture_output=True)
    assert done.returncode == 1
    assert done.stdout.startswith(b"loaded ")
    assert len(done.stderr.splitlines()) == 1


# -- what is installed --------------------------------------------------------------------


def test_a_program_from_other_sources_or_without_its_library_is_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    built = program_of(name)
    monkeypatch.setenv(installing.VARIABLE, str(tmp_path))
    assert (
        runtime(name).unavailable() == f"it is not built here; run {installing.setup_command(name)}"
    )
    program = program_of(name)
    program.parent.mkdir()
    program.write_bytes(built.read_bytes())
    (program.parent / installing.STAMP).write_text("other")
    assert "from other sources" in runtime(name).unavailable()
    (program.parent / installing.STAMP).write_text((built.parent / installing.STAMP).read_text())
    assert "libonnxruntime.so.1 is gone" in runtime(name).unavailable()


def test_installing_again_is_quick():
    started = time.perf_counter()
    for name in NAMES:
        install(name, lambda text: pytest.fail(f"it was said: {text}"))
    assert time.perf_counter() - started < 0.2
