"""The command `range`: its inputs, files, limits and errors."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import onnx
import pytest
from conftest import Cli
from range_graphs import CASES, FITTING
from shared import bundle_of

from attn_export.parts.value_ranges.range_flow import InputSets, ranges_of

CASE = CASES["squares of a norm, absorbed"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a graph that does not fit float16, with inputs beside it."""
    np.savez(tmp_path / "real.npz", **CASE.inputs())
    path = CASE.write(tmp_path / "model.onnx")
    model = onnx.load(path, load_external_data=False)
    model.producer_name, model.producer_version = "theirs", "1.2"
    onnx.save(model, path)
    return path


def test_the_command_names_writes_and_judges(model: Path, cli: Cli, tmp_path: Path):
    files = ("--fix", "half.onnx", "--json", "r.json", "--html", "r.html")
    done = cli("range", model, "--inputs", "real.npz", *files)
    assert done.returncode == 0, done.stderr
    assert "squares (Pow)" in done.stdout
    assert "inf, absorbed: outputs are finite and wrong by 1e+02 %" in done.stdout
    assert "written: half.onnx, judged: 1/1; ort-cpu passes" in done.stdout
    result = json.loads((tmp_path / "r.json").read_text())
    assert [each["node"] for each in result["findings"]] == ["squares", "mean", "sum"]
    assert result["findings"][0]["made"]
    assert not result["findings"][1]["made"]
    assert result["fix"]["nodes"] == list(CASE.kept)
    fixed = onnx.load(tmp_path / "half.onnx", load_external_data=False)
    assert (fixed.producer_name, fixed.producer_version) == ("theirs", "1.2")
    assert 'href="#v1-squares"' in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("findings<=0", 6), ("findings<=3", 0), ("margin>=1", 6), ("margin>=-9", 0),
        ("error<=2", 6), ("kept<=0", 0),
    ],
)  # fmt: skip
def test_a_limit_that_is_exceeded_is_a_mismatch(limit: str, code: int, model: Path, cli: Cli):
    done = cli("range", model, "--inputs", "real.npz", "--limit", limit, "--quiet")
    assert (done.returncode, bool(done.stderr)) == (code, code == 6), done.stderr


def test_budgets_decide_instead_of_the_rule(model: Path, cli: Cli):
    assert cli("range", model, "--inputs", "real.npz", "--budget", "sqnr>=20").returncode == 6
    fixed = ("--fix", "half.onnx", "--budget", "sqnr>=50")
    assert cli("range", model, "--inputs", "real.npz", *fixed).returncode == 0


FUNCTION = """
import numpy as np
def sets():
    for scale in (1.0, 600.0):
        yield {"x": np.ones((2, 16)) * scale}
def wrong():
    return 3
"""


def test_a_function_may_give_several_sets(model: Path, cli: Cli, tmp_path: Path):
    (tmp_path / "inputs.py").write_text(FUNCTION)
    done = cli("range", model, "--inputs", "inputs.py:sets")
    assert "does not fit float16, in 1 of 2 sets of inputs" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--inputs", "none.npz"), "No such file"),
        (("--inputs", "other.npz"), "holds 1 array of another name: y; it may hold x"),
        (("--inputs", "shape.npz"), r"x is float32 [3]; the graph takes float32 ['?', 16]"),
        (("--inputs", "kind.npz"), "not a .npz file"),
        (("--inputs", "inputs.py:wrong"), "returned int; return a mapping of arrays by name"),
        (("--module", "a.py:f"), "to look at; give one of MODEL.onnx"),
        (("--fix", "half"), "--fix half is no .onnx file"),
        (("--limit", "findings=0"), "--limit is findings<=NUMBER"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: tuple[str, ...], message: str, model: Path, cli: Cli, tmp_path: Path
):
    (tmp_path / "inputs.py").write_text(FUNCTION)
    np.savez(tmp_path / "other.npz", y=np.zeros(3))
    np.savez(tmp_path / "shape.npz", x=np.zeros(3, np.float32))
    np.savez(tmp_path / "kind.npz", x=np.array([object()]))
    done = cli("range", model, *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_graph_that_cannot_be_mended_leaves_no_file(cli: Cli, tmp_path: Path):
    path = CASES["an angle with few digits"].write(tmp_path / "model.onnx")
    arguments = ("--fix", "half.onnx", "--budget", "sqnr>=200")
    done = cli("range", path, *arguments)
    assert done.returncode == 6
    assert "not mended" in done.stdout
    assert not (tmp_path / "half.onnx").exists()


def test_a_bundle_is_looked_at_in_its_cases(cli: Cli):
    done: CompletedProcess[str] = cli("range", bundle_of("no-cache"))
    assert done.returncode == 0, done.stderr
    assert "fits float16" in done.stdout
    assert "cases of" in done.stdout


def test_hostile_names_are_harmless(cli: Cli, tmp_path: Path):
    path = CASE.write(tmp_path / "model.onnx")
    graph = onnx.load(path)
    for node in graph.graph.node:
        node.name = f"<script>{node.name}\x1b[31m[red]"
    onnx.save_model(graph, path)
    done = cli("range", path, "--html", "r.html", "--json", "r.json", "--fix", "half.onnx")
    assert "\x1b" not in done.stdout
    page = (tmp_path / "r.html").read_text()
    assert "<script>" not in page
    assert "\x1b" not in page


def test_inputs_in_bfloat16_round_further(tmp_path: Path):
    path = FITTING["a norm"].write(tmp_path / "model.onnx")
    sets = InputSets([FITTING["a norm"].inputs()], "drawn")
    errors = [ranges_of(path, sets, (), d).analysis.error.whole for d in ("float16", "bfloat16")]
    assert 4 < errors[1] / errors[0] < 16
