"""Runtimes send no telemetry, and leave no files in the user's home."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from subjects import shared_folder, stored

WATCHED = """
import sys

def hear(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        sys.stdout.write(f"{event} {arguments[1:]}\\n")

sys.addaudithook(hear)
from pathlib import Path
from attn_export.runtimes.catalogue import runtime
kind = runtime(sys.argv[1])
kind.prepare()
engine = kind.load(Path(sys.argv[2]), 1)
sys.stdout.write("loaded\\n")
"""


@pytest.mark.parametrize(
    "name", ["ort-cpu", "onnx-reference", "openvino", "tract", "c", "cpp", "node"]
)
def test_loading_a_graph_makes_no_calls_and_leaves_no_files(
    name: str,
    need: Callable[[str], None],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
):
    need(name)
    subject = stored("causal", shared_folder(tmp_path_factory))
    # Without CI's variables, in which OpenVINO sends nothing.
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "TF_BUILD", "JENKINS_URL")}
    ran = subprocess.run(
        [sys.executable, "-c", WATCHED, name, subject.folder / "model.onnx"],
        env={**kept, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "loaded\n", ran.stderr
    assert list(tmp_path.rglob("*")) == []
