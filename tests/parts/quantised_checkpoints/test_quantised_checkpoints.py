"""Checkpoints that hold integers are read as they are: GPTQ, AWQ, compressed-tensors, bitsandbytes.

The writers here pack one integer at a time, by the descriptions of the formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shared import extended
from torch import Tensor

from attn_export import Subject, build
from attn_export.commands.main import run
from attn_export.errors import WeightsError
from attn_export.weights.checkpoint import load_checkpoint

E, H, HKV, D, GROUP = 64, 4, 2, 16, 32
SHAPES = {
    "q_proj": (H * D, E),
    "k_proj": (HKV * D, E),
    "v_proj": (HKV * D, E),
    "o_proj": (E, H * D),
}
LLAMA = {
    "model_type": "llama", "hidden_size": E, "num_attention_heads": H, "num_key_value_heads": HKV,
    "head_dim": D, "max_position_embeddings": 128,
}  # fmt: skip
PREFIX = "model.layers.0.self_attn"
Linear = tuple[dict[str, Tensor], np.ndarray]
"""The stored tensors of a layer, and the weight [out, in] that they stand for, in float64."""


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack unsigned integers along the last axis into int32, the first in the lowest bits."""
    each = 32 // bits
    order = order or tuple(range(each))
    rows, columns = numbers.shape
    packed = np.zeros((rows, columns // each), np.uint32)
    for row in range(rows):
        for word in range(columns // each):
            for place, column in enumerate(order):
                number = int(numbers[row, word * each + column])
                packed[row, word] |= np.uint32(number << (place * bits))
    return torch.from_numpy(packed.view(np.int32).copy())


def drawn(rng: np.random.Generator, out: int, inputs: int, bits: int, groups: int) -> tuple:
    """Return unsigned integers [in, out], zero points and float16 scales [groups, out]."""
    q = rng.integers(0, 2**bits, (inputs, out))
    zeros = rng.integers(1, 2**bits - 1, (groups, out))
    scales = rng.uniform(0.01, 0.1, (groups, out)).astype(np.float16)
    return q, zeros, scales


def gptq(
    rng: np.random.Generator, out: int, inputs: int, *, bits: int = 4, sym: bool = False,
    act_order: bool = False, less_one: bool = True,
) -> Linear:  # fmt: skip
    groups = inputs // GROUP
    q, zeros, scales = drawn(rng, out, inputs, bits, groups)
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if sym else zeros
    g_idx = np.arange(inputs) // GROUP
    if act_order:
        g_idx = rng.permutation(g_idx)
    weight = (q - zeros[g_idx]) * scales.astype(np.float64)[g_idx]
    stored = {
        "qweight": words(q.T, bits).T.contiguous(),
        "qzeros": words(zeros - int(less_one), bits), "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }  # fmt: skip
    return stored, weight.T


def awq(rng: np.random.Generator, out: int, inputs: int) -> Linear:
    q, zeros, scales = drawn(rng, out, inputs, 4, inputs // GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "qweight": words(q, 4, order), "qzeros": words(zeros, 4, order),
        "scales": torch.from_numpy(scales),
    }  # fmt: skip
    weight = (q - zeros.repeat(GROUP, 0)) * scales.astype(np.float64).repeat(GROUP, 0)
    return stored, weight.T


def compressed(
    rng: np.random.Generator, out: int, inputs: int, *, bits: int = 4, sym: bool = True
) -> Linear:
    q, zeros, scales = drawn(rng, out, inputs, bits, inputs // GROUP)
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if sym else zeros
    stored = {
        "weight_packed": words(q.T, bits), "weight_shape": torch.tensor([out, inputs]),
        "weight_scale": torch.from_numpy(scales.T.copy()),
    }  # fmt: skip
    if not sym:
        stored["weight_zero_point"] = words(zeros, bits).T.contiguous()
    weight = (q - zeros.repeat(GROUP, 0)) * scales.astype(np.float64).repeat(GROUP, 0)
    return stored, weight.T


def int_quantized(rng: np.random.Generator, out: int, inputs: int) -> Linear:
    q = rng.integers(-128, 128, (out, inputs)).astype(np.int8)
    scales = rng.uniform(0.001, 0.01, (out, 1)).astype(np.float16)
    stored = {"weight": torch.from_numpy(q), "weight_scale": torch.from_numpy(scales)}
    return stored, q * scales.astype(np.float64)


def bitsandbytes(rng: np.random.Generator, out: int, inputs: int) -> Linear:
    q = rng.integers(-127, 128, (out, inputs)).astype(np.int8)
    largest = rng.uniform(0.1, 1.0, out).astype(np.float32)
    stored = {"weight": torch.from_numpy(q), "SCB": torch.from_numpy(largest)}
    return stored, q * (largest.astype(np.float64) / 127)[:, None]


FORMATS: dict[str, tuple[Callable[..., Linear], dict, dict, str]] = {
    "GPTQ": (gptq, {}, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}, "int4"),
    "GPTQ, symmetric": (gptq, {"sym": True}, {"quant_method": "gptq", "bits": 4}, "int4"),
    "GPTQ, act order": (gptq, {"act_order": True}, {"quant_method": "gptq", "bits": 4}, "int4"),
    "GPTQ, 8 bits": (gptq, {"bits": 8}, {"quant_method": "gptq", "bits": 8}, "int8"),
    "GPTQ, second version": (
        gptq, {"less_one": False}, {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, "int4",
    ),
    "AWQ": (awq, {}, {"quant_method": "awq", "version": "gemm", "bits": 4}, "int4"),
    "AWQ, nothing stated": (awq, {}, {}, "int4"),
    "compressed-tensors": (compressed, {}, {"quant_method": "compressed-tensors"}, "int4"),
    "compressed-tensors, asymmetric": (
        compressed, {"sym": False}, {"quant_method": "compressed-tensors"}, "int4",
    ),
    "compressed-tensors, 8 bits": (
        compressed, {"bits": 8}, {"quant_method": "compressed-tensors"}, "int8",
    ),
    "compressed-tensors, int8": (int_quantized, {}, {"quant_method": "compressed-tensors"}, "int8"),
    "bitsandbytes": (bitsandbytes, {}, {"quant_method": "bitsandbytes"}, "int8"),
}  # fmt: skip


def saved(folder: Path, name: str, **more: object) -> dict[str, np.ndarray]:
    """Save a small Llama in a format; return the weights that it stands for."""
    write, options, stated, _ = FORMATS[name]
    rng = np.random.default_rng(0)
    tensors: dict[str, Tensor] = {}
    weights = {}
    for linear, (out, inputs) in SHAPES.items():
        stored, weights[linear] = write(rng, out, inputs, **options)
        tensors |= {f"{PREFIX}.{linear}.{part}": tensor for part, tensor in stored.items()}
    tensors |= {f"{PREFIX}.{key}": value for key, value in more.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {**LLAMA, "quantization_config": stated} if stated else LLAMA
    (folder / "config.json").write_text(json.dumps(config))
    return weights


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_are_what_the_integers_stand_for(name: str, tmp_path: Path):
    weights = saved(tmp_path, name)
    subject = Subject.from_checkpoint(tmp_path)
    for linear, wanted in weights.items():
        ours = f"{linear.replace('o_proj', 'out_proj')}.weight"
        found = subject.module.get_parameter(ours).detach().double().numpy()
        np.testing.assert_allclose(found, wanted, rtol=2e-7, atol=0)
        if name != "bitsandbytes":  # whose scales have more digits
            np.testing.assert_array_equal(found, wanted)
        assert ours in subject.module.integers
    assert subject.spec.weights_dtype == FORMATS[name][3]
    asymmetric = ("GPTQ", "AWQ", "asymmetric")
    is_asymmetric = "symmetric" in name and "asymmetric" not in name
    assert (subject.spec.scheme == "asymmetric") == (
        any(word in name for word in asymmetric) and not is_asymmetric
    )


@pytest.mark.parametrize(
    "name", extended(FORMATS, lambda name: name in ("GPTQ, act order", "compressed-tensors"))
)
def test_its_graphs_hold_the_integers_and_pass(name: str, tmp_path: Path):
    saved(tmp_path / "c", name)
    report = build(Subject.from_checkpoint(tmp_path / "c"), tmp_path / "b", runtimes=["ort-cpu"])
    assert report.passed
    nodes = [node.op_type for node in onnx.load(tmp_path / "b" / "model.onnx").graph.node]
    assert nodes.count("DequantizeLinear") == 4
    assert nodes.count("Gather") == (4 if "act order" in name else 0)
    ort = [node.op_type for node in onnx.load(tmp_path / "b" / "model.ort.onnx").graph.node]
    assert ort.count("MatMulNBits") == (4 if "int4" in FORMATS[name][3] else 0)
    assert "DequantizeLinear" not in ort
    assert run(["verify", str(tmp_path / "b"), "--runtime", "ort-cpu", "--quiet"]) == 0


def test_a_bias_of_zeros_is_left_out_and_another_is_kept(tmp_path: Path):
    bias = {f"{name}.bias": torch.zeros(out) for name, (out, _) in SHAPES.items()}
    saved(tmp_path / "zeros", "GPTQ", **bias)
    assert Subject.from_checkpoint(tmp_path / "zeros").spec.bias == "none"
    saved(tmp_path / "ones", "GPTQ", **{name: torch.ones_like(b) for name, b in bias.items()})
    assert Subject.from_checkpoint(tmp_path / "ones").spec.bias == "all"


def test_files_of_other_layers_may_be_missing(tmp_path: Path):
    weights = saved(tmp_path, "AWQ, nothing stated", **{"q_proj.bias": torch.zeros(64)})
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        here = dict.fromkeys(file.keys(), "a.safetensors")
    parts = ("qweight", "qzeros", "scales", "bias")
    other = {f"{PREFIX}.q_proj.{part}".replace(".0.", ".1."): "b.safetensors" for part in parts}
    index = {"weight_map": {**here, **other}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = Subject.from_checkpoint(tmp_path, layer=0).module.q_proj.weight
    np.testing.assert_array_equal(found.detach().double().numpy(), weights["q_proj"])


def test_an_explanation_reads_the_weights_back_out_of_the_graph(tmp_path: Path):
    weights = saved(tmp_path / "c", "GPTQ, act order")
    subject = Subject.from_checkpoint(tmp_path / "c")
    build(subject, tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"])
    again = Subject.from_graph(subject.spec, tmp_path / "b" / "model.onnx")
    np.testing.assert_array_equal(
        again.module.q_proj.weight.detach().double().numpy(), weights["q_proj"]
    )


BROKEN = {
    "scale of 0": ({"q_proj.scales": torch.zeros(2, 64, dtype=torch.float16)}, {}, "not positive"),
    "NaN": (
        {"q_proj.scales": torch.full((2, 64), torch.nan, dtype=torch.float16)}, {}, "not positive",
    ),
    "blocks that do not divide": (
        {"q_proj.scales": torch.ones(3, 64, dtype=torch.float16),
         "q_proj.qzeros": torch.zeros(3, 8, dtype=torch.int32),
         "q_proj.g_idx": torch.arange(64, dtype=torch.int32) // 22}, {}, "in 3 blocks of inputs",
    ),
    "another number of outputs": (
        {"q_proj.scales": torch.ones(2, 56, dtype=torch.float16)}, {},
        "q_proj is not a layer of GPTQ",
    ),
    "groups beyond": (
        {"q_proj.g_idx": torch.full((64,), 7, dtype=torch.int32)}, {}, "outside 0 to 1",
    ),
    "no integers": ({"q_proj.qweight": torch.ones(8, 64)}, {}, "qweight is F32"),
    "zero points too large": (
        {"q_proj.qzeros": torch.full((2, 8), -1, dtype=torch.int32)}, {}, "a zero point of 16",
    ),
    "3 bits": ({}, {"quant_method": "gptq", "bits": 3}, "bits = 3 is not supported"),
    "other bits": ({}, {"quant_method": "gptq", "bits": 8}, "have 4 bits, config.json says 8"),
    "method": ({}, {"quant_method": "hqq"}, "quant_method = 'hqq' is not supported"),
    "activations": (
        {}, {"quant_method": "compressed-tensors",
             "config_groups": {"a": {"input_activations": {"num_bits": 8}}}}, "input_activations",
    ),
}  # fmt: skip


DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "cut off": lambda tensor: tensor[..., :-1],
    "repeated": lambda tensor: torch.cat([tensor, tensor], -1),
    "of more rows": lambda tensor: torch.cat([tensor, tensor]),
    "of one axis": lambda tensor: tensor.flatten()[:1],
    "of one more axis": lambda tensor: tensor[None],
    "empty": lambda tensor: tensor[..., :0],
    "float64": lambda tensor: tensor.double() if tensor.dtype != torch.float64 else tensor.int(),
    "bool": lambda tensor: tensor != 0,
    "negative": lambda tensor: -1 - tensor.abs(),
}


@pytest.mark.parametrize("name", ["GPTQ, act order", "AWQ", "compressed-tensors, asymmetric",
                                  "compressed-tensors, int8", "bitsandbytes"])  # fmt: skip
def test_a_tensor_of_another_shape_or_dtype_is_one_line(name: str, tmp_path: Path):
    stored, _ = FORMATS[name][0](np.random.default_rng(0), *SHAPES["q_proj"], **FORMATS[name][1])
    accepted = []
    for part, tensor in stored.items():
        for damage, change in DAMAGES.items():
            saved(tmp_path, name, **{f"q_proj.{part}": change(tensor).contiguous()})
            try:
                load_checkpoint(tmp_path)
                accepted.append((part, damage))
            except WeightsError as error:
                assert "model.safetensors" in str(error)  # noqa: PT017
    may_be = {(part, "float64") for part in ("scales", "weight_scale", "SCB")}
    integers = {"qweight", "qzeros", "weight", "weight_packed", "weight_zero_point"}
    assert {*accepted} <= may_be | {(part, "negative") for part in integers}


@pytest.mark.parametrize(("tensors", "stated", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_one_is_one_line(tensors: dict, stated: dict, message: str, tmp_path: Path):
    saved(tmp_path, "GPTQ", **tensors)
    if stated:
        config = {**LLAMA, "quantization_config": stated}
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=message) as error:
        Subject.from_checkpoint(tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_missing_tensor_of_a_layer_of_integers_is_named(tmp_path: Path):
    saved(tmp_path, "AWQ")
    with pytest.raises(WeightsError, match="holds integers, and weights_dtype is 'int8'"):
        Subject.from_checkpoint(tmp_path, weights_dtype="int8")
    with pytest.raises(WeightsError, match="holds integers, which have no mean"):
        Subject.from_checkpoint(tmp_path, pool_kv_heads=1)
    with pytest.raises(WeightsError, match=r"weights_dtype = 'int4' with dtype = 'float16'"):
        Subject.from_checkpoint(tmp_path, dtype="float16")
    options = ["--weights", str(tmp_path), "--budget", "sqnr>=30", "--quiet"]
    assert run(["build", *options, "--output", str(tmp_path / "b")]) == 2
