"""Hostile checkpoints and exports of whole models, which `compare --model --graphs` reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from hostile.bundles import Random, damaged, displace, maker, pick
from hostile.values import changed
from safetensors.numpy import save_file

EXPORTS = Path(__file__).with_name("exports")


@maker
def whole_model(bundle: Path, place: Path, random: Random) -> list[str]:
    """Damage a config, tensors, a graph or the names of one."""
    del bundle
    place.mkdir()
    checkpoint, graphs = place / "checkpoint", place / "graphs"
    shutil.copytree(EXPORTS / "qwen2" / "checkpoint", checkpoint)
    # The graphs of another model: what is read without complaint is refused all the same.
    shutil.copytree(EXPORTS / "llama" / "genai", graphs)
    files = [
        checkpoint / "config.json", checkpoint / "model.safetensors",
        graphs / "genai_config.json", graphs / "model.onnx",
    ]  # fmt: skip
    path = pick(random, [files[0], *files])
    if path.suffix == ".json" and random.random() < 0.8:
        path.write_text(json.dumps(changed(json.loads(path.read_text()), random)))
    elif random.random() < 0.15:
        displace(path, random)
    else:
        path.write_bytes(damaged(path.read_bytes(), random))
    return ["compare", "--model", str(checkpoint), "--graphs", str(graphs), "--runtime", "ort-cpu"]


@maker
def sentence_modules(bundle: Path, place: Path, random: Random) -> list[str]:
    """Damage what sentence-transformers adds to a model."""
    del bundle
    checkpoint = place / "checkpoint"
    shutil.copytree(EXPORTS / "bert" / "checkpoint", checkpoint)
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    configs = {
        "modules.json": [
            {"type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}" if n else ""}
            for n, kind in enumerate(kinds)
        ],
        "1_Pooling/config.json": {"pooling_mode": ["cls", "mean"], "include_prompt": True},
        "2_Dense/config.json": {"in_features": 64, "out_features": 8, "bias": False},
        "3_Normalize/config.json": {"module_input_name": "sentence_embedding"},
        "sentence_bert_config.json": {"max_seq_length": 8, "do_lower_case": True},
        "tokenizer_config.json": {"model_max_length": 1e30, "padding_side": "left"},
    }
    damage = pick(random, [*configs, "2_Dense/model.safetensors"])
    for name, config in configs.items():
        (checkpoint / name).parent.mkdir(exist_ok=True)
        text = json.dumps(changed(config, random) if name == damage else config)
        (checkpoint / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    weights = checkpoint / "2_Dense" / "model.safetensors"
    save_file({"linear.weight": np.ones((8, 64), np.float32)}, weights)
    path = checkpoint / damage
    if path == weights or random.random() < 0.3:
        path.write_bytes(damaged(path.read_bytes(), random))
    elif random.random() < 0.2:
        displace(path, random)
    # The graphs of another model: what is read without complaint is refused all the same.
    graphs = EXPORTS / "llama" / "mobius"
    return ["compare", "--model", str(checkpoint), "--graphs", str(graphs), "--runtime", "ort-cpu"]


@maker
def own_prompts(bundle: Path, place: Path, random: Random) -> list[str]:
    """Damage a user's own inputs of a whole model: arrays, ids or text, and its tokenizer."""
    del bundle
    place.mkdir()
    checkpoint = place / "checkpoint"
    shutil.copytree(EXPORTS / "gpt2" / "checkpoint", checkpoint)
    path = place / pick(random, ["i.npz", "i.json", "i.txt"])
    ids = pick(random, [[[1, 2, 3], [4]], [1, 2], ["a b", [3]], [[0, 10**6]], [[]], {"a": 1}])
    if path.suffix == ".npz":
        arrays = {
            "input_ids": np.array([[1, 2, 3]]), "attention_mask": np.array([[0, 1, 1]]),
            "position_ids": np.array([[0, 1, 99]]), "past_key_values.0.key": np.ones((1, 2, 3, 8)),
        }  # fmt: skip
        kept = [name for name in arrays if random.random() < 0.6]
        np.savez(path, **{
            name: arrays[name].astype(pick(random, ["i8", "i4", "f4", "U2", "?", "c8"]))
            for name in kept
        })  # fmt: skip
    elif path.suffix == ".json":
        path.write_bytes(json.dumps(changed(ids, random)).encode("utf-8", "surrogatepass"))
    else:
        path.write_text(pick(random, ["a b\nc\n", "\n\n", "x" * 5000, "\x00\x1b[31m\u202e"]))
        (checkpoint / "tokenizer.json").write_text(json.dumps(changed(_TOKENIZER, random)))
    if random.random() < 0.5:
        path.write_bytes(damaged(path.read_bytes(), random))
    elif random.random() < 0.2:
        displace(path, random)
    # The graphs of another model: what is read without complaint is refused all the same.
    graphs = EXPORTS / "llama" / "mobius"
    return ["compare", "--model", str(checkpoint), "--graphs", str(graphs), "--runtime", "ort-cpu",
            "--inputs", str(path)]  # fmt: skip


_TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"?": 0, "a": 7, "b": 9}, "unk_token": "?"},
}  # fmt: skip

_ADAPTER = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_fc"], "bias": "none",
    "fan_in_fan_out": True, "use_rslora": False, "use_dora": False, "init_lora_weights": True,
    "rank_pattern": {"h.0.mlp.c_fc": 2}, "alpha_pattern": {"c_fc": 3}, "modules_to_save": ["ln_f"],
}  # fmt: skip


@maker
def lora_adapter(bundle: Path, place: Path, random: Random) -> list[str]:
    """Damage the config or the tensors of an adapter."""
    del bundle
    place.mkdir()
    tensors = {
        f"base_model.model.transformer.h.{layer}.mlp.c_fc.lora_{part}.weight": np.ones(shape, "f4")
        for layer in (0, 1)
        for part, shape in (("A", (2, 32)), ("B", (128, 2)))
    }
    tensors["base_model.model.transformer.ln_f.weight"] = np.ones(32, "f4")
    name, array = pick(random, [*tensors.items()])
    if random.random() < 0.4:
        tensors[name] = pick(random, [
            array[:1], array.astype("i4"), array * np.nan, array[None], array.astype("f2"),
        ])  # fmt: skip
    elif random.random() < 0.3:
        tensors[name.replace("c_fc", pick(random, ["c_proj", "", "..", "a\x1b"]))] = array
        del tensors[name]
    save_file(tensors, place / "adapter_model.safetensors")
    config = changed(_ADAPTER, random) if random.random() < 0.6 else _ADAPTER
    text = json.dumps(config).encode("utf-8", "surrogatepass")
    (place / "adapter_config.json").write_bytes(text)
    path = place / pick(random, ["adapter_config.json", "adapter_model.safetensors"])
    if random.random() < 0.3:
        path.write_bytes(damaged(path.read_bytes(), random))
    elif random.random() < 0.1:
        displace(path, random)
    model, graphs = EXPORTS / "gpt2" / "checkpoint", EXPORTS / "llama" / "mobius"
    return ["compare", "--model", str(model), "--adapter", str(place), "--graphs", str(graphs),
            "--runtime", "ort-cpu"]  # fmt: skip
