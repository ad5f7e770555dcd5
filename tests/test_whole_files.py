"""Tests that a report is written completely, or the previous file is kept."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import command

from attn_export import output_folder
from attn_export.output_folder import write_whole

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}


def limit_files() -> None:
    """Limit files to 100 bytes for `preexec_fn`, as on a disk that is almost full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def test_on_a_full_disk_the_earlier_file_stays(tmp_path: Path):
    file = tmp_path / "r.json"
    file.write_text("before")
    code = (
        "from attn_export.commands.output import write_file\n"
        f"write_file({str(file)!r}, 'x' * 1000)"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, preexec_fn=limit_files)
    assert b"OutputError: cannot write" in done.stderr
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("content", ["é\n", b"\x00\xff"])
def test_a_file_is_written_and_keeps_its_mode(content: str | bytes, tmp_path: Path):
    file = tmp_path / "r.json"
    for mode in (None, 0o600, 0o664):
        if mode is not None:
            file.chmod(mode)
        write_whole(file, content)
        assert file.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert mode is None or file.stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_is_followed_and_stays(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "r.json").write_text("before")
    (tmp_path / "link").symlink_to("a/r.json")
    write_whole(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a" / "r.json").read_text() == "after"


def test_a_pipe_or_device_is_written_to(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    code = "from attn_export.output_folder import write_whole\nfrom pathlib import Path\n"
    code += "write_whole(Path('/dev/stdout'), 'in place')"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
        assert os.fstat(out.fileno()).st_size == len("in place")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_in_a_folder_that_takes_no_other_file_it_is_written_in_place(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(output_folder, "folder_beside", refuse)
    file = tmp_path / "r.json"
    with pytest.raises(OSError, match=os.strerror(number)):
        write_whole(file, "new")
    file.write_text("before")
    if number == errno.ENOSPC:
        with pytest.raises(OSError, match="No space"):
            write_whole(file, "after")
        assert file.read_text() == "before"
    else:
        write_whole(file, "after")
        assert file.read_text() == "after"


@pytest.mark.parametrize("arguments", [["runtimes"], ["--help"], ["verify", "{bundle}"]])
def test_a_closed_pipe_ends_it_as_other_tools(arguments: list[str], bundle: Path):
    given = command([word.format(bundle=bundle) for word in arguments])
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(given, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_under_the_output_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(["runtimes"]), stdout=full, stderr=subprocess.PIPE, text=True
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


SMALL = ["build", "--embed-dim", "8", "--num-heads", "1", "--runtime", "ort-cpu"]


@pytest.mark.parametrize(
    ("environment", "arguments"),
    [
        ({}, [*SMALL, "--output", b"b\xff"]),
        ({}, [*SMALL, "--json", b"j\xff"]),
        ({}, ["lower", "m.onnx", "--dialect", "ort", "--output", b"o\xff.onnx"]),
        (ASCII, [*SMALL, "--output", "bé"]),
    ],
)
def test_a_path_that_is_not_utf8_is_refused_before_the_work(
    environment: dict[str, str], arguments: list[str | bytes], tmp_path: Path
):
    done = subprocess.run(
        [*command([]), *arguments], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is not UTF-8; rename it, or set a UTF-8 locale" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_current_folder_that_is_not_utf8_is_refused_but_help_is_shown(tmp_path: Path):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)  # noqa: PTH102 (of bytes)
    for arguments, code in ((SMALL, 2), (["--help"], 0), (["build", "--help"], 0)):
        done = subprocess.run(command(arguments), cwd=folder, capture_output=True, text=True)
        assert done.returncode == code
    assert os.listdir(folder) == []  # noqa: PTH208


def test_a_bundle_is_built_in_an_ascii_locale(tmp_path: Path):
    done = subprocess.run(
        command([*SMALL, "--dialect", "standard", "--output", "b"]), cwd=tmp_path,
        capture_output=True, env={**os.environ, **ASCII},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "b" / "manifest.json").is_file()
