"""Hostile files of every other kind that commands read: checkpoints, plans, specs, scales.

Each maker writes what a command reads, with one thing wrong, and returns the command line. Where a
file would be run, its content is refused before: no maker starts a build that goes on to its end.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hostile.bundles import Random, damaged, maker
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
GIANT = 2**40

Tensors = dict[str, tuple[str, list[int], bytes]]
"""The dtype, the shape and the data of each tensor of a safetensors file."""


def pick(random: Random, choices: Any) -> Any:
    """Return one of some choices, in the type that it has."""
    return choices[int(random.integers(len(choices)))]


# -- no regular file ----------------------------------------------------------------------------


def displace(file: Path, random: Random) -> None:
    """Put something that is no plain file in the place of a file, or make it giant or short."""
    content = file.read_bytes() if file.is_file() else b""
    file.unlink(missing_ok=True)
    kinds: list[Callable[[], object]] = [
        lambda: os.mkfifo(file), file.mkdir, lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to("none"), lambda: file.symlink_to(file.name),
        lambda: file.symlink_to("/dev/stdin"), lambda: None,
        lambda: file.write_bytes(content[: len(content) // 2]), lambda: file.write_bytes(b""),
        lambda: (file.write_bytes(content), os.truncate(file, GIANT)),
    ]  # fmt: skip
    pick(random, kinds)()


# -- checkpoints --------------------------------------------------------------------------------


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
    return ["build", "--weights", str(place), *NO_BUILD, "--output", f"{place}.out"]


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
    return ["build", "--weights", str(place), *NO_BUILD, "--output", f"{place}.out"]


@maker
def scales(bundle: Path, place: Path, random: Random) -> list[str]:
    """Damage a file of scales, or of hidden states."""
    del bundle
    place.mkdir()
    names = ["k_scale", "v_scale"] if random.random() < 0.7 else ["query"]
    shape = (1,) if len(names) == 2 else (1, 4, E)
    path = place / pick(random, ["x.npz", "x.safetensors", "x.bin"])
    if path.suffix == ".safetensors":
        tensors = spoiled({name: tensor("F32", *shape) for name in names}, random)
        header = changed(header_of(tensors), random) if random.random() < 0.4 else None
        write_safetensors(path, tensors, header)
    else:
        path.write_bytes(_npz(names, shape, random))
    if random.random() < 0.2:
        displace(path, random)
    option = "--kv-scales" if len(names) == 2 else "--calibrate"
    spec = ["--embed-dim", str(E), "--num-heads", str(H), "--causal", "--cache", "append",
            "--kv-dtype", "int8"]  # fmt: skip
    return ["build", *spec, option, str(path), *NO_BUILD, "--output", f"{place}.out"]


def _npz(names: list[str], shape: tuple[int, ...], random: Random) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", pick(random, [0, 8, 12, 14])) as archive:
        for name in names:
            array = np.full(shape, pick(random, [0.1, np.nan, 0.0, -1.0, np.inf]), "<f4")
            data = io.BytesIO()
            np.save(data, array.astype(pick(random, ["<f4", "<f8", "<i4", "U3", "c8", "?"])))
            content = data.getvalue()
            if random.random() < 0.6:
                content = damaged(content, random)
            archive.writestr(f"{name}{pick(random, ['.npy', '.npy', '', '.x'])}", content)
    content = stream.getvalue()
    return damaged(content, random) if random.random() < 0.3 else content


# -- specs and plans ----------------------------------------------------------------------------

SPEC: dict[str, Any] = {
    "embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, "causal": True,
    "attn_mask": "bool[B,1,1,S]", "cache": "append", "rotary": "half", "rotary_dim": 4,
    "dtype": "float32", "scale": 0.5,
}  # fmt: skip
PLAN: dict[str, Any] = {
    "name": "x", "seed": 1, "dialects": ["standard"], "dtypes": ["float32"],
    "runtimes": ["ort-cpu", "tract"], "architectures": ["sm_80"], "base": {"embed_dim": 16},
    "spec": [{"num_heads": [1, 2], "causal": True}], "bundle": ["b"], "exclude": [{"num_heads": 1}],
}  # fmt: skip
TOMLS = (
    f"{'a.' * 9000}b = 1", f"embed_dim = 0x{'F' * 9000}", f"a = {'[' * 9000}", f"{'[[spec]]' * 3}",
    "[[spec]]\nnum_heads = [" + "2," * 90_000 + "]\n" + "[[spec]]\nembed_dim = 4\n" * 3,
    "embed_dim = 1979-05-27", "embed_dim = nan", "x = '\\ud800'", "\ufeff", "\x00", "a = 1\na = 1",
    "[a]\n[a]", "a = {b = 1}\na.c = 2", "embed_dim = 1e999", f"x = {{{'a = {' * 300}",
)  # fmt: skip


def toml(value: Any) -> str:
    """Return a value as TOML, which may be none: a text of JSON where it has no literal."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return json.dumps(value)


def _write_toml(path: Path, good: dict[str, Any], random: Random) -> None:
    value = changed(good, random)
    text = (
        "\n".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items())
        if isinstance(value, dict) else toml(value)
    )  # fmt: skip
    text = pick(random, TOMLS) if random.random() < 0.15 else text
    content = text.encode("utf-8", "surrogatepass")
    path.write_bytes(damaged(content, random) if random.random() < 0.15 else content)
    if random.random() < 0.08:
        displace(path, random)


@maker
def spec(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a value of a spec in TOML."""
    del bundle
    place.mkdir()
    _write_toml(place / "s.toml", SPEC, random)
    return ["build", str(place / "s.toml"), *NO_BUILD, "--output", f"{place}.out"]


@maker
def plan(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a value of the plan of a sweep."""
    del bundle
    place.mkdir()
    _write_toml(place / "p.toml", PLAN, random)
    return ["sweep", str(place / "p.toml"), "--matrix", "github", "--quiet"]


# -- ONNX files, and files beside them ----------------------------------------------------------


@maker
def no_graph(bundle: Path, place: Path, random: Random) -> list[str]:
    """Give what is no regular file, or a name that no line may show, where a file is read."""
    names = ["m.onnx", "a b.onnx", "$(id).onnx", "a'b.onnx", "a\nb.onnx", "\x1b[31m.onnx",
             "\u202ex.onnx", "-x.onnx", "a;b.onnx", "`id`.onnx", "<b>.onnx"]  # fmt: skip
    place.mkdir()
    path = place / pick(random, names)
    path.write_bytes((bundle / "model.onnx").read_bytes())
    is_whole = random.random() < 0.3
    if not is_whole:
        displace(path, random)
    good = str(bundle / "model.onnx")
    commands = (
        ["check", str(path)],
        ["lower", str(path), "--dialect", "ort", "--output", f"{place}.lowered.onnx"],
        ["verify", str(bundle), "--graph", str(path), "--quiet", "--runtime", "ort-cpu"],
        ["compare", good, str(path), "--quiet", "--runtime", "ort-cpu"],
        ["compare", str(path), good, "--quiet", "--runtime", "ort-cpu"],
        ["dry-run", str(path), "--arch", "sm_80", "--quiet"],
        ["verify", str(bundle), "--baseline", str(path), "--quiet", "--runtime", "ort-cpu"],
        ["build", str(path), *NO_BUILD, "--output", f"{place}.out"],
        ["build", "--module", f"{path}:f", *NO_BUILD, "--output", f"{place}.out"],
        ["build", "--weights", str(path), *NO_BUILD, "--output", f"{place}.out"],
        ["sweep", str(path), "--matrix", "github"],
        ["site", str(path), "--output", f"{place}.out"],
        ["verify", str(bundle), "--trust", str(path), "--quiet"],
        ["verify", str(path), "--quiet"],
        ["kit", "python", str(path), "--output", f"{place}.out", "--quiet"],
        ["explain", str(path), "--runtime", "ort-cpu", "--quiet"],
    )  # fmt: skip
    # A graph that is whole is compared in minutes where others use the processor, too.
    return pick(random, [each for each in commands if not is_whole or each[0] != "compare"])


@maker
def external(bundle: Path, place: Path, random: Random) -> list[str]:
    """Let a graph's weights lie in a file that is none, is missing, cut off or giant."""
    import onnx

    place.mkdir()
    model = onnx.load(bundle / "model.onnx")
    onnx.save_model(
        model, place / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    model = onnx.load(place / "m.onnx", load_external_data=False)
    stored = [t for t in model.graph.initializer if t.data_location == 1]
    if random.random() < 0.5 and stored:
        entry = pick(random, list(pick(random, stored).external_data))
        texts = [v for v in HOSTILE if isinstance(v, str) and "\ud800" not in v]
        entry.value = pick(random, [*texts, "-1", "1e3", str(2**70), "w.bin/../w.bin", "./w.bin"])
        (place / "m.onnx").write_bytes(model.SerializeToString())
    else:
        displace(place / "w.bin", random)
    commands = (
        ["check", str(place / "m.onnx")],
        ["lower", str(place / "m.onnx"), "--dialect", "portable", "--output", f"{place}.l.onnx"],
        ["dry-run", str(place / "m.onnx"), "--arch", "sm_80", "--quiet"],
    )
    return pick(random, commands)


# -- files of parts -----------------------------------------------------------------------------

for _file in sorted(Path(__file__).parents[1].glob("parts/*/hostile_*.py")):
    runpy.run_path(str(_file))
