"""`check` on graphs of any origin: it only warns of properties that the ONNX standard allows."""

from __future__ import annotations

import contextlib
import runpy
import warnings
from pathlib import Path

import onnx
import pytest
from conftest import Cli

from attn_export.commands.check import check
from attn_export.graph.checks import CHECKS

pytestmark = pytest.mark.xdist_group("test_check")  # what it exports is shared

EXPORT = """
import torch

layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)).eval()
torch.onnx.export(layer, (torch.randn(2, 4),), "plain.onnx", opset_version=18, dynamo=True)
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what PyTorch's exporter writes, with the lines of the module in it."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "export.py").write_text(EXPORT)
    with contextlib.chdir(folder), warnings.catch_warnings(action="ignore"):
        runpy.run_path("export.py")
    return folder / "plain.onnx"


def test_a_plain_export_passes_with_one_line_for_each_kind_of_warning(cli: Cli, plain: Path):
    done = cli("check", plain)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    warnings = [line.split(": warning: ")[1] for line in lines[:-1]]
    assert [line.partition(":")[0] for line in warnings] == ["ir_version", "no_host_paths"]
    assert "IR version 10 with opset 18" in warnings[0]
    count = sum(finding.check == "no_host_paths" for finding in check(plain))
    assert count > 2
    assert warnings[1].endswith(f"(and {count - 1} more like it)")
    assert lines[-1].endswith(f": {len(CHECKS) - 2} checks passed")


def test_a_violation_of_the_standard_fails_beside_warnings(cli: Cli, plain: Path):
    model = onnx.load(plain)
    model.graph.node[0].op_type = "Nothing"
    onnx.save(model, plain.with_name("broken.onnx"))
    done = cli("check", plain.with_name("broken.onnx"))
    assert done.returncode == 4
    assert "broken.onnx: onnx_checker: " in done.stdout
    assert "checks passed" not in done.stdout


def test_in_a_bundle_a_broken_project_rule_is_an_error(bundle: Path, tmp_path: Path):
    for name in ("model.onnx", "manifest.json"):
        (tmp_path / name).write_bytes((bundle / name).read_bytes())
    model = onnx.load(tmp_path / "model.onnx")
    model.ir_version = 12
    onnx.save(model, tmp_path / "model.onnx")
    (finding,) = check(tmp_path / "model.onnx")
    assert (finding.check, finding.is_warning) == ("ir_version", False)
    (tmp_path / "manifest.json").unlink()
    (finding,) = check(tmp_path / "model.onnx")
    assert (finding.check, finding.is_warning) == ("ir_version", True)


@pytest.mark.parametrize("dialect", ["standard", "portable", "ort"])
@pytest.mark.every(4)
def test_lower_says_that_there_is_no_attention_node(cli: Cli, plain: Path, dialect: str):
    done = cli("lower", plain, "--dialect", dialect, "--output", "out.onnx")
    assert done.returncode == 4
    assert "has no Attention node" in done.stderr
    assert f"to lower to the {dialect} dialect" in done.stderr


def test_lower_to_the_portable_opset_says_that_only_that_changes(cli: Cli, plain: Path):
    newer = onnx.version_converter.convert_version(onnx.load(plain), 21)
    onnx.save(newer, plain.with_name("newer.onnx"))
    done = cli(
        "lower", plain.with_name("newer.onnx"), "--dialect", "portable", "--output", "o.onnx"
    )
    assert done.returncode == 0, done.stderr
    assert "no Attention node; only the opset was changed" in done.stdout
