"""`build` from a config.json, and of attention whose K/V heads are pooled, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tiny_llama import HKV, LLAMA, D, E, write_tiny_llama

from attn_export import AttentionSpec, Subject
from attn_export.commands.main import run

MINE = """
import torch
from torch import nn
from attn_export import Subject

torch.manual_seed(0)
THEIRS = nn.MultiheadAttention(16, 4, batch_first=True).eval()

def theirs():
    return THEIRS

def other():
    return Subject(nn.Linear(4, 4).eval(), {"input": torch.randn(2, 4)}, {"input": {0: "n"}}, ["y"])
"""


def build(*arguments: str | Path) -> int:
    few = ("--runtime", "ort-cpu", "--dialect", "standard")
    return run(["build", *map(str, arguments), *few, "--output", "out"])


def weight_of(name: str) -> np.ndarray:
    graph = onnx.load("out/model.onnx").graph
    return numpy_helper.to_array(next(t for t in graph.initializer if t.name == name))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tiny_llama(tmp_path / "llama")
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_config_gives_the_dimensions_and_a_seed_the_weights(place: Path):
    assert build("llama/config.json", "--seed", 1, "--cache", "append") == 0
    config = place / "llama" / "config.json"
    one, other = (Subject.from_config(config, seed=n, cache="append").module for n in (1, 2))
    found = weight_of("k_proj.weight")
    assert found.shape == (E, HKV * D)
    assert np.array_equal(found, one.k_proj.weight.detach().numpy().T)
    assert not np.array_equal(found, other.k_proj.weight.detach().numpy().T)
    spec = AttentionSpec.from_toml("out/spec.toml")
    assert (spec.num_kv_heads, spec.rotary, spec.rotary_theta) == (HKV, "half", 5e5)
    assert (spec.cache, spec.causal) == ("append", True)


def test_pooled_heads_are_the_mean_and_pass(place: Path):
    assert build("--module", "mine.py:theirs", "--pool-kv-heads", 2) == 0
    stored = np.asarray(run_mine(place)["THEIRS"].in_proj_weight.detach())[32:]  # those of values
    mean = stored.reshape(2, 2, 4, 16).mean(1).reshape(8, 16)
    np.testing.assert_allclose(weight_of("v_proj.weight"), mean.T, rtol=1e-6)
    assert AttentionSpec.from_toml("out/spec.toml").num_kv_heads == 2
    notes = json.loads(Path("out/report.json").read_text())["notes"]
    assert "K/V heads were pooled from 4 to 2 by their means" in notes


def run_mine(place: Path) -> dict:
    import runpy

    return runpy.run_path(str(place / "mine.py"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "llama"], "--weights was removed in 0.3.0; use build --model FOLDER --lay"),
        (["--layer", "1"], "--layer was removed in 0.3.0"),
        (["--pool-kv-heads", "1", "--variant", "mha"], "--pool-kv-heads 1 without --module"),
        (["--pool-kv-heads", "3", "--module", "mine.py:theirs"], "choose one of 1, 2, 4"),
        (["--pool-kv-heads", "2", "--module", "mine.py:other"], "gives a Linear; it takes an nn."),
        (["llama"], "cannot read the spec llama"),
        (["nowhere/config.json"], "nowhere/config.json does not exist; check the path"),
        (["llama/config.json", "--num-kv-heads", "3"], "num_kv_heads 3"),
    ],
)
def test_options_that_do_not_fit_are_named(
    arguments: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
):
    del place
    assert build(*arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not Path("out").exists()


def test_a_config_of_unknown_models_is_refused(place: Path, capsys: pytest.CaptureFixture[str]):
    (place / "llama/config.json").write_text(json.dumps(LLAMA | {"model_type": "shiny"}))
    assert build("llama/config.json") == 2
    assert "model_type 'shiny', which is not in the table" in capsys.readouterr().err
