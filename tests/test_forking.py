"""Tests that forked processes behave like new ones."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import command
from forking import Forked, forking, run_forked, started_anew
from processes import gone

from attn_export.runtimes.child import CHILD_MAIN, Child, call_in_child, child_command
from attn_export.runtimes.protocol import Limits

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="nothing is forked here")
LIMITS = Limits(threads=1, seconds=60, memory_mib=None)
COMMAND = child_command(f"{CHILD_MAIN}:call", LIMITS)


@pytest.mark.parametrize("with_torch", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [("build", "--help"), ("compare", "no.onnx", "none.onnx"), ("build", "--variant", "mlp")],
    ids=str,
)
def test_a_forked_command_prints_and_ends_as_a_new_one(
    arguments: tuple[str, ...], with_torch: bool, tmp_path: Path
):
    new = subprocess.run(command(arguments), cwd=tmp_path, capture_output=True, text=True)
    forked = run_forked(arguments, tmp_path, with_torch=with_torch)
    assert (forked.returncode, forked.stdout, forked.stderr) == (
        new.returncode, new.stdout, new.stderr,
    )  # fmt: skip
    assert (new.stdout if new.returncode == 0 else new.stderr) != ""


def called(function: str, **arguments: object) -> object:
    """Return the result of a function that is called in a process of its own."""
    return call_in_child(function, arguments, LIMITS)


def test_it_has_the_environment_and_the_folder_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert called("os:getcwd") != str(tmp_path)  # the server has started
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OF_THIS_TEST", "yes")
    monkeypatch.delenv("HOME")
    assert called("os:getcwd") == str(tmp_path)
    assert called("tempfile:gettempdir") == str(tmp_path)
    assert [called("os:getenv", key=name) for name in ("OF_THIS_TEST", "HOME")] == ["yes", None]


def test_it_ends_by_a_signal_as_a_new_one():
    ends = []
    for anew in (False, True):
        with started_anew() if anew else contextlib.nullcontext():
            child = Child(COMMAND)
        assert isinstance(child._process, Forked) == (forking() and not anew)
        os.killpg(child.pid, signal.SIGTERM)
        ends.append(child.describe_exit())
        child.close()
        assert gone(child.pid)
    assert ends == ["ended with signal SIGTERM"] * 2


def test_with_all_nothing_is_forked(request: pytest.FixtureRequest):
    assert forking() != request.config.getoption("--all")
