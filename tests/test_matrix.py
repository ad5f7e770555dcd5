"""Tests of the matrix of scripts/matrix, with three models."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT
from shared import always

MODELS = ("gqa-in-place", "mqa", "cross")


@pytest.mark.extended
def test_three_models_pass_in_every_required_runtime(request: pytest.FixtureRequest):
    required = request.config.getoption("--require")
    runtimes = [name for name in always() if name in required] or ["ort-cpu", "onnx-reference"]
    options = [word for name in runtimes for word in ("--runtime", name)]
    command = [sys.executable, str(ROOT / "scripts" / "matrix"), *options]
    done = subprocess.run(
        [*command, "--models", f"^({'|'.join(MODELS)})$"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(MODELS)} models" in done.stdout
    assert "FAILED" not in done.stdout
    table = [line for line in done.stdout.splitlines() if line.startswith("|") and "(" in line]
    rows = {line.split("|")[1].strip() for line in table}  # "(" is in a processor's name as well
    assert set(runtimes) <= rows
