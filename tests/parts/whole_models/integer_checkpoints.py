"""Tiny checkpoints whose linear layers are integers, written as their formats say.

It shares no code with the readers: words are put together as Python's integers.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_decoders import tiny_decoder
from torch import nn

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of 8 whose integer is at each place of a word, from the lowest."""


FLOAT8 = [
    (1 - byte // 128 * 2) * math.ldexp(byte % 8 + 8 * (power > 0), max(power, 1) - 10)
    for byte in range(256)
    for power in [byte // 8 % 16]
]
"""The number of each byte: a sign, 4 bits of the exponent, 3 of the fraction."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the layers of a checkpoint are stored.

    Attributes:
        method: ``"gptq"``, ``"awq"``, ``"compressed-tensors"`` or ``"fp8"``.
        group: The inputs of a group; -1 for all.
        version: ``checkpoint_format`` of GPTQ, or ``format`` of compressed-tensors.
        outputs: Of float8, the outputs that share a scale; 0 for all.
        is_symmetric: Whether all zero points are in the middle.
        is_ordered: Whether inputs are in the order of their groups.
    """

    method: str
    bits: int = 4
    group: int = 32
    version: str = ""
    is_symmetric: bool = False
    is_ordered: bool = True
    outputs: int = 1

    @property
    def is_float(self) -> bool:
        """Whether weights are float8."""
        return self.method == "fp8" or self.version == "float-quantized"

    def config(self, ignored: Iterable[str]) -> dict[str, Any]:
        """Return the quantization_config."""
        if self.method == "gptq":
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.group,
                "desc_act": not self.is_ordered, "sym": self.is_symmetric,
                "checkpoint_format": self.version,
            }  # fmt: skip
        if self.method == "awq":
            return {
                "quant_method": "awq", "bits": 4, "group_size": self.group, "version": "gemm",
                "zero_point": True, "modules_to_not_convert": [*ignored],
            }  # fmt: skip
        if self.method == "fp8":
            sizes = None if self.group == -1 else [self.outputs, self.group]
            return {
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": sizes, "modules_to_not_convert": [*ignored],
            }  # fmt: skip
        if self.is_float:
            strategy = "channel" if self.outputs else "tensor"
            weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
            group = {"weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
            return {
                "quant_method": "compressed-tensors", "format": self.version,
                "ignore": [*ignored], "config_groups": {"group_0": group},
            }  # fmt: skip
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": self.is_symmetric,
            "strategy": "channel" if self.group == -1 else "group",
            "group_size": None if self.group == -1 else self.group,
            "actorder": None if self.is_ordered else "group", "dynamic": False,
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": self.version, "ignore": [*ignored],
            "config_groups": {"group_0": group}, "quantization_status": "compressed",
        }  # fmt: skip


LAYOUTS = {
    "gptq": Layout("gptq", version="gptq"),
    "gptq v2, symmetric": Layout("gptq", version="gptq_v2", is_symmetric=True, group=-1),
    "gptq, desc_act": Layout("gptq", version="gptq", is_ordered=False, group=16),
    "gptq, 8 bits": Layout("gptq", version="gptq", bits=8),
    "awq": Layout("awq"),
    "awq, one group": Layout("awq", group=64),
    "awq, groups of 96": Layout("awq", group=96),
    "awq, groups of 24": Layout("awq", group=24),
    "W4A16": Layout("compressed-tensors", version="pack-quantized", is_symmetric=True),
    "W4A16, asymmetric": Layout("compressed-tensors", version="pack-quantized", is_ordered=False),
    "W8A16": Layout(
        "compressed-tensors", version="pack-quantized", bits=8, group=-1, is_symmetric=True
    ),
    "int8": Layout("compressed-tensors", version="int-quantized", bits=8, group=-1),
    "float8, blocks": Layout("fp8", bits=8, group=48, outputs=24),
    "float8, tensor": Layout("fp8", bits=8, group=-1, outputs=0),
    "float8, channel": Layout("compressed-tensors", 8, -1, "float-quantized"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Stored:
    """The integers of a layer: `[out, in]`, with `[out, groups]`, and the group of each input.

    The numbers of float8 are their bytes.
    """

    integers: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray
    is_float: bool = False

    def dequantised(self) -> np.ndarray:
        """Return what they stand for, `[out, in]`."""
        numbers = np.array(FLOAT8)[self.integers] if self.is_float else self.integers
        apart = numbers - self.zeros[:, self.groups]
        return (apart * self.scales.astype(np.float64)[:, self.groups]).astype(np.float32)


def words(integers: np.ndarray, bits: int, axis: int, places: Iterable[int] = ()) -> torch.Tensor:
    """Pack integers along an axis, those of a word from the lowest bits on."""
    rows, count = np.moveaxis(integers, axis, -1), 32 // bits
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % count)))
    packed = [
        [
            sum(int(row[start + at]) << bits * n for n, at in enumerate(places or range(count)))
            for start in range(0, len(row), count)
        ]
        for row in rows
    ]  # fmt: skip
    array = np.array(packed, np.uint64).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.moveaxis(array, -1, axis).copy())


def float8_layer(
    of: Layout, out: int, inputs: int, random: np.random.Generator
) -> tuple[Stored, dict[str, torch.Tensor]]:
    """Draw a layer of float8, and return it with its tensors."""
    numbers = random.integers(0, 256, (out, inputs)) & ~(random.random((out, inputs)) < 0.9) * 64
    numbers[numbers % 128 == 127] = 0  # NaN
    rows, columns = np.arange(out) // (of.outputs or out), np.arange(inputs) // abs(of.group)
    columns = columns if of.group > 0 else columns * 0
    scales = random.uniform(0.02, 0.1, (rows[-1] + 1, columns[-1] + 1)).astype(np.float32)
    by_output = scales[rows]
    stored = Stored(numbers, np.zeros_like(by_output, int), by_output, columns, is_float=True)
    weight = torch.from_numpy(numbers.astype(np.uint8)).view(torch.float8_e4m3fn)
    if of.method == "fp8":
        scale = torch.from_numpy(scales)
        return stored, {"weight": weight, "weight_scale_inv": scale if of.outputs else scale[0, 0]}
    return stored, {"weight": weight, "weight_scale": torch.from_numpy(scales)}


def stored_layer(
    of: Layout, out: int, inputs: int, random: np.random.Generator
) -> tuple[Stored, dict[str, torch.Tensor]]:
    """Draw a layer, and return it with its tensors."""
    if of.is_float:
        return float8_layer(of, out, inputs, random)
    size = inputs if of.group == -1 else of.group
    groups, most, middle = np.arange(inputs) // size, 2**of.bits, 2 ** (of.bits - 1)
    if not of.is_ordered:
        groups = random.permutation(groups)
    integers = random.integers(0, most, (out, inputs))
    shape = out, inputs // size
    zeros = np.full(shape, middle) if of.is_symmetric else random.integers(0, most, shape)
    scales = (random.uniform(0.5, 1.5, shape) / 8 / most).astype(np.float16)
    scales[0], integers[0] = 0, zeros[0][groups]  # as of a block of zeros
    stored = Stored(integers, zeros, scales, groups)
    scale, order = torch.from_numpy(scales), torch.from_numpy(groups.astype(np.int32))
    if of.method == "gptq":
        less = (zeros - 1) % most if of.version == "gptq" else zeros
        tensors = {
            "qweight": words(integers.T, of.bits, 0), "qzeros": words(less.T, of.bits, 1),
            "scales": scale.T.contiguous(),
        }  # fmt: skip
        return stored, tensors | {"g_idx": order, "bias": torch.zeros(out)}
    if of.method == "awq":
        return stored, {
            "qweight": words(integers.T, 4, 1, AWQ_PLACES),
            "qzeros": words(zeros.T, 4, 1, AWQ_PLACES), "scales": scale.T.contiguous(),
        }  # fmt: skip
    if of.version == "int-quantized":
        tensors = {"weight": torch.from_numpy((integers - middle).astype(np.int8))}
        points = torch.from_numpy((zeros - middle).astype(np.int8))
    else:
        tensors = {
            "weight_packed": words(integers, of.bits, 1),
            "weight_shape": torch.tensor([out, inputs]),
        }
        points = words(zeros, of.bits, 0)
    tensors |= {"weight_scale": scale.to(torch.bfloat16)}
    stored = dataclasses.replace(stored, scales=tensors["weight_scale"].float().numpy())
    tensors |= {} if of.is_symmetric else {"weight_zero_point": points}
    return stored, tensors | ({} if of.is_ordered else {"weight_g_idx": order})


def integer_checkpoint(
    folder: Path, kind: str, of: Layout, *, floats: Iterable[str] = ("lm_head",), **config: Any
) -> tuple[nn.Module, Mapping[str, Stored]]:
    """Write a checkpoint of integers.

    `floats`: The ends of the paths of layers that stay floating.

    Returns:
        The model with what the integers stand for, and these by the paths of layers.
    """
    model, random = copy.deepcopy(tiny_decoder(kind, **config)), np.random.default_rng(0)
    tensors = {name: x.to(torch.float16) for name, x in model.state_dict().items()}
    layers = dict[str, Stored]()
    for path, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or path.endswith(tuple(floats)):
            continue
        layers[path], own = stored_layer(of, layer.out_features, layer.in_features, random)
        del tensors[f"{path}.weight"]
        if layer.bias is not None:
            own.pop("bias", None)
        tensors |= {f"{path}.{part}": tensor for part, tensor in own.items()}
    tied = model.config.tie_word_embeddings and tensors.pop("lm_head.weight", None) is not None
    folder.mkdir(exist_ok=True)
    save_file({n: x.contiguous() for n, x in tensors.items()}, folder / "model.safetensors")
    values = model.config.to_dict() | {
        "architectures": [type(model).__name__], "dtype": "float16",
        "quantization_config": of.config(["lm_head"]),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in model.state_dict():
                model.get_parameter(name).copy_(tensor.float())
        for path, stored in layers.items():
            model.get_submodule(path).weight.copy_(torch.from_numpy(stored.dequantised()))
    assert not tied or model.lm_head.weight is model.get_input_embeddings().weight
    return model, layers
