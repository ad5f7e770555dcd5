"""Folders of killed processes are removed, and folders in use are kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_export import temp_folders
from attn_export.output_folder import exchange, take_place
from attn_export.temp_folders import folder_beside, scratch, sweep

HEAD = """
import sys, time
from pathlib import Path
from attn_export import output_folder
from attn_export.runtimes.child import Child
from attn_export.temp_folders import folder_beside, scratch
here = Path.cwd()
def ready(): print("ready", flush=True); time.sleep(60)
"""

USES = {
    "scratch": "with scratch() as folder: (folder / 'a').touch(); ready()",
    "beside": "with folder_beside(here / 'out') as folder: (folder / 'a').touch(); ready()",
}

# Between its two renames: the old folder waits under another name.
HIDES = """
output_folder.exchange = lambda *_: False
rename = Path.rename
def renamed(self, target):
    rename(self, target)
    if target.name.endswith(".old"): {then}
Path.rename = renamed
with folder_beside(here / "out") as new:
    (new / "new").touch()
    output_folder.take_place(new, here / "out")
"""


@contextlib.contextmanager
def running(body: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that has reached `ready()`."""
    with subprocess.Popen(
        [sys.executable, "-c", HEAD + body], cwd=folder, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))]


@pytest.mark.parametrize("body", USES.values(), ids=USES)
def test_a_folder_of_a_living_process_stays_and_goes_when_it_was_killed(body: str, tmp_path: Path):
    with running(body, tmp_path):
        before = names(tmp_path)
        sweep(tmp_path)
        assert names(tmp_path) == before
        assert len(before) == 2
    sweep(tmp_path)
    assert names(tmp_path) == []


def test_a_folder_that_a_child_of_a_killed_process_uses_stays(tmp_path: Path):
    body = """
with scratch() as folder:
    child = Child([sys.executable, "-c", "import time; time.sleep(60)"])
    Path("pid").write_text(str(child.pid)); ready()
"""
    with running(body, tmp_path) as process:
        process.kill()
        process.wait()
        sweep(tmp_path)
        pid = int((tmp_path / "pid").read_text())
        assert len(names(tmp_path)) == 2
        os.killpg(pid, signal.SIGKILL)
    lock_is_gone = Path(f"/proc/{pid}/fd")
    while lock_is_gone.exists() and any(lock_is_gone.iterdir()):
        pass
    sweep(tmp_path)
    assert names(tmp_path) == ["pid"]


def test_killed_between_two_renames_the_old_folder_is_back(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with running(HIDES.format(then="ready()"), tmp_path):
        before = names(tmp_path)
        assert "out" not in before
        sweep(tmp_path)  # it lives, so it is not removed
        assert names(tmp_path) == before
    sweep(tmp_path)
    assert names(tmp_path) == ["out", "out/old"]


def test_a_folder_that_was_replaced_does_not_come_back(tmp_path: Path):
    for name in (".out.attn-export-0123456789abcdef.old", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name[-3:]).touch()
    sweep(tmp_path)
    assert names(tmp_path) == ["out", "out/out"]


@pytest.mark.parametrize(
    "name",
    [
        "attn-export-0123456789abcdef",  # an earlier version's, which locked nothing
        "attn-export.0123456789abcde",
        "attn-export.0123456789abcdef.txt",
        ".out.0123456789abcdef",
        ".attn-export-0123456789abcdef",
        "out.attn-export-0123456789abcdef",
    ],
)
def test_folders_of_other_names_are_left_alone(name: str, tmp_path: Path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "a").touch()
    sweep(tmp_path)
    assert names(tmp_path) == [name, f"{name}/a"]


def test_links_and_files_are_left_alone(tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "a").touch()
    (tmp_path / ".x.attn-export-0123456789abcdef").symlink_to(tmp_path / "theirs")
    (tmp_path / "attn-export.0123456789abcdef").touch()
    before = names(tmp_path)
    sweep(tmp_path)
    assert names(tmp_path) == before


def test_without_support_of_locks_nothing_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with folder_beside(tmp_path / "out") as folder:
        sweep(tmp_path)
        assert folder.is_dir()
    assert names(tmp_path) == []


@pytest.mark.parametrize("moment", ["os.open", "fcntl.flock"])
def test_a_folder_swept_before_it_was_locked_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = os if moment == "os.open" else fcntl
    call, times = getattr(module, moment.split(".")[1]), []

    def after_another(*arguments: object) -> object:
        times.append(names(tmp_path))
        if len(times) == 1:
            (tmp_path / times[0][0]).rmdir()
        return call(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(moment, after_another)
        made = folder_beside(tmp_path / "out")
        folder = made.__enter__()
    assert names(tmp_path) == [folder.name]
    assert [folder.name] != times[0]
    made.__exit__(None, None, None)
    assert names(tmp_path) == []


def test_a_folder_beside_an_output_sweeps_first(tmp_path: Path):
    (tmp_path / ".another.attn-export-0123456789abcdef").mkdir()
    with folder_beside(tmp_path / "out") as folder:
        assert names(tmp_path) == [folder.name]


def test_temporary_folders_follow_tmpdir_and_the_first_sweeps(tmp_path: Path):
    (tmp_path / "attn-export.0123456789abcdef").mkdir()
    with running(USES["scratch"], tmp_path):
        assert len(names(tmp_path)) == 2
        assert "attn-export.0123456789abcdef" not in names(tmp_path)


def test_an_exchange_is_one_step_and_leaves_both(tmp_path: Path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert exchange(tmp_path / "one", tmp_path / "other")
    assert names(tmp_path) == ["one", "one/other", "other", "other/one"]
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "missing")


def test_a_folder_for_large_files_is_not_in_memory(tmp_path, monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(temp_folders, "MEMORY", tmp_path)
    monkeypatch.setattr(temp_folders, "MIN_FREE_BYTES", 0)
    with scratch() as small, scratch(in_memory=False) as large:
        assert small.parent == tmp_path
        assert large.parent == Path(tempfile.gettempdir())


@pytest.mark.parametrize("swaps", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("before", [None, (), ("old",)], ids=["nothing", "empty", "a folder"])
def test_a_folder_takes_the_place_of_what_is_there(
    before: tuple[str, ...] | None, swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not swaps:
        monkeypatch.setattr("attn_export.output_folder.exchange", lambda *_: False)
    if before is not None:
        (tmp_path / "out").mkdir()
        for name in before:
            (tmp_path / "out" / name).touch()
    with folder_beside(tmp_path / "out") as new:
        (new / "new").touch()
        take_place(new, tmp_path / "out")
    assert names(tmp_path) == ["out", "out/new"]


def test_scratch_ends_with_its_block():
    with scratch() as folder:
        assert folder.is_dir()
    assert not folder.exists()
