"""node, wasm and webgpu: they pass in every dialect that fits, and leave no process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shared import bundle_of

from attn_export import verify
from attn_export.bundle.golden import stored_cases
from attn_export.errors import RuntimeFailure
from attn_export.parts.kits import javascript
from attn_export.runtimes import install
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Limits

Need = Callable[[str], None]
LIMITS = Limits(threads=1, seconds=60, memory_mib=None)
NAMES = ("node", "wasm")


@pytest.fixture(autouse=True)
def _installed(need: Need) -> None:
    for name in NAMES:
        need(name)


def test_node_passes_with_a_cache_in_place():
    report = verify(bundle_of("in-place"), runtimes=["node"], require=["node"])
    assert report.passed, [v.message for v in report.verdicts if v.status != "passed"][:3]
    ran = [run for run in report.runs if run.outcome == "ran"]
    assert {run.graph for run in ran} >= {"model.onnx", "model.portable.onnx", "model.ort.onnx"}
    assert {run.facts["version"] for run in ran} == {runtime("node").version()}


@pytest.mark.skipif(
    os.environ.get("ATTN_EXPORT_MORE_RUNTIMES", "") in ("", "0"),
    reason="outside the default tests: ATTN_EXPORT_MORE_RUNTIMES=1",
)
def test_webgpu_says_that_it_computes_in_software(need: Need):
    need("webgpu")
    portable = bundle_of("append") / "model.portable.onnx"
    report = verify(bundle_of("append"), graph=portable, runtimes=["webgpu"])
    assert report.passed
    (device,) = (run.facts["device"] for run in report.runs if run.runtime == "webgpu")
    assert device == "google swiftshader, in software"


# -- how they end -----------------------------------------------------------------------------


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the test's own temporary folder, which identifies its processes; a short path."""
    with tempfile.TemporaryDirectory(prefix="js-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def processes(own_tmp: Path) -> dict[int, str]:
    """Return the other processes of a test, by number, with their commands."""
    environment, argument = f"TMPDIR={own_tmp}\0".encode(), str(own_tmp).encode()
    commands, own_groups, groups = {}, set(), {}
    for path in Path("/proc").iterdir():
        try:
            if not path.name.isdecimal() or int(path.name) == os.getpid():
                continue
            command = (path / "cmdline").read_bytes()
            marked = environment in (path / "environ").read_bytes() or argument in command
            groups[int(path.name)] = os.getpgid(int(path.name))
        except OSError:
            continue  # it has ended
        commands[int(path.name)] = command.replace(b"\0", b" ").decode()
        if marked:
            own_groups.add(groups[int(path.name)])
    # Chromium writes over the environment of its processes; they are of its group.
    own_groups.discard(os.getpgrp())
    return {pid: said for pid, said in commands.items() if said and groups[pid] in own_groups}


def nothing_is_left(own_tmp: Path) -> bool:
    """Return whether all processes and files are gone after at most some seconds."""
    end = time.monotonic() + 10
    while (processes(own_tmp) or list(own_tmp.iterdir())) and time.monotonic() < end:
        time.sleep(0.05)
    return not processes(own_tmp) and not list(own_tmp.iterdir())


@pytest.fixture
def running(bundle: Path, tmp_path: Path, own_tmp: Path) -> Iterator[Callable[[str], Worker]]:
    """Yield a starter of a runtime on far more cases than it completes before its end."""
    workers = []

    def start(name: str) -> Worker:
        worker = Worker(runtime(name), LIMITS)
        workers.append(worker)
        inputs, cases = stored_cases(bundle / "golden")
        files = [
            (f"{case.name} {i}", case.folder, tmp_path / f"{case.name}-{i}")
            for i in range(200)
            for case in cases
        ]
        worker.send_job(bundle / "model.onnx", inputs, files)
        return worker

    yield start
    for worker in workers:
        worker.close()


VICTIMS = {
    "node": r"node \S+/serve\.mjs ",
    "wasm": r"node \S+/serve_web\.mjs ",
    "its browser": r"(?!.*--type=)\S+/chrom\S* .*--headless",
    "its page": r".*--type=renderer",
    "who keeps its browser": r"\S*node \S+/browser\.mjs ",
}


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.every(4)
def test_a_killed_process_has_crashed_and_leaves_nothing(victim: str, running, own_tmp: Path):
    worker = running("node" if victim == "node" else "wasm")
    results = worker.results()
    next(results)
    found = processes(own_tmp)
    pids = [pid for pid, command in found.items() if re.match(VICTIMS[victim], command)]
    assert pids, found
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert not [case for case in results if case.error]
    assert worker.outcome == "crashed", worker.reason
    assert worker.reason.startswith("EngineDiedError: node ")
    assert "\n" not in worker.reason
    worker.close()
    assert nothing_is_left(own_tmp), (processes(own_tmp), list(own_tmp.rglob("*")))


@pytest.mark.parametrize("how", ["worker is killed", "worker is closed", "job is killed"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every(3)
def test_nothing_is_left_when_the_caller_is_gone(name: str, how: str, running, own_tmp: Path):
    worker = running(name)
    next(worker.results())
    if how == "worker is killed":
        os.kill(worker.pid, signal.SIGKILL)
    elif how == "worker is closed":
        worker.close()
    else:  # the pipe to the worker ends
        worker._child._process.stdin.close()
    assert nothing_is_left(own_tmp), (processes(own_tmp), list(own_tmp.rglob("*")))


# -- what is missing --------------------------------------------------------------------------


def test_an_empty_folder_says_how_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("ATTN_EXPORT_RUNTIMES", str(tmp_path))
    assert runtime("node").unavailable() == "it is not built here; run scripts/setup_runtimes node"
    assert runtime("wasm").unavailable() == "it is not built here; run scripts/setup_runtimes wasm"
    assert runtime("node").version() is None


def without_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHROME_PATH", raising=False)
    monkeypatch.setattr(javascript, "BROWSERS", ("no-such-browser",))


def test_without_node_or_chromium_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    without_browser(monkeypatch)
    assert "there is no Chromium; apt-get install chromium" in runtime("wasm").unavailable()
    monkeypatch.setenv("CHROME_PATH", "/nothing")
    says = "CHROME_PATH is /nothing, which is not a program"
    assert runtime("wasm").unavailable() == says
    with pytest.raises(RuntimeFailure, match=says):
        javascript.install("wasm", print)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in (*NAMES, "webgpu"):
        assert runtime(name).unavailable().startswith("node is not installed; apt-get install")
    with pytest.raises(RuntimeFailure, match="node is not installed; apt-get install nodejs npm"):
        javascript.install("node", print)


@pytest.mark.parametrize("system_packages", [False, True])
def test_chromium_is_installed_only_if_the_flag_allows_it(
    system_packages: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    done = tmp_path / "done"
    (tmp_path / "apt-get").write_text(f'#!/bin/sh\necho "$1" >>{done}\n')
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    without_browser(monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    command = ["install", *(["--system-packages"] if system_packages else []), "wasm"]
    monkeypatch.setattr(sys, "argv", command)
    assert install.main() == (0 if system_packages else 1)
    assert (done.read_text().split() if done.exists() else []) == (
        ["update", "install"] if system_packages else []
    )


def test_an_old_node_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name, says in (("node", "echo v16.20.0"), ("npm", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ATTN_EXPORT_RUNTIMES", str(tmp_path / "home"))
    with pytest.raises(RuntimeFailure, match=r"node is v16\.20\.0; version 18 or newer is needed"):
        javascript.install("node", print)


def test_packages_that_cannot_be_had_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("ATTN_EXPORT_RUNTIMES", str(tmp_path / "home"))
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    with pytest.raises(
        RuntimeFailure, match=r"npm ci failed for node: npm \S+ .*ECONNREFUSED"
    ) as said:
        javascript.install("node", print)
    assert "\n" not in str(said.value)
    assert list((tmp_path / "home").iterdir()) == []


def test_installed_packages_stay_and_stale_ones_are_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from attn_export.parts.installing import home

    reported: list[str] = []
    before = (home() / "node" / "serve.mjs").stat()
    started = time.perf_counter()
    for name in (*NAMES, "webgpu"):
        javascript.install(name, reported.append)
    assert time.perf_counter() - started < 0.3
    assert (home() / "node" / "serve.mjs").stat() == before
    copy = tmp_path / "home"
    subprocess.run(["cp", "-r", home() / "node", copy], check=True)
    (tmp_path / "runtimes").mkdir()
    copy.rename(tmp_path / "runtimes" / "node")
    (tmp_path / "runtimes" / "node" / "made-from").write_text("other sources")
    monkeypatch.setenv("ATTN_EXPORT_RUNTIMES", str(tmp_path / "runtimes"))
    assert "built from other sources; run scripts/setup_runtimes" in runtime("node").unavailable()
    javascript.install("node", reported.append)
    assert runtime("node").unavailable() == ""
    assert reported == []  # the packages are those that were there


def test_requests_and_answers_are_those_of_the_protocol(tmp_path: Path):
    """Send names with spaces, empty tensors, every type, and a file that is cut off."""
    from attn_export.parts.kits.source_folders import HARNESS, KITS

    for path in (*(KITS / "js").glob("*.mjs"), HARNESS / "frames.mjs"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "echo.mjs").write_text(
        "import { Reader, readRequest, answer, failure } from './frames.mjs';\n"
        "const reader = new Reader(process.stdin);\n"
        "try {\n"
        "  for (let r; (r = await readRequest(reader)); ) {\n"
        "    process.stdout.write(answer(r.inputs));\n"
        "    process.stderr.write(JSON.stringify(r.bound));\n"
        "  }\n"
        "} catch (error) { process.stdout.write(failure(error)); }\n"
    )
    big = bytes(range(256)) * 4096
    tensors = (
        b"1 2 1 2 a name\n" + b"\1\2\3\4\5\6\7\10" + b"7 0 scalar\n" + b"12345678"
        b"9 1 0 empty\n" + b"16 1 1 \xc3\xa4\n" + b"ab" + b"2 1 1048576 big\n" + big
    )
    requests = b"run 5 1\n" + tensors + b"out put\tin put\n"
    done = subprocess.run(
        ["node", tmp_path / "echo.mjs"], input=requests * 2 + b"run 1 0\n7 1 4 x\n123",
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == (b"outputs 5\n" + tensors) * 2 + b"error the input ended\n"
    assert done.stderr == b'{"out put":"in put"}' * 2
