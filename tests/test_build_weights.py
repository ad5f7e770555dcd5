"""`build --weights`: a checkpoint through the whole command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from tiny_llama import HKV, LLAMA, D, E, H, llama_weights, write_tiny_llama

from attn_export import Attention, AttentionSpec, Subject
from attn_export.commands.main import run
from attn_export.tensorfile import read_tensors


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tiny-llama"
    write_tiny_llama(folder)
    monkeypatch.chdir(tmp_path)
    return folder


def build(*arguments: str | Path, dialect: str = "standard") -> int:
    return run(["build", *map(str, arguments), "--runtime", "ort-cpu", "--dialect", dialect])


def weight_of(bundle: Path, name: str) -> np.ndarray:
    graph = onnx.load(bundle / "model.onnx").graph
    return numpy_helper.to_array(next(t for t in graph.initializer if t.name == name))


def test_a_checkpoint_alone_is_built_as_its_config_says(llama: Path):
    code = build(
        "--weights", llama, "--layer", 1, "--cache", "append", "--attn-mask", "bool[B,1,1,S]",
        dialect="all",
    )  # fmt: skip
    assert code == 0
    bundle = Path("models/tiny-llama")
    stored = llama_weights()["model.layers.1.self_attn.k_proj.weight"].numpy()
    np.testing.assert_array_equal(weight_of(bundle, "k_proj.weight"), stored.T)
    spec = AttentionSpec.from_toml(bundle / "spec.toml")
    assert (spec.num_kv_heads, spec.rotary, spec.rotary_theta, spec.causal) == (
        2,
        "half",
        5e5,
        True,
    )
    assert (spec.cache, spec.attn_mask, spec.bias) == ("append", "bool[B,1,1,S]", "none")
    notes = json.loads((bundle / "report.json").read_text())["notes"]
    assert any("model.layers.1.self_attn of model.safetensors" in note for note in notes)


def test_a_config_alone_is_built_with_weights_of_the_seed(llama: Path):
    (llama / "model.safetensors").unlink()
    for bundle in ("a", "b"):
        seed = {"a": 1, "b": 2}[bundle]
        assert build("--weights", llama, "--seed", seed, "--output", f"models/{bundle}") == 0
    values = [weight_of(Path("models") / bundle, "k_proj.weight") for bundle in ("a", "b")]
    assert values[0].shape == values[1].shape == (E, HKV * D)
    assert not np.array_equal(*values)


def test_a_checkpoint_without_config_is_built_from_a_spec(llama: Path):
    (llama / "config.json").unlink()
    Path("own.toml").write_text(
        f"embed_dim = {E}\nnum_heads = {H}\nnum_kv_heads = {HKV}\nbias = 'none'\ncausal = true\n"
    )
    assert build("own.toml", "--weights", llama / "model.safetensors") == 0
    assert build("--weights", llama / "model.safetensors", "--embed-dim", E, "--num-heads", H,
                 "--num-kv-heads", HKV, "--bias", "none", "--output", "other") == 0  # fmt: skip


def test_pooled_heads_are_the_mean_and_pass(llama: Path):
    assert build("--weights", llama, "--pool-kv-heads", 1, "--output", "pooled") == 0
    stored = llama_weights()["model.layers.0.self_attn.v_proj.weight"].numpy()
    mean = stored.reshape(HKV, D, E).mean(0)
    np.testing.assert_allclose(weight_of(Path("pooled"), "v_proj.weight"), mean.T, rtol=1e-6)
    assert AttentionSpec.from_toml(Path("pooled/spec.toml")).num_kv_heads == 1


def test_pooling_to_the_heads_that_there_are_gives_the_same_graph(llama: Path):
    assert build("--weights", llama, "--output", "plain") == 0
    assert build("--weights", llama, "--pool-kv-heads", HKV, "--output", "pooled") == 0
    assert Path("plain/model.onnx").read_bytes() == Path("pooled/model.onnx").read_bytes()


def test_from_python_it_is_a_subject(llama: Path):
    subject = Subject.from_checkpoint(llama, layer=1, cache="append")
    assert isinstance(subject.module, Attention)
    assert subject.module.spec.cache == "append"
    wanted = llama_weights()["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(subject.module.q_proj.weight, wanted)


def test_the_golden_truth_is_that_of_the_checkpoint(llama: Path):
    assert build("--weights", llama, "--output", "b") == 0
    case = Path("b/golden/test_data_set_0")
    query = torch.from_numpy(read_tensors(case, "input", ["query"])["query"].copy()).double()
    values = llama_weights()
    v, o = (values[f"model.layers.0.self_attn.{n}_proj.weight"].double() for n in "vo")
    assert query.shape[1] == 1  # one query and one key: attention is its value
    heads = (query @ v.T).unflatten(-1, (HKV, D)).repeat_interleave(H // HKV, 2).flatten(2)
    truth = read_tensors(case, "output", ["output"])["output"]
    np.testing.assert_allclose(truth, (heads @ o.T).numpy(), rtol=1e-5, atol=1e-6)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lengthen(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")


def index_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "away.safetensors")
    where = dict.fromkeys(llama_weights(), "../away.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def other_architecture(folder: Path) -> None:
    save_file({"conv.weight": torch.ones(3, 3)}, folder / "model.safetensors")


def not_a_number(folder: Path) -> None:
    values = llama_weights()
    values["model.layers.0.self_attn.k_proj.weight"][3, 4] = float("nan")
    save_file(values, folder / "model.safetensors")


def contradicting_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": 4}))


def left_over(folder: Path) -> None:
    more = {"model.layers.0.self_attn.q_proj.lora": torch.ones(2)}
    save_file(llama_weights() | more, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(llama_weights(), folder / "model.pt")


BROKEN = {
    truncate: ("", "model.safetensors"),
    lengthen: ("", "model.safetensors"),
    index_outside: ("", "away.safetensors"),
    other_architecture: ("", "conv.weight"),
    not_a_number: ("", "k_proj.weight"),
    contradicting_config: ("", "num_key_value_heads"),
    left_over: ("", "q_proj.lora"),
    pickled: ("/model.pt", "save_file"),
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_a_broken_checkpoint_is_one_line_and_writes_nothing(
    damage, llama: Path, capsys: pytest.CaptureFixture[str]
):
    damage(llama)
    suffix, message = BROKEN[damage]
    assert build("--weights", f"{llama}{suffix}", "--output", "b") == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(Path().glob("b*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "1", "--variant", "mha"], "--layer 1 without --weights"),
        (["--pool-kv-heads", "1", "--variant", "mha"], "--pool-kv-heads 1 without --weights"),
        (["--weights", "x", "--module", "y.py:f"], "--weights with --module y.py:f"),
        (["--weights", "nowhere"], "nowhere"),
        (["--weights", "tiny-llama", "--layer", "7"], "7"),
        (["--weights", "tiny-llama", "--pool-kv-heads", "3"], "3"),
        (["--weights", "tiny-llama", "--num-kv-heads", "4"], "num_kv_heads"),
    ],
)
def test_options_that_do_not_fit_are_named(
    arguments: list[str], message: str, llama: Path, capsys: pytest.CaptureFixture[str]
):
    assert build(*arguments) == 2
    assert message in capsys.readouterr().err
