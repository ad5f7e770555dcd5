"""Hostile checkpoints: a tensor, the header, a shard, the index or the config is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hostile.bundles import Random, damaged, displace, maker, pick
from hostile.values import HOSTILE, changed

E, H, HKV, D = 64, 4, 2, 16
SIZES = {"q": (H * D, E), "k": (HKV * D, E), "v": (HKV * D, E), "o": (E, H * D)}
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": E, "num_attention_heads": H, "num_key_value_heads": HKV,
    "head_dim": D, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 128,
    "rope_scaling": None, "num_hidden_layers": 1, "attention_bias": False,
}  # fmt: skip
PREFIX = "model.layers.0.self_attn."
SHARD, INDEX = "model.safetensors", "model.safetensors.index.json"

Tensors = dict[str, tuple[str, list[int], bytes]]
"""The dtype, the shape and the data of each tensor of a safetensors file."""


def tensor(dtype: str, *shape: int) -> tuple[str, list[int], bytes]:
    """Return a tensor of ones, or of bytes of 17 if it holds integers."""
    count = int(np.prod(shape))
    kinds = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
    width = {"I32": 4, "I64": 8, "BF16": 2}.get(dtype, 1)
    if dtype in kinds:
        return dtype, list(shape), np.ones(count, kinds[dtype]).tobytes()
    return dtype, list(shape), bytes([17]) * (count * width)


def numbers(dtype: str, values: Any) -> tuple[str, list[int], bytes]:
    """Return a tensor of integers."""
    array = np.asarray(values, {"I32": "<i4", "I64": "<i8"}[dtype])
    return dtype, list(array.shape), array.tobytes()


def _gptq(out: int, inputs: int) -> Tensors:
    return {
        "qweight": tensor("I32", inputs // 8, out), "qzeros": tensor("I32", 2, out // 8),
        "scales": tensor("F16", 2, out), "g_idx": numbers("I32", np.arange(inputs) // 32),
    }  # fmt: skip


def _awq(out: int, inputs: int) -> Tensors:
    return {
        "qweight": tensor("I32", inputs, out // 8), "qzeros": tensor("I32", 2, out // 8),
        "scales": tensor("F16", 2, out),
    }  # fmt: skip


def _packed(out: int, inputs: int) -> Tensors:
    return {
        "weight_packed": tensor("I32", out, inputs // 8), "weight_scale": tensor("F32", out, 2),
        "weight_shape": numbers("I64", [out, inputs]),
        "weight_zero_point": tensor("I32", out // 8, 2),
    }  # fmt: skip


LAYOUTS: dict[str, tuple[Callable[[int, int], Tensors], dict[str, Any]]] = {
    "float": (lambda out, inputs: {"weight": tensor("F32", out, inputs)}, {}),
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "packed": (_packed, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "int8": (
        lambda out, inputs: {
            "weight": tensor("I8", out, inputs), "weight_scale": tensor("F32", out, 1),
        },
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
    ),
    "bnb": (
        lambda out, inputs: {"weight": tensor("I8", out, inputs), "SCB": tensor("F32", out)},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "nf4": (
        lambda out, inputs: {
            "weight": tensor("U8", out * inputs // 2, 1), "weight.absmax": tensor("F32", 64),
            "weight.quant_map": tensor("F32", 16),
        },
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "fp8": (
        lambda out, inputs: {
            "weight": tensor("F8_E4M3", out, inputs), "weight_scale_inv": tensor("F32", 1, 1),
        },
        {"quant_method": "fp8"},
    ),
}  # fmt: skip


def header_of(tensors: Tensors) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return header


def write_safetensors(path: Path, tensors: Tensors, header: Any = None) -> None:
    """Write a safetensors file, with another header if there is one."""
    text = json.dumps(header_of(tensors) if header is None else header).encode()
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def spoiled(tensors: Tensors, random: Random) -> Tensors:
    """Return tensors of which one has another shape, dtype, name or value, or is missing."""
    found = dict(tensors)
    name = pick(random, list(found))
    dtype, shape, data = found[name]
    rows = max(shape[0], 1) if shape else 1
    shapes = [
        [], [0], [1], shape[:-1], [*shape, 1], [1, *shape], shape[::-1], [2 * rows, *shape[1:]],
        [max(rows // 2, 1), *shape[1:]], [rows + 1, *shape[1:]], [0, *shape[1:]], [*shape[:-1], 3],
    ]  # fmt: skip
    kind = random.integers(6)
    if kind < 2:
        found[name] = tensor(dtype, *pick(random, shapes))
    elif kind == 2:
        dtypes = ["F32", "F16", "BF16", "I32", "I64", "U8", "I8", "BOOL", "F8_E4M3", "F64"]
        found[name] = tensor(pick(random, dtypes), *shape)
    elif kind == 3:
        byte = pick(random, [b"\x00", b"\xff", b"\x7f", b"\x80"])
        found[name] = (dtype, shape, byte * len(data))
    elif kind == 4:
        del found[name]
    else:
        texts = [value for value in HOSTILE if isinstance(value, str) and "\ud800" not in value]
        other = pick(random, [*found, name.replace("self_attn", pick(random, texts))])
        found[other] = found.pop(name)
    return found


@maker
def checkpoint(bundle: Path, place: Path, random: Random) -> list[str]:
    """Damage a checkpoint: its tensors, header, shards, index or config."""
    del bundle
    place.mkdir()
    make, quantisation = LAYOUTS[pick(random, list(LAYOUTS))]
    tensors = {
        f"{PREFIX}{side}_proj.{part}": value
        for side, (out, inputs) in SIZES.items()
        for part, value in make(out, inputs).items()
    }
    config = {**CONFIG, **({"quantization_config": quantisation} if quantisation else {})}
    is_sharded = random.random() < 0.3
    shard = "s.safetensors" if is_sharded else SHARD
    index = {"weight_map": dict.fromkeys(tensors, shard), "metadata": {"total_size": 1}}
    kind = random.integers(8)
    header = None
    if kind < 3:
        tensors = spoiled(tensors, random)
    elif kind == 3:
        header = changed(header_of(tensors), random)
    elif kind == 4:
        config = changed(config, random)
    elif kind == 5:
        index, is_sharded, shard = changed(index, random), True, "s.safetensors"
    write_safetensors(place / shard, tensors, header)
    (place / "config.json").write_text(json.dumps(config))
    if is_sharded:
        (place / INDEX).write_text(json.dumps(index))
    file = pick(random, [place / shard, place / "config.json", *([place / INDEX] * is_sharded)])
    if kind == 6:
        file.write_bytes(damaged(file.read_bytes(), random))
    elif kind == 7:
        displace(file, random)
    # A runtime that is not there ends what would be built, after the checkpoint was read.
    return ["build", "--model", str(place), *NO_BUILD, "--output", f"{place}.out"]


NO_BUILD = ["--runtime", "none", "--quiet"]
"""Options with which a build that has read its inputs ends with exit code 2."""


@maker
def lone_config(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a value of a config.json without tensors."""
    del bundle
    place.mkdir()
    families = [
        "llama", "gpt2", "bert", "t5", "deepseek_v3", "gemma3_text", "whisper", "qwen3", "gpt_oss",
    ]  # fmt: skip
    config = {**CONFIG, "model_type": pick(random, families), "d_model": E, "n_embd": E,
              "num_heads": H, "n_head": H, "d_kv": D, "sliding_window": 8,
              "layer_types": ["full_attention"],
              "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
              "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}  # fmt: skip
    (place / "config.json").write_text(json.dumps(changed(config, random)))
    return ["build", str(place / "config.json"), *NO_BUILD, "--output", f"{place}.out"]
