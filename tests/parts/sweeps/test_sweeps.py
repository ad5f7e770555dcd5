"""Sweeps on real schedulers and workers, as processes on the loopback address."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import psutil
import pytest

from attn_export import AttentionSpec, build
from attn_export.errors import BundleError
from attn_export.parts.sweeps.store import Row, Store
from attn_export.parts.sweeps.tasks import pack, unpack

SMALL = """
dialects = ["standard", "portable"]
[base]
embed_dim = 16
num_heads = 2
"""
SECONDS = 240


def attn_export(*arguments: object, **options) -> subprocess.Popen:
    """Start the command in a session of its own, so that all of it can be ended."""
    command = [sys.executable, "-m", "attn_export", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, **options,
    )  # fmt: skip


def swept(*arguments: object) -> subprocess.CompletedProcess:
    process = attn_export("sweep", *arguments)
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def rows_of(folder: Path) -> dict[str, Row]:
    with Store.open(folder) as store:
        return {row.id: row for row in store.rows()}


def until(holds, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)


def finished(folder: Path) -> int:
    return len(rows_of(folder)) if (folder / "cells.sqlite").exists() else 0


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    file = tmp_path / "scheduler.json"
    command = [
        sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port",
        "0", "--no-dashboard", "--scheduler-file", str(file),
    ]  # fmt: skip
    environment = {**os.environ, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "2"}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
        until(lambda: file.is_file() and file.read_text().endswith("}"))
        yield json.loads(file.read_text())["address"], process
        process.kill()


@contextlib.contextmanager
def worker(address: str, **options) -> Iterator[subprocess.Popen]:
    process = attn_export("worker", address, **options)
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.communicate()


def test_every_cell_has_a_verdict_and_a_second_sweep_runs_only_what_is_missing(tmp_path: Path):
    plan = tmp_path / "heads.toml"
    text = 'runtimes = ["ort-cpu", "ort-cuda"]\n' + SMALL
    plan.write_text(text + "[[spec]]\nnum_kv_heads = [1]\n")
    out = tmp_path / "results"
    done = swept(plan, "--output", out, "--workers", 1, "--json", tmp_path / "cells.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "ort-cpu: 2 passed", "ort-cuda: 2 unavailable", f"results: {out}",
    ]  # fmt: skip
    rows = rows_of(out)
    assert len(rows) == 4
    absent = next(row for row in rows.values() if row.runtime == "ort-cuda")
    assert absent.cause.startswith("no worker has GPU, which ort-cuda takes; on this machine ")
    first = next(row for row in rows.values() if row.runtime == "ort-cpu")
    assert json.loads(first.spec)["num_kv_heads"] == 1
    assert first.version
    assert first.cases > 20
    assert first.worst is not None
    assert 0 < first.worst < 1
    assert len(json.loads((tmp_path / "cells.json").read_text())["cells"]) == 4
    again = swept(plan, "--output", out, "--workers", 1)
    assert again.returncode == 2
    assert "has 4 finished cells; give --resume" in again.stderr
    plan.write_text(text.replace(', "ort-cuda"', "") + "[[spec]]\nnum_kv_heads = [1, 2]\n")
    more = swept(plan, "--output", out, "--workers", 1, "--resume")
    assert more.returncode == 0, more.stderr
    after = rows_of(out)
    assert len(after) == 6
    assert all(after[key] == row for key, row in rows.items())


def test_ctrl_c_says_how_to_go_on(tmp_path: Path):
    (tmp_path / "plan.toml").write_text(f"{SMALL}[[spec]]\n")
    store = tmp_path / "store"
    process = attn_export(
        "sweep", tmp_path / "plan.toml", "--output", store, "--workers", 1,
        # A command in the background of a shell ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    until((store / "cells.sqlite").exists)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[-1].endswith(
        "keeps the finished cells: give --resume to run the rest"
    )


def killing_module(folder: Path) -> Path:
    """Write a subject whose build kills its worker."""
    path = folder / "mine.py"
    path.write_text("import os\n\ndef make():\n    os.kill(os.getpid(), 9)\n")
    return path


def test_a_layer_that_kills_its_workers_is_a_result(tmp_path: Path):
    killing_module(tmp_path)
    plan = tmp_path / "p.toml"
    plan.write_text('dialects = ["standard"]\nmodule = ["mine.py:make"]\n')
    done = swept(plan, "--output", tmp_path / "out", "--workers", 1, "--allow-modules")
    assert done.returncode == 5, done.stderr
    (row,) = rows_of(tmp_path / "out").values()
    assert row.verdict == "crashed"
    assert "it ended 3 workers" in row.cause


# -- bundles that travel ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "b"
    spec = AttentionSpec(embed_dim=16, num_heads=2)
    build(spec, folder, dialects=["standard"], runtimes=["ort-cpu"])
    return folder


def test_a_bundle_arrives_as_it_was_sent_once(bundle: Path, tmp_path: Path):
    packed = pack(bundle)
    place = unpack(packed, tmp_path)
    assert place.name == packed.digest
    assert (place / "model.onnx").read_bytes() == (bundle / "model.onnx").read_bytes()
    (place / "mark").touch()
    assert (unpack(packed, tmp_path) / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == [packed.digest]


def rewritten(archive: bytes, name: str, content: bytes) -> bytes:
    stream = BytesIO()
    with zipfile.ZipFile(BytesIO(archive)) as old, zipfile.ZipFile(stream, "w") as new:
        for each in old.namelist():
            new.writestr(each, content if each == name else old.read(each))
        if name not in old.namelist():
            new.writestr(name, content)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("manifest.json", "arrived changed"),
        ("model.onnx", "was changed after the bundle was written"),
        ("../outside", "has a file outside of it"),
        ("", "arrived broken"),
    ],
)
def test_a_bundle_that_was_changed_on_its_way_is_refused(
    name: str, message: str, bundle: Path, tmp_path: Path
):
    packed = pack(bundle)
    archive = rewritten(packed.archive, name, b"{}") if name else packed.archive[:-30]
    with pytest.raises(BundleError, match=message):
        unpack(dataclasses.replace(packed, archive=archive), tmp_path / "home")
    assert not list(tmp_path.rglob("outside"))
    assert not list((tmp_path / "home").glob("*"))
