"""Checkpoints of whole models: loaded as they were saved, or refused by name."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from shared import extended
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

from attn_export.errors import WeightsError
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint
from attn_export.parts.whole_models.model_config import config_of

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SMALL)).save_pretrained(folder)
    return folder


def copy_of(saved: Path, folder: Path, **changes: Any) -> Path:
    config = json.loads((saved / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    return folder


def test_a_model_is_loaded_as_it_was_saved_beside_files_that_are_not_read(saved, tmp_path):
    folder = copy_of(saved, tmp_path, of_somebody=3)
    (folder / "adapter_config.json").write_text("{")
    (folder / "generation_config.json").write_text("{")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.notes == ("config.json: LlamaConfig does not read of_somebody; left out",)
    ids = torch.arange(12).reshape(2, 6)
    with torch.inference_mode():
        found = checkpoint.load()(ids).logits
        wanted = AutoModelForCausalLM.from_pretrained(saved)(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModel": "m.M"}}, "asks for code by auto_map"),
        ({"_attn_implementation": "kernels-community/x"}, "asks for code by _attn_implementation"),
        ({"attn_implementation_internal": "x/y"}, "asks for code by attn_implementation_internal"),
        ({"text_config": {"_experts_implementation": "x/y"}}, "by _experts_implementation"),
        ({"_attn_implementation": {"text_config": "x/y"}}, "asks for code by _attn_implementation"),
        ({"use_kernels": True}, "asks for code by use_kernels"),
        ({"attribute_map": {"x": "_attn_implementation"}, "x": "x/y"}, "by attribute_map"),
        ({"rope_parameters": {"attribute_map": {"x": "y"}}}, "asks for code by attribute_map"),
        ({"rope_parameters": {"quantization_config": {"x": 1}}}, "has a quantization_config"),
        ({"use_pretrained_backbone": True}, "asks for code by use_pretrained_backbone"),
        ({"adapters": ["x"]}, "asks for code by adapters"),
        ({"model_type": "os"}, "model_type 'os' is none of transformers'"),
        ({"model_type": "lama"}, "transformers'; did you mean llama?"),
        ({"model_type": ["llama"]}, "is none of transformers'"),
        ({"architectures": ["Mistral"]}, "architectures must name a model of llama"),
        ({"architectures": [[1]]}, r"architectures must name a model of llama .*; got \[1\]"),
        ({"architectures": ["PreTrainedModel"]}, "architectures must name a model of llama"),
        ({"architectures": ["LlamaConfig"]}, "architectures must name a model of llama"),
        ({"architectures": ["pipelines"]}, "architectures must name a model of llama"),
        ({"architectures": {"x": 1}}, "architectures must name a model of llama"),
        ({"architectures": None}, "architectures must name a model of llama"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "holds no qweight"),
        ({"dtype": "load"}, "dtype must be float32, float16, bfloat16; got 'load'"),
        ({"torch_dtype": "hub"}, "torch_dtype must be"),
        ({"vocab_size": 2**41}, f"vocab_size must be at most {2**40}"),
        ({"hidden_size": "32"}, "is no config of llama"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and its files hold 21"),
        ({"intermediate_size": 10**8}, "numbers, and its files hold"),
        ({"hidden_size": 31}, "no model of this config|is no config of llama"),
        ({"num_hidden_layers": 3}, "lacks 9 tensors of LlamaForCausalLM: model.layers.2."),
        ({"num_hidden_layers": 1}, "and its config does not, 9 tensors"),
        ({"intermediate_size": 72}, "cannot load|in another shape"),
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_asks_for_code_or_lies_is_refused(saved, tmp_path, changes, message):
    with pytest.raises(WeightsError, match=message):
        read_checkpoint(copy_of(saved, tmp_path, **changes)).load()


def test_what_is_no_field_of_a_config_does_not_reach_transformers(saved, tmp_path):
    """Names of a class, of its methods and of what transformers keeps in a config are no fields."""
    changes = {
        "sub_configs": {"x": "y"}, "get_text_config": 3, "name_or_path": "x/y", "default_theta": 5,
        "transformers_weights": "x.bin", "_attn_implementation": "sdpa", "__class__": "x",
    }  # fmt: skip
    checkpoint = read_checkpoint(copy_of(saved, tmp_path, **changes))
    assert checkpoint.notes == (
        "config.json: LlamaConfig does not read default_theta, get_text_config, name_or_path, "
        "sub_configs, transformers_weights; left out",
    )
    assert vars(checkpoint.config) == vars(read_checkpoint(saved).config)


def config_file(folder: Path, kind: str, architecture: str) -> Path:
    config = CONFIG_MAPPING[kind]()
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder / "config.json"


def test_a_model_that_transformers_keeps_to_itself_is_found(tmp_path):
    file = config_file(tmp_path, "voxtral_realtime_text", "VoxtralRealtimeTextModel")
    assert config_of(file, [])[1].__name__ == "VoxtralRealtimeTextModel"


def test_a_model_that_the_installed_packages_lack_is_refused_with_what_to_install(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(modeling_auto.MODEL_MAPPING_NAMES, "llama", "LlamaOfTomorrow")
    with pytest.raises(WeightsError, match=r"LlamaOfTomorrow as a model of .* install a"):
        config_of(config_file(tmp_path, "llama", "LlamaOfTomorrow"), [])
    if importlib.util.find_spec("torchaudio") is None:
        file = config_file(tmp_path, "higgs_audio_v2_tokenizer", "HiggsAudioV2TokenizerModel")
        with pytest.raises(WeightsError, match=r"TokenizerModel needs torchaudio, .*; install it"):
            config_of(file, [])


KEYS_LIKE_CODE = ("wav2vec2", "xmod", "zamba2", "bamba", "mamba2", "nemotron_h", "llava", "gemma3")
"""Types with fields like ``adapter_stride``, infinities, or configs within."""


@pytest.mark.parametrize("kind", extended(CONFIG_MAPPING, lambda kind: kind in KEYS_LIKE_CODE))
@pytest.mark.filterwarnings("ignore")
def test_the_config_of_each_type_is_read_as_save_pretrained_writes_it(kind, tmp_path):
    tables = (t for n, t in vars(modeling_auto).items() if re.fullmatch("MODEL_.*MAPPING_NAMES", n))
    named = next((table[kind] for table in tables if kind in table), None)
    first = named if isinstance(named, str | None) else named[0]
    if first is None or not hasattr(transformers, first) or kind == "moshi":
        pytest.skip("no class of models that transformers exports, or a config that reads itself")
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception:  # some have no config by default
        pytest.skip("no config by default")
    config.architectures = [first]
    config.save_pretrained(tmp_path)
    found, _ = config_of(tmp_path / "config.json", [])
    assert found.to_diff_dict() == config.to_diff_dict()


def missing_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, file)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def outside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (missing_tensor, "lacks 1 tensors of LlamaForCausalLM: model.norm.weight"),
        (pickled, "holds pickles only"),
        (outside, "which is not a file of that folder"),
        (lambda folder: (folder / "config.json").unlink(), "cannot read the config"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds no JSON object"),
    ],
)
def test_files_that_lack_tensors_or_lie_elsewhere_are_refused(
    saved: Path, tmp_path: Path, edit: Callable[[Path], object], message: str
):
    folder = copy_of(saved, tmp_path)
    edit(folder)
    with pytest.raises(WeightsError, match=message):
        read_checkpoint(folder).load()
