"""Tests of signals that end a process: it ends at any point, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import default_signals, gone

from attn_export.interruption import MESSAGE
from attn_export.output_folder import take_place

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from attn_export.interruption import AT_END, ctrl_c_raises, end_on_signal
from attn_export.output_folder import take_place
from attn_export.temp_folders import folder_beside, scratch
end_on_signal()
here = Path.cwd()
def ready(): print("ready", flush=True)
def wait():
    while True: time.sleep(0.01)  # a signal just before one long sleep would be seen after it
"""

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def end(
    body: str, folder: Path, number: signal.Signals, *, times: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run a script until it prints ``ready``, send it a signal, and return its result."""
    with subprocess.Popen(
        [sys.executable, "-c", HEAD + body], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(folder)},
        preexec_fn=default_signals,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for _ in range(times):
                process.send_signal(number)
            stdout, stderr = process.communicate(timeout=20)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


SWALLOWS = """
with scratch() as one, folder_beside(here / "model") as other:
    (one / "a").touch(); (other / "b").touch()
    ready()
    while True:
        try:
            time.sleep(0.01)
        except BaseException as error:
            raise SystemExit(3)
"""


@pytest.mark.parametrize("number", CODES)
def test_a_library_that_catches_everything_neither_sees_nor_changes_the_end(
    number: signal.Signals, tmp_path: Path
):
    done = end(SWALLOWS, tmp_path, number)
    assert done.returncode == CODES[number]
    assert done.stderr == "attn-export: interrupted; nothing half-written is left\n"
    assert list(tmp_path.iterdir()) == []


def test_an_impatient_user_does_not_keep_it_from_tidying_up(tmp_path: Path):
    slow = """
def slowly(): time.sleep(0.5); (here / "left").unlink(missing_ok=True)
(here / "left").touch()
AT_END.append(slowly)
ready(); wait()
"""
    assert end(slow, tmp_path, signal.SIGINT, times=5).returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_it_says_what_the_command_knows_and_leaves_no_semaphore(tmp_path: Path):
    lock = """
import multiprocessing
from attn_export.interruption import message_if_ended
lock = multiprocessing.get_context("spawn").Lock()
with message_if_ended("interrupted; go on with --resume"):
    ready(); wait()
"""
    done = end(lock, tmp_path, signal.SIGINT)
    assert done.stderr == "attn-export: interrupted; go on with --resume\n"


def test_a_step_that_fails_does_not_prevent_the_others(tmp_path: Path):
    two = """
(here / "left").touch()
AT_END.extend([(here / "left").unlink, lambda: 1 / 0])
ready(); wait()
"""
    assert end(two, tmp_path, signal.SIGTERM).returncode == 143
    assert list(tmp_path.iterdir()) == []


STARTS_ANOTHER = """
import subprocess, time
print('{"event": "started", "pid": %d}' % subprocess.Popen(["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""


def test_a_child_and_what_it_started_end_too(tmp_path: Path):
    parent = f"""
from attn_export.runtimes.child import Child
child = Child([sys.executable, "-c", {STARTS_ANOTHER!r}])
started = child.receive(20)["pid"]
(here / "pids").write_text(f"{{child.pid}} {{started}}")
ready(); wait()
"""
    assert end(parent, tmp_path, signal.SIGTERM).returncode == 143
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    until = time.monotonic() + 10
    while not all(map(gone, pids)):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends such a process")
def test_a_call_that_keeps_the_interpreters_lock_ends_with_its_parent(tmp_path: Path):
    parent = """
from attn_export.runtimes.child import Child, limited
def tells(self, seconds):
    (here / "pid").write_text(str(self.pid))
    time.sleep(1)  # the match has begun
    ready(); wait()
Child.receive = tells
limited("re:match", "f", pattern="(a+)+$", string="a" * 60 + "b")
"""
    assert end(parent, tmp_path, signal.SIGKILL).returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    try:
        while not gone(pid):
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_signal_between_the_two_renames_restores_the_old_folder(tmp_path: Path):
    between = """
from attn_export import output_folder
output_folder.exchange = lambda *_: False  # as on file systems that cannot
rename = Path.rename
def tells(self, target):
    rename(self, target)
    if target.parent.name == "old":
        ready(); wait()
Path.rename = tells
with folder_beside(here / "bundle") as new:
    (new / "new").touch()
    take_place(new, here / "bundle")
"""
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "old").touch()
    assert end(between, tmp_path, signal.SIGTERM).returncode == 143
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "bundle",
        "bundle/old",
    ]


def test_a_folder_that_cannot_be_moved_leaves_the_old_one(tmp_path: Path):
    (tmp_path / "old").mkdir()
    with pytest.raises(FileNotFoundError):
        take_place(tmp_path / "missing", tmp_path / "old")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_terminal_gets_its_cursor_back_and_the_bar_is_gone(tmp_path: Path):
    bar = """
from attn_export.report.progress import progress
with progress(quiet=False):
    os.write(1, b"ready\\n")  # the bar takes what is printed
    time.sleep(60)
"""
    terminal, stderr = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + bar], cwd=tmp_path, preexec_fn=default_signals,
        stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(stderr)
    with process, os.fdopen(terminal, "rb", buffering=0) as shown:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            said = b""
            with contextlib.suppress(OSError):  # the end of a terminal
                while chunk := shown.read(1 << 16):
                    said += chunk
        finally:
            process.kill()
    assert b"\x1b[?25l" in said
    bar_gone, cursor_back = b"\r\x1b[2K", b"\x1b[?25h"
    assert said.endswith(bar_gone + cursor_back + f"attn-export: {MESSAGE}\r\n".encode())


def test_a_block_may_ask_for_an_exception_of_ctrl_c_and_of_nothing_else(tmp_path: Path):
    asks = """
try:
    with ctrl_c_raises():
        ready(); wait()
except KeyboardInterrupt:
    print("shown")
"""
    done = end(asks, tmp_path, signal.SIGINT)
    assert (done.returncode, done.stdout) == (0, "shown\n")
    assert end(asks, tmp_path, signal.SIGTERM).returncode == 143


def test_nohup_stays_nohup(tmp_path: Path):
    script = HEAD.replace(
        "end_on_signal()", "signal.signal(signal.SIGHUP, signal.SIG_IGN); end_on_signal()"
    )
    script += "os.kill(os.getpid(), signal.SIGHUP); print('went on')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "went on\n"
