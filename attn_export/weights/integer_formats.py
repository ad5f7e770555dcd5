"""Readers of linear layers in integer formats of checkpoints.

The formats are GPTQ and AWQ ("gemm"), as written by AutoGPTQ, GPTQModel and AutoAWQ;
compressed-tensors ("pack-quantized", and "int-quantized" without activations); and bitsandbytes'
int8.

Legend: in and out, the `in_features` and `out_features` of a layer; groups, the number of blocks of
inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
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
"""The tensors by which a layer is recognised, each with its format. AWQ has ``qweight`` too."""

TENSORS: Final = {
    GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    AWQ: ("qweight", "qzeros", "scales"),
    COMPRESSED: (
        "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape",
        "weight_g_idx",
    ),
    INT8: ("weight", "SCB", "weight_format"),
}  # fmt: skip
"""The tensors that a layer may have, by format."""

OPTIONAL: Final = {
    "g_idx", "weight_packed", "weight", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_format",
}  # fmt: skip
"""The tensors that a layer may lack."""

AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a 32-bit word of each of 8 neighbouring outputs, in AWQ."""

WORD: Final = 32
LARGEST_INT8: Final = 127.0
"""The integer of the largest weight of an output in bitsandbytes; SCB is its magnitude."""


def read_weight(
    format_name: str, parts: Mapping[str, Tensor], *, stated_bits: int | None, zeros_minus_one: bool
) -> QuantisedWeight:
    """Return a weight that is stored as integers.

    Args:
        format_name: The format, one of those in `TENSORS`.
        parts: The tensors of the layer, by the last part of their names.
        stated_bits: The bits of an integer of GPTQ in config.json; None if it does not state them.
        zeros_minus_one: Whether zero points of GPTQ are stored minus 1.

    Raises:
        ValueError: If the tensors do not match each other, blocks do not divide the inputs, or a
            scale is not positive and finite.
    """
    if format_name == GPTQ:
        return _gptq(parts, stated_bits, zeros_minus_one)
    return {AWQ: _awq, COMPRESSED: _compressed, INT8: _int8}[format_name](parts)


def _gptq(
    parts: Mapping[str, Tensor], stated_bits: int | None, zeros_minus_one: bool
) -> QuantisedWeight:
    """Read GPTQ: `qweight [in * bits / 32, out]` and `qzeros [groups, out * bits / 32]`."""
    scales = _floats(parts["scales"])  # [groups, out]
    qweight = _words(parts["qweight"])
    bits = _bits(parts["qzeros"].shape[-1], scales.shape[-1])
    if stated_bits not in (None, bits):
        raise ValueError(f"its integers have {bits} bits, config.json says {stated_bits}")
    integers = _unpack(qweight.T, bits).T
    zeros = _unpack(_words(parts["qzeros"]), bits) + int(zeros_minus_one)
    order = _order(parts["g_idx"], len(scales)) if "g_idx" in parts else None
    return _weight(bits, integers if order is None else integers[order], scales, zeros, order)


def _awq(parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read AWQ: `qweight [in, out / 8]` and `qzeros [groups, out / 8]`, outputs in `AWQ_ORDER`."""
    scales = _floats(parts["scales"])

    def outputs(words: Tensor) -> np.ndarray:
        integers = _unpack(_words(words), 4)
        indices = np.arange(integers.shape[1]).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)
        ordered: np.ndarray = integers[:, indices]
        return ordered

    return _weight(4, outputs(parts["qweight"]), scales, outputs(parts["qzeros"]), None)


def _compressed(parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read compressed-tensors: `weight_packed [out, in * bits / 32]`, or `weight [out, in]`."""
    scales = _floats(parts["weight_scale"]).T  # [groups, out]
    zeros = order = None
    if "weight_packed" in parts:
        words, inputs = _words(parts["weight_packed"]), int(parts["weight_shape"][1])
        bits = _bits(words.shape[1], inputs)
        middle = 2 ** (bits - 1)  # added to packed integers
        integers = _unpack(words, bits)[:, :inputs].T
        if "weight_zero_point" in parts:
            packed = _words(parts["weight_zero_point"])  # along the outputs
            zeros = _unpack(packed.T, bits)[:, : scales.shape[1]]
    else:
        bits, middle = 8, 128
        integers = _unsigned(parts["weight"])
        if "weight_zero_point" in parts:
            zeros = parts["weight_zero_point"].numpy().astype(np.int16).T + middle
    if "weight_g_idx" in parts:
        order = _order(parts["weight_g_idx"], len(scales))
        integers = integers if order is None else integers[order]
    zeros = np.full(scales.shape, middle, np.int16) if zeros is None else zeros
    return _weight(bits, integers, scales, zeros, order)


def _int8(parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read bitsandbytes' int8 `weight [out, in]`, and `SCB [out]`, its largest magnitudes."""
    integers = _unsigned(parts["weight"])
    if "weight_format" in parts and parts["weight_format"].any():
        raise ValueError("its rows are in the order of a GPU's tiles")
    scales = (_floats(parts["SCB"]).astype(np.float64) / LARGEST_INT8).astype(np.float32)
    scales = scales.reshape(1, -1)
    return _weight(8, integers, scales, np.full(scales.shape, 128, np.int16), None)


def _weight(
    bits: int, integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray,
    order: np.ndarray | None,
) -> QuantisedWeight:  # fmt: skip
    """Return a weight of unsigned integers `[in, out]`, or signed ones without zero points."""
    middle = 2 ** (bits - 1)
    if zeros.shape != scales.shape:
        raise ValueError(f"zero points {bracketed(zeros.shape)}, scales {bracketed(scales.shape)}")
    signed = bool((zeros == middle).all())
    if not signed and zeros.max() >= 2**bits:
        raise ValueError(f"a zero point of {zeros.max()}, which {bits} bits do not hold")
    (inputs, outputs), groups = integers.shape, scales.shape
    if groups[1] != outputs or not groups[0] or inputs % groups[0]:
        raise ValueError(f"{inputs} inputs and {outputs} outputs, scales {bracketed(groups)}")
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise ValueError("a scale is not positive and finite")
    return QuantisedWeight(
        f"int{bits}" if signed else f"uint{bits}",
        (integers - middle).astype(np.int8) if signed else integers.astype(np.uint8),
        scales,
        None if signed else zeros.astype(np.uint8),
        len(scales) > 1,
        order,
    )


def _floats(tensor: Tensor) -> np.ndarray:
    if not tensor.is_floating_point() or tensor.dim() not in (1, 2):
        raise ValueError(f"scales are {tensor.dtype} {bracketed(tensor.shape)}")
    array: np.ndarray = tensor.to(torch.float32).numpy().copy()
    return array


def _unsigned(weight: Tensor) -> np.ndarray:
    """Return an int8 weight `[out, in]` as numbers from 0 to 255, int16 `[in, out]`."""
    if weight.dtype != torch.int8:
        raise ValueError(f"weight is {weight.dtype}, not int8")
    integers: np.ndarray = weight.numpy().astype(np.int16).T + 128
    return integers


def _words(tensor: Tensor) -> np.ndarray:
    if tensor.dtype != torch.int32 or tensor.dim() != 2:
        raise ValueError(f"packed integers are {tensor.dtype} {bracketed(tensor.shape)}")
    words: np.ndarray = tensor.numpy().view(np.uint32)
    return words


def _bits(words: int, count: int) -> int:
    """Return the bits of an integer, 4 or 8, given the words that `count` integers fill."""
    return 8 if words * WORD == count * 8 else 4


def _unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack words `[rows, columns]` to int16 `[rows, columns * 32 / bits]`, lowest bits first."""
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    numbers = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    integers: np.ndarray = numbers.reshape(len(words), -1).astype(np.int16)
    return integers


def _order(g_idx: Tensor, groups: int) -> np.ndarray | None:
    """Return the indices of inputs in the order of their groups, `[in]`; None if already in order.

    `g_idx` is the group of each input, `[in]`, and `groups` the number of groups with scales.
    """
    numbers = g_idx.numpy().astype(np.int64)
    if numbers.ndim != 1:
        raise ValueError(f"g_idx has {numbers.ndim} axes, not 1")
    if numbers.min() < 0 or numbers.max() >= groups:
        raise ValueError(f"g_idx has groups outside 0 to {groups - 1}, which have scales")
    sizes = np.bincount(numbers, minlength=groups)
    if (sizes != sizes[0]).any():
        raise ValueError(f"groups have {sizes.min()} to {sizes.max()} inputs")
    order = np.argsort(numbers, kind="stable")
    return None if (order == np.arange(len(order))).all() else order
