"""Runtimes send no telemetry, and leave no files in the user's home."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from shared import always
from subjects import shared_folder, stored

HEARING = """
import sys

def hear(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        sys.stdout.write(f"{event} {arguments[1:]}\\n")

sys.addaudithook(hear)
"""
"""The start of a program that prints what it asks of the network."""

LOADING = """
from pathlib import Path
from attn_export.runtimes.catalogue import runtime
kind = runtime(sys.argv[1])
kind.prepare()
engine = kind.load(Path(sys.argv[2]), 1)
sys.stdout.write("loaded\\n")
"""

COMPARING = """
from pathlib import Path
from attn_export.commands.lower_here import SourceRuns
graph = Path(sys.argv[1])
sys.stdout.write(SourceRuns(graph).difference(graph, {}) or "loaded\\n")
"""


@pytest.mark.parametrize("name", [name for name in always() if name != "wasm"])
def test_loading_a_graph_makes_no_calls_and_leaves_no_files(
    name: str,
    need: Callable[[str], None],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
):
    need(name)
    subject = stored("causal", shared_folder(tmp_path_factory))
    check_silent(LOADING, [name, str(subject.folder / "model.onnx")], tmp_path)


def test_comparing_graphs_makes_no_calls_and_leaves_no_files(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
):
    subject = stored("causal", shared_folder(tmp_path_factory))
    check_silent(COMPARING, [str(subject.folder / "model.onnx")], tmp_path)


def check_silent(program: str, arguments: list[str], home: Path) -> None:
    """Run a program, and check that it makes no calls and leaves no files in `home`."""
    # Without CI's variables, in which OpenVINO sends nothing.
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "TF_BUILD", "JENKINS_URL")}
    ran = subprocess.run(
        [sys.executable, "-c", HEARING + program, *arguments],
        env={**kept, "HOME": str(home), "TMPDIR": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "loaded\n", ran.stderr
    assert list(home.rglob("*")) == []
