"""Folders of killed processes are removed, and folders in use are kept."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from attn_export import temp_folders
from attn_export.output_folder import take_place
from attn_export.temp_folders import folder_beside, scratch, sweep

HEAD = """
import sys, time
from pathlib import Path
from attn_export import output_folder
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
    if target.parent.name == "old": ready()
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
        assert len(before) == 4
    sweep(tmp_path)
    assert names(tmp_path) == []


def test_killed_between_two_renames_the_old_folder_is_back(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    with running(HIDES, tmp_path):
        before = names(tmp_path)
        assert "out" not in before
        sweep(tmp_path)  # it lives, so it is not removed
        assert names(tmp_path) == before
    sweep(tmp_path)
    assert names(tmp_path) == ["out", "out/old"]


def test_a_folder_that_was_replaced_does_not_come_back(tmp_path: Path):
    for name in (".out.attn-export.0123456789abcdef/old/out", "out"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / name[0]).touch()
    sweep(tmp_path)
    assert names(tmp_path) == ["out", "out/o"]


@pytest.mark.parametrize(
    "name",
    [
        "attn-export.0123456789abcde",
        "attn-export-upstream",
        "attn-export-20261126",
        "attn-export.0123456789abcdef.txt",
        ".out.0123456789abcdef",
        "..attn-export.0123456789abcdef",
        "out.attn-export.0123456789abcdef",
    ],
)
def test_folders_of_other_names_are_left_alone(name: str, tmp_path: Path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "a").touch()
    sweep(tmp_path)
    assert names(tmp_path) == [name, f"{name}/a"]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path):
    for name in ("lock", "new/a", "mine"):
        path = tmp_path / "attn-export.0123456789abcdef" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    before = names(tmp_path)
    sweep(tmp_path)
    assert names(tmp_path) == before


def test_without_space_for_a_folder_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make = Path.mkdir

    def full(path: Path, **options: Any) -> None:
        if path.name == "new":
            raise OSError(errno.ENOSPC, "No space left on device")
        make(path, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space"), folder_beside(tmp_path / "out"):
        pass
    assert names(tmp_path) == []


FILLS = {
    "a folder": "with scratch() as folder: (folder / 'a').write_bytes(bytes(2**20))",
    "an array": "in_file(numpy.zeros(2**20, numpy.uint8))",
}


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode != 0
    if sys.platform == "linux" else True,
    reason="a small disk is mounted in namespaces of its own",
)  # fmt: skip
@pytest.mark.parametrize("body", FILLS.values(), ids=FILLS)
def test_a_full_temporary_folder_is_named(body: str, tmp_path: Path):
    script = f"import numpy\nfrom attn_export.temp_folders import in_file, scratch\n{body}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=64k none . && exec "$@"', "sh",
         sys.executable, "-c", script],
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert f"OutputError: the temporary folder {tmp_path} is full; free space" in done.stderr


def test_links_and_files_are_left_alone(tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "a").touch()
    (tmp_path / ".x.attn-export.0123456789abcdef").symlink_to(tmp_path / "theirs")
    (tmp_path / "attn-export.0123456789abcdef").touch()
    before = names(tmp_path)
    sweep(tmp_path)
    assert names(tmp_path) == before


def test_without_support_of_locks_nothing_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with folder_beside(tmp_path / "out") as folder:
        sweep(tmp_path)
        assert folder.is_dir()
    assert names(tmp_path) == []


@pytest.mark.parametrize("moment", ["before", "while"])
def test_a_folder_swept_before_it_was_locked_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make, made, locks = Path.mkdir, [], []

    def then_swept(path: Path, **options: Any) -> None:
        make(path, **options)
        if options.get("mode") == 0o700:
            made.append(path)
            if len(made) == 1 and moment == "before":
                sweep(tmp_path)
            elif len(made) == 1:
                locks.append(FileLock(path / "lock").acquire())

    monkeypatch.setattr(Path, "mkdir", then_swept)
    with folder_beside(tmp_path / "out") as folder:
        assert folder == made[-1] / "new"
        assert folder.is_dir()
        assert len(made) == 1 + (moment == "while")


def test_a_folder_beside_an_output_sweeps_first(tmp_path: Path):
    (tmp_path / ".another.attn-export.0123456789abcdef").mkdir()
    with folder_beside(tmp_path / "out") as folder:
        assert [*tmp_path.iterdir()] == [folder.parent]


def test_temporary_folders_follow_tmpdir_and_the_first_sweeps(tmp_path: Path):
    (tmp_path / "attn-export.0123456789abcdef").mkdir()
    with running(USES["scratch"], tmp_path):
        assert len(list(tmp_path.iterdir())) == 1
        assert "attn-export.0123456789abcdef" not in names(tmp_path)


def test_a_folder_for_large_files_is_not_in_memory(tmp_path, monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(temp_folders, "MEMORY", tmp_path)
    monkeypatch.setattr(temp_folders, "MIN_FREE_BYTES", 0)
    with scratch() as small, scratch(in_memory=False) as large:
        assert small.parent.parent == tmp_path
        assert large.parent.parent == Path(tempfile.gettempdir())


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
