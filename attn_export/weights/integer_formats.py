"""Weights of linear layers in the integer formats of checkpoints: GPTQ, AWQ and others.

GPTQ and AWQ ("gemm") as AutoGPTQ, GPTQModel and AutoAWQ write them, compressed-tensors
("pack-quantized", and "int-quantized" without activations), and bitsandbytes' int8.

Legend: in and out, the sizes of a layer; groups, the number of blocks of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from attn_export.quantiser import QuantisedWeight
from attn_export.weights.source import bracketed

GPTQ, AWQ, COMPRESSED, INT8 = "GPTQ", "AWQ", "compressed-tensors", "bitsandbytes int8"

MARKS: Final = {
    "qweight": GPTQ,
    "weight_packed": COMPRESSED,
    "weight_scale": COMPRESSED,
    "SCB": INT8,
}
"""The tensor by which a layer of each format is recognised; GPTQ and AWQ share theirs."""

PARTS: Final = {
    GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    AWQ: ("qweight", "qzeros", "scales"),
    COMPRESSED: (
        "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape",
        "weight_g_idx",
    ),
    INT8: ("weight", "SCB", "weight_format"),
}  # fmt: skip
OPTIONAL: Final = {
    "g_idx", "weight_packed", "weight", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_format",
}  # fmt: skip

AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place, in an integer of 32 bits, of each of 8 neighbouring outputs in AWQ."""

WORD: Final = 32
LARGEST_INT8: Final = 127.0
"""The integer that bitsandbytes gives the largest weight of an output, whose size is SCB."""


def read_gptq(
    parts: Mapping[str, Tensor], *, stated_bits: int | None, zeros_less_one: bool
) -> QuantisedWeight:
    """Read `qweight [in * bits / 32, out]`, `qzeros [groups, out * bits / 32]`, `g_idx [in]`.

    Args:
        parts: The tensors of the layer.
        stated_bits: The bits of an integer by config.json, if it states them.
        zeros_less_one: Whether zero points are stored minus 1.

    Raises:
        ValueError: If the tensors do not fit each other.
    """
    scales = _floats(parts["scales"])  # [groups, out]
    qweight = _words(parts["qweight"])
    bits = _bits(parts["qzeros"].shape[-1], scales.shape[-1])
    if stated_bits not in (None, bits):
        raise ValueError(f"its integers have {bits} bits, config.json says {stated_bits}")
    integers = _unpacked(qweight.T, bits).T
    zeros = _unpacked(_words(parts["qzeros"]), bits) + int(zeros_less_one)
    order = _order(parts["g_idx"], len(scales)) if "g_idx" in parts else None
    return _weight(bits, integers if order is None else integers[order], scales, zeros, order)


def _awq(parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read `qweight [in, out / 8]` and `qzeros [groups, out / 8]`, in AWQ's order of outputs."""
    scales = _floats(parts["scales"])

    def outputs(words: Tensor) -> np.ndarray:
        plain = _unpacked(_words(words), 4)
        places = np.arange(plain.shape[1]).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)
        found: np.ndarray = plain[:, places]
        return found

    return _weight(4, outputs(parts["qweight"]), scales, outputs(parts["qzeros"]), None)


def _compressed(parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read `weight_packed [out, in * bits / 32]`, or `weight [out, in]` in int8.

    Packed integers are stored plus half of their range; zero points are packed along the outputs.
    """
    scales = _floats(parts["weight_scale"]).T  # [groups, out]
    zeros = order = None
    if "weight_packed" in parts:
        words, inputs = _words(parts["weight_packed"]), int(parts["weight_shape"][1])
        bits = _bits(words.shape[1], inputs)
        middle = 2 ** (bits - 1)
        integers = _unpacked(words, bits)[:, :inputs].T
        if "weight_zero_point" in parts:
            packed = _words(parts["weight_zero_point"])
            zeros = _unpacked(packed.T, bits)[:, : scales.shape[1]]
    else:
        bits, middle = 8, 128
        if parts["weight"].dtype != torch.int8:
            raise ValueError(f"weight is {parts['weight'].dtype}, not int8")
        integers = parts["weight"].numpy().astype(np.int16).T + middle
        if "weight_zero_point" in parts:
            zeros = parts["weight_zero_point"].numpy().astype(np.int16).T + middle
    if "weight_g_idx" in parts:
        order = _order(parts["weight_g_idx"], len(scales))
        integers = integers if order is None else integers[order]
    zeros = np.full(scales.shape, middle, np.int16) if zeros is None else zeros
    return _weight(bits, integers, scales, zeros, order)


def _int8(parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read `weight [out, in]` in int8 and the largest size of each output, `SCB [out]`."""
    if parts["weight"].dtype != torch.int8:
        raise ValueError(f"weight is {parts['weight'].dtype}, not int8")
    if "weight_format" in parts and parts["weight_format"].any():
        raise ValueError("its rows are in the order of a GPU's tiles")
    integers = parts["weight"].numpy().astype(np.int16).T + 128
    scales = (_floats(parts["SCB"]).astype(np.float64) / LARGEST_INT8).astype(np.float32)
    scales = scales.reshape(1, -1)
    return _weight(8, integers, scales, np.full(scales.shape, 128, np.int16), None)


READERS: Final[Mapping[str, Callable[[Mapping[str, Tensor]], QuantisedWeight]]] = {
    AWQ: _awq, COMPRESSED: _compressed, INT8: _int8,
}  # fmt: skip
"""The formats that need nothing but their tensors."""


def _weight(
    bits: int, integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray,
    order: np.ndarray | None,
) -> QuantisedWeight:  # fmt: skip
    """Return a weight of unsigned integers `[in, out]`, signed where all zero points are half."""
    middle = 2 ** (bits - 1)
    if zeros.shape != scales.shape:
        raise ValueError(f"zero points {bracketed(zeros.shape)}, scales {bracketed(scales.shape)}")
    if (zeros == middle).all():
        signed = (integers - middle).astype(np.int8)
        return QuantisedWeight(f"int{bits}", signed, scales, None, len(scales) > 1, order)
    if zeros.max() >= 2**bits:
        raise ValueError(f"a zero point of {zeros.max()}, which {bits} bits do not hold")
    return QuantisedWeight(
        f"uint{bits}", integers.astype(np.uint8), scales, zeros.astype(np.uint8),
        len(scales) > 1, order,
    )  # fmt: skip


def check_weight(weight: QuantisedWeight) -> None:
    """Check sizes and scales.

    Raises:
        ValueError: If blocks do not divide the inputs, or a scale is not positive and finite.
    """
    (inputs, outputs), groups = weight.integers.shape, weight.scales.shape
    if groups[1] != outputs or not groups[0] or inputs % groups[0]:
        raise ValueError(f"{inputs} inputs and {outputs} outputs, scales {bracketed(groups)}")
    if not (np.isfinite(weight.scales) & (weight.scales > 0)).all():
        raise ValueError("a scale is not positive and finite")


def _floats(tensor: Tensor) -> np.ndarray:
    if not tensor.is_floating_point() or tensor.dim() not in (1, 2):
        raise ValueError(f"scales are {tensor.dtype} {bracketed(tensor.shape)}")
    found: np.ndarray = tensor.to(torch.float32).numpy().copy()
    return found


def _words(tensor: Tensor) -> np.ndarray:
    if tensor.dtype != torch.int32 or tensor.dim() != 2:
        raise ValueError(f"packed integers are {tensor.dtype} {bracketed(tensor.shape)}")
    found: np.ndarray = tensor.numpy().view(np.uint32)
    return found


def _bits(words: int, count: int) -> int:
    """Return the bits of `count` integers that fill a number of words."""
    return 8 if words * WORD == count * 8 else 4


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return `[rows, columns * 32 / bits]` of `[rows, columns]`, the lowest bits first, int16."""
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    numbers = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    found: np.ndarray = numbers.reshape(len(words), -1).astype(np.int16)
    return found


def _order(g_idx: Tensor, groups: int) -> np.ndarray | None:
    """Return the inputs in the order of their groups, `[in]`; None where they are in it.

    Raises:
        ValueError: If groups have different sizes, or there is another number of them.
    """
    numbers = g_idx.numpy().astype(np.int64)
    if numbers.ndim != 1 or numbers.min() < 0 or numbers.max() >= groups:
        raise ValueError(f"g_idx names groups beyond the {groups} that have scales")
    sizes = np.bincount(numbers, minlength=groups)
    if (sizes != sizes[0]).any():
        raise ValueError(f"groups have {sizes.min()} to {sizes.max()} inputs")
    order = np.argsort(numbers, kind="stable")
    return None if (order == np.arange(len(order))).all() else order
