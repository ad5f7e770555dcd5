"""The pytest plugin, from a project of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from attn_export.tensorfile import read_tensor, write_tensor

# Two files: what has to do with bundles needs no torch, and is done in a third of the time.
MODULES = """
import warnings

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


def test_a_spec(parity):
    assert parity(AttentionSpec(embed_dim=8, num_heads=1), dialects=["standard"]).passed


def test_a_graph_of_others(parity, tmp_path):
    module, query = Scores().eval(), torch.randn(2, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = {0: torch.export.Dim("n"), 1: torch.export.Dim("l")}
        torch.onnx.export(
            module, (query,), str(tmp_path / "mine.onnx"), dynamo=True, verbose=False,
            dynamic_shapes={"query": axes},
        )
    parity(module, {"query": query}, AXES, graph=tmp_path / "mine.onnx")


def test_a_gate_that_nothing_meets(parity):
    parity(Scores().eval(), {"query": torch.randn(2, 5, 8)}, AXES, dialects=["standard"], atol=0.0)
"""
BUNDLES = """
import numpy as np
import onnx
import pytest


@pytest.mark.parity("small")
def test_a_bundle(parity_case):
    parity_case.check()


def test_a_whole_bundle(parity):
    parity("small")
"""


@pytest.fixture
def project(bundle: Path, tmp_path: Path) -> Path:
    """Return a user's project, with a bundle in it."""
    (tmp_path / "test_modules.py").write_text(MODULES)
    (tmp_path / "test_bundles.py").write_text(BUNDLES)
    shutil.copytree(bundle, tmp_path / "small")
    return tmp_path


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # The plugin by its name: a test below checks that the installed package declares it.
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
    options = ("--parity-report", "reports", "--parity-runtime", "ort-cpu")
    counts, said = outcomes(project, "test_modules.py", *options)
    assert counts == {"failed": 1, "passed": 2}
    assert "no parity" in said
    assert "outside --atol 0 --rtol 0 of eager" in said
    assert "array(" not in said
    reports = sorted((project / "reports").glob("*.json"))
    assert len(reports) == 3
    assert all("<html" in path.with_suffix(".html").read_text() for path in reports)
    contents = [json.loads(path.read_text()) for path in reports]
    assert sum(content["passed"] for content in contents) == 2
    names = {"test_a_spec", "test_a_graph_of_others"}
    assert {content["name"] for content in contents} == names | {"test_a_gate_that_nothing_meets"}


def test_each_case_of_a_bundle_is_a_test_with_xdist(project: Path):
    cases = len(json.loads((project / "small" / "golden" / "index.json").read_text())["cases"])
    assert outcomes(project, "test_bundles.py", "-n", "2")[0]["passed"] == cases + 1


def test_a_bundle_that_was_changed_is_refused_in_one_line(project: Path):
    folder = project / "small" / "golden"
    entry = json.loads((folder / "index.json").read_text())["cases"][3]
    path = folder / entry["folder"] / "output_0.pb"
    name, array = read_tensor(path)
    write_tensor(path, name, array * 1.01)
    for name in ("test_a_whole_bundle", "test_a_bundle"):
        counts, said = outcomes(project, f"test_bundles.py::{name}")
        assert "was changed after the bundle was written" in said
        assert counts in ({"failed": 1}, {"error": 1})  # not one for each case


def test_a_failure_leaves_a_folder_that_reproduces_it(project: Path):
    model = onnx.load(project / "small" / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor) * np.float32(1.5)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, project / "scaled.onnx")
    (project / "test_scaled.py").write_text(
        "def test_scaled(parity): parity('small', graph='scaled.onnx', runtimes=['ort-cpu'])"
    )
    counts, said = outcomes(
        project, "test_scaled.py", "--parity-report", "reports", "--junitxml", "junit.xml"
    )
    assert counts == {"failed": 1}
    (folder,) = (project / "reports").glob("*.explained")
    command = f"python reports/{folder.name}/reproduce.py"
    (page,) = (project / "reports").glob("*.html")
    assert f"<code>{command}</code>" in page.read_text()
    assert "folder of the bundle" not in page.read_text()
    assert f"reproduce: {command}" in said
    assert command in (project / "junit.xml").read_text()
    done = subprocess.run([sys.executable, "reproduce.py"], cwd=folder, capture_output=True)
    assert done.returncode == 1, done.stderr


def test_a_required_runtime_that_is_not_here_fails(project: Path):
    counts, said = outcomes(
        project, "test_bundles.py::test_a_whole_bundle", "--parity-require", "ort-cuda"
    )
    assert counts["failed"] == 1
    assert "ort-cuda not run" in said


def test_named_runtimes_take_the_place_of_those_of_the_test(project: Path):
    options = ("--parity-runtime", "onnx-reference", "--parity-report", "r")
    words = ("test_bundles.py::test_a_whole_bundle", *options)
    assert outcomes(project, *words)[0]["passed"] == 1
    (path,) = (project / "r").glob("*.json")
    runs = json.loads(path.read_text())["runs"]
    assert [run["runtime"] for run in runs] == ["onnx-reference"]


def test_the_table_of_the_project_names_runtimes_where_no_option_does(project: Path):
    (project / "pyproject.toml").write_text('[tool.attn-export]\nruntimes = ["onnx-reference"]\n')
    words = ("test_bundles.py::test_a_whole_bundle", "--parity-report", "r")
    assert outcomes(project, *words)[0]["passed"] == 1
    (path,) = (project / "r").glob("*.json")
    runs = json.loads(path.read_text())["runs"]
    assert [run["runtime"] for run in runs] == ["onnx-reference"]


def test_a_marker_without_a_bundle_or_with_a_wrong_one_is_one_line(project: Path):
    for marker, fixture, says in (
        ("", "parity_case", "needs @pytest.mark.parity(BUNDLE)"),
        ('"nothing"', "parity_case", "cannot be read"),
        ('"nothing"', "", "is marked with parity and does not use parity_case"),
    ):
        text = f"import pytest\n@pytest.mark.parity({marker})\ndef test_it({fixture}): pass\n"
        (project / "test_bundles.py").write_text(text)
        done = run(project, "test_bundles.py")
        assert done.returncode == 4 or done.returncode == 2
        assert says in done.stdout + done.stderr
