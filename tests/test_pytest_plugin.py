"""The pytest plugin, from a project of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attn_export.tensorfile import read_tensor, write_tensor

TESTS = """
import pytest
import torch
from torch import nn

from attn_export import AttentionSpec

AXES = {"query": {0: "batch", 1: "query_len"}}


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, query):
        return self.proj(query).softmax(-1)


def test_a_module(parity):
    report = parity(Scores().eval(), {"query": torch.randn(2, 5, 8)}, AXES, dialects=["standard"])
    assert report.passed


def test_a_spec(parity):
    parity(AttentionSpec(embed_dim=16, num_heads=2), dialects=["portable"])


def test_a_gate_that_nothing_meets(parity):
    parity(Scores().eval(), {"query": torch.randn(2, 5, 8)}, AXES, dialects=["standard"], atol=0.0)


@pytest.mark.parity("small")
def test_a_bundle(parity_case):
    parity_case.check()


def test_a_whole_bundle(parity):
    parity("small")
"""


@pytest.fixture
def project(bundle: Path, tmp_path: Path) -> Path:
    """A project of somebody else's, with a bundle in it."""
    (tmp_path / "test_theirs.py").write_text(TESTS)
    shutil.copytree(bundle, tmp_path / "small")
    return tmp_path


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # The plugin by its name: whether the installed package declares it is asked below.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *words]
    return subprocess.run(command, cwd=project, capture_output=True, text=True)


def outcomes(project: Path, *words: str) -> tuple[dict[str, int], str]:
    done = run(project, *words)
    last = done.stdout.strip().splitlines()[-1]
    counts = {
        word: int(number)
        for number, word in (part.split()[:2] for part in last.split(" in ")[0].split(", "))
    }
    return counts, done.stdout


def test_modules_specs_and_bundles_pass_and_a_failure_is_explained(project: Path):
    counts, said = outcomes(project, "-k", "not bundle", "--parity-report", "reports")
    assert counts == {"failed": 1, "passed": 2, "deselected": counts["deselected"]}
    assert "no parity" in said
    assert "outside --atol 0 --rtol 0 of eager" in said
    assert "array(" not in said
    reports = sorted((project / "reports").iterdir())
    assert len(reports) == 3
    assert sum(json.loads(path.read_text())["passed"] for path in reports) == 2


def test_each_case_of_a_bundle_is_a_test_also_with_xdist(project: Path):
    cases = len(json.loads((project / "small" / "golden" / "index.json").read_text())["cases"])
    assert outcomes(project, "-k", "bundle")[0]["passed"] == cases + 1
    assert outcomes(project, "-k", "bundle", "-n", "2")[0]["passed"] == cases + 1


def test_a_bundle_that_was_changed_is_refused_in_one_line(project: Path):
    folder = project / "small" / "golden"
    entry = json.loads((folder / "index.json").read_text())["cases"][3]
    path = folder / entry["folder"] / "output_0.pb"
    name, array = read_tensor(path)
    write_tensor(path, name, array * 1.01)
    counts, said = outcomes(
        project, "-k", "bundle", "-x", "--deselect", "test_theirs.py::test_a_bundle"
    )
    assert "was changed after the bundle was written" in said
    assert counts["failed"] == 1


def test_a_required_runtime_that_is_not_here_fails(project: Path):
    counts, said = outcomes(project, "-k", "whole_bundle", "--parity-require", "ort-cuda")
    assert counts["failed"] == 1
    assert "ort-cuda not run" in said


def test_named_runtimes_take_the_place_of_those_of_the_test(project: Path):
    words = ("-k", "whole_bundle", "--parity-runtime", "onnx-reference", "--parity-report", "r")
    assert outcomes(project, *words)[0]["passed"] == 1
    (path,) = (project / "r").iterdir()
    runs = json.loads(path.read_text())["runs"]
    assert [run["runtime"] for run in runs] == ["onnx-reference"]


def test_a_marker_without_a_bundle_or_with_a_wrong_one_is_one_line(project: Path):
    for marker, says in (
        ("", "needs @pytest.mark.parity(BUNDLE)"),
        ('"nothing"', "cannot be read"),
    ):
        text = f"import pytest\n@pytest.mark.parity({marker})\ndef test_it(parity_case): pass\n"
        (project / "test_theirs.py").write_text(text)
        done = run(project)
        assert done.returncode == 4 or done.returncode == 2
        assert says in done.stdout + done.stderr
