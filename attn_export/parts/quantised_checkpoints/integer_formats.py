"""Readers of linear layers in integer formats of checkpoints.

The formats are GPTQ and AWQ ("gemm"), as written by AutoGPTQ, GPTQModel and AutoAWQ;
compressed-tensors ("pack-quantized", and "int-quantized" without activations); and bitsandbytes'
int8. The shapes of tensors are checked before any is read.

Legend: in and out, the `in_features` and `out_features` of a layer; groups, the number of blocks of
inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from attn_export.quantiser import QuantisedWeight
from attn_export.weights.checkpoint import INTEGERS
from attn_export.weights.source import Stored, bracketed

if TYPE_CHECKING:
    from torch import Tensor

GPTQ, AWQ, INT8 = "GPTQ", "AWQ", "bitsandbytes int8"
PACKED, UNPACKED = "compressed-tensors, packed", "compressed-tensors, int8"

MARKS: Final = dict(zip(INTEGERS, (GPTQ, PACKED, UNPACKED, INT8), strict=True))
"""The tensors by which a layer is recognised, each with its format; the first that exists counts.
AWQ has ``qweight`` too."""

TENSORS: Final = {
    GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    AWQ: ("qweight", "qzeros", "scales"),
    PACKED: (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    ),
    UNPACKED: ("weight", "weight_scale", "weight_zero_point", "weight_g_idx"),
    INT8: ("weight", "SCB", "weight_format"),
}  # fmt: skip
"""The tensors that a layer may have, by format."""

_OPTIONAL: Final = {"g_idx", "weight_zero_point", "weight_g_idx", "weight_format"}
"""The tensors that a layer may lack."""

INTS, WORDS, FLOATS = ("I32", "I64"), ("I32",), ("F64", "F32", "F16", "BF16")

KINDS: Final = {
    "qweight": (2, WORDS), "qzeros": (2, WORDS), "scales": (2, FLOATS), "g_idx": (1, INTS),
    "weight_packed": (2, WORDS), "weight": (2, ("I8",)), "weight_scale": (2, FLOATS),
    "weight_zero_point": (2, WORDS), "weight_shape": (1, INTS), "weight_g_idx": (1, INTS),
    "SCB": (1, FLOATS), "weight_format": (0, ("U8", "I8", *INTS)),
}  # fmt: skip
"""The number of axes and the dtypes of each tensor of a layer."""

_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a 32-bit word of each of 8 neighbouring outputs, in AWQ."""

_WORD: Final = 32
_LARGEST_INT8: Final = 127.0
"""The integer of the largest weight of an output in bitsandbytes; SCB is its magnitude."""


def check_layer(
    format_name: str, stored: Mapping[str, Stored], weight_shape: Callable[[], list[int]]
) -> tuple[int, int]:
    """Return `[out, in]` of a layer, by the shapes of its tensors, which must match each other."""
    for part in TENSORS[format_name]:
        if part not in stored and part not in _OPTIONAL:
            raise ValueError(f"{part} is missing")
    for part, tensor in stored.items():
        # Only packed zero points are words.
        is_byte = format_name == UNPACKED and part == "weight_zero_point"
        axes, dtypes = KINDS["weight" if is_byte else part]
        if len(tensor.shape) != axes or tensor.dtype not in dtypes:
            raise ValueError(f"{part} is {tensor.dtype} {bracketed(tensor.shape)}")
    shapes = {part: tensor.shape for part, tensor in stored.items()}
    (out, inputs), groups, expected = _expected_shapes(format_name, shapes, weight_shape)
    for part, wanted in expected.items():
        if shapes.get(part, wanted) != wanted:
            raise ValueError(f"{part} is {bracketed(shapes[part])}, expected {bracketed(wanted)}")
    if min(out, inputs, groups) < 1 or inputs % groups:
        raise ValueError(f"{inputs} inputs and {out} outputs in {groups} blocks of inputs")
    return out, inputs


Shapes = Mapping[str, tuple[int, ...]]


def _expected_shapes(
    format_name: str, shapes: Shapes, weight_shape: Callable[[], list[int]]
) -> tuple[tuple[int, int], int, Shapes]:
    """Return `[out, in]` of a layer, its number of groups, and the shapes of its tensors."""
    if format_name == GPTQ:
        groups, out = shapes["scales"]
        bits = _bits(shapes["qzeros"][1], out)
        inputs = shapes["qweight"][0] * _WORD // bits
        zeros = groups, _words_of(out, bits)
        return (out, inputs), groups, {
            "qweight": (_words_of(inputs, bits), out), "qzeros": zeros, "g_idx": (inputs,),
        }  # fmt: skip
    if format_name == AWQ:
        (groups, out), inputs = shapes["scales"], shapes["qweight"][0]
        zeros = groups, _words_of(out, 4)
        return (out, inputs), groups, {"qweight": (inputs, zeros[1]), "qzeros": zeros}
    if format_name == INT8:
        out, inputs = shapes["weight"]
        return (out, inputs), 1, {"SCB": (out,)}
    groups = shapes["weight_scale"][1]
    if format_name == UNPACKED:
        out, inputs = shapes["weight"]
        packed, zeros = (out, inputs), (out, groups)
    else:
        out, inputs = weight_shape() if shapes["weight_shape"] == (2,) else (-1, -1)
        if not 0 < min(out, inputs) <= max(out, inputs) < 2**31:
            raise ValueError("weight_shape does not hold the two sizes of a weight")
        bits = _bits(shapes["weight_packed"][1], inputs)
        packed = out, _words_of(inputs, bits)
        zeros = _words_of(out, bits), groups
    return (out, inputs), groups, {
        "weight_packed": packed, "weight_scale": (out, groups), "weight_zero_point": zeros,
        "weight_g_idx": (inputs,),
    }  # fmt: skip


def read_weight(
    format_name: str, parts: Mapping[str, Tensor], *, stated_bits: int | None, zeros_minus_one: bool
) -> QuantisedWeight:
    """Return a weight that is stored as integers."""
    if format_name == GPTQ:
        return _gptq(parts, stated_bits, zeros_minus_one)
    readers = {AWQ: _awq, PACKED: _packed, UNPACKED: _unpacked, INT8: _int8}
    return readers[format_name](parts)


def _gptq(
    parts: Mapping[str, Tensor], stated_bits: int | None, zeros_minus_one: bool
) -> QuantisedWeight:
    """Read GPTQ: `qweight [in * bits / 32, out]` and `qzeros [groups, out * bits / 32]`."""
    scales = _floats(parts["scales"])  # [groups, out]
    qweight = _words(parts["qweight"])
    bits = _bits(parts["qzeros"].shape[1], scales.shape[1])
    if stated_bits not in (None, bits):
        raise ValueError(f"its integers have {bits} bits, config.json says {stated_bits}")
    integers = _unpack(qweight.T, bits).T
    zeros = _unpack(_words(parts["qzeros"]), bits) + int(zeros_minus_one)
    order = _order(parts["g_idx"], len(scales)) if "g_idx" in parts else None
    return _weight(bits, integers if order is None else integers[order], scales, zeros, order)


def _awq(parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read AWQ: `qweight [in, out / 8]` and `qzeros [groups, out / 8]`, outputs in `_AWQ_ORDER`."""
    scales = _floats(parts["scales"])

    def outputs(words: Tensor) -> np.ndarray:
        integers = _unpack(_words(words), 4)
        indices = np.arange(integers.shape[1]).reshape(-1, 8)[:, _AWQ_ORDER].reshape(-1)
        ordered: np.ndarray = integers[:, indices]
        return ordered

    return _weight(4, outputs(parts["qweight"]), scales, outputs(parts["qzeros"]), None)


def _packed(parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read compressed-tensors' `weight_packed [out, in * bits / 32]`."""
    outputs, inputs = parts["weight_shape"].tolist()
    words = _words(parts["weight_packed"])
    bits = _bits(words.shape[1], inputs)
    zeros = None
    if "weight_zero_point" in parts:  # packed along the outputs
        zeros = _unpack(_words(parts["weight_zero_point"]).T, bits)[:, :outputs]
    return _compressed(parts, bits, _unpack(words, bits)[:, :inputs].T, zeros)


def _unpacked(parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read compressed-tensors' int8 `weight [out, in]`."""
    zeros = None
    if "weight_zero_point" in parts:
        zeros = _unsigned(parts["weight_zero_point"])
    return _compressed(parts, 8, _unsigned(parts["weight"]), zeros)


def _compressed(
    parts: Mapping[str, Tensor], bits: int, integers: np.ndarray, zeros: np.ndarray | None
) -> QuantisedWeight:
    """Return a weight of compressed-tensors, of unsigned integers `[in, out]`."""
    scales = _floats(parts["weight_scale"]).T  # [groups, out]
    order = None
    if "weight_g_idx" in parts:
        order = _order(parts["weight_g_idx"], len(scales))
        integers = integers if order is None else integers[order]
    if zeros is None:
        zeros = np.full(scales.shape, 2 ** (bits - 1), np.int16)  # was added to the integers
    return _weight(bits, integers, scales, zeros, order)


def _int8(parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read bitsandbytes' int8 `weight [out, in]`, and `SCB [out]`, its largest magnitudes."""
    integers = _unsigned(parts["weight"])
    if "weight_format" in parts and parts["weight_format"].any():
        raise ValueError("its rows are in the order of a GPU's tiles")
    scales = (_floats(parts["SCB"]).astype(np.float64) / _LARGEST_INT8).astype(np.float32)
    scales = scales.reshape(1, -1)
    return _weight(8, integers, scales, np.full(scales.shape, 128, np.int16), None)


def _weight(
    bits: int, integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray,
    order: np.ndarray | None,
) -> QuantisedWeight:  # fmt: skip
    """Return a weight of unsigned integers `[in, out]`, or signed ones without zero points."""
    middle = 2 ** (bits - 1)
    signed = bool((zeros == middle).all())
    if not signed and zeros.max() >= 2**bits:
        raise ValueError(f"a zero point of {zeros.max()}, which {bits} bits do not hold")
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
    array: np.ndarray = tensor.float().numpy().copy()
    return array


def _unsigned(weight: Tensor) -> np.ndarray:
    """Return an int8 weight `[out, in]` as numbers from 0 to 255, int16 `[in, out]`."""
    integers: np.ndarray = weight.numpy().astype(np.int16).T + 128
    return integers


def _words(tensor: Tensor) -> np.ndarray:
    words: np.ndarray = tensor.numpy().view(np.uint32)
    return words


def _bits(words: int, count: int) -> int:
    """Return the bits of an integer, 4 or 8, given the words that `count` integers fill."""
    return 8 if words * _WORD == count * 8 else 4


def _words_of(count: int, bits: int) -> int:
    """Return the number of words that integers fill."""
    return -(-count * bits // _WORD)


def _unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack words `[rows, columns]` to int16 `[rows, columns * 32 / bits]`, lowest bits first."""
    shifts = np.arange(0, _WORD, bits, dtype=np.uint32)
    numbers = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    integers: np.ndarray = numbers.reshape(len(words), -1).astype(np.int16)
    return integers


def _order(g_idx: Tensor, groups: int) -> np.ndarray | None:
    """Return the indices of inputs in the order of their groups, `[in]`; None if already in order.

    `g_idx` is the group of each input, `[in]`, and `groups` the number of groups with scales.
    """
    numbers = g_idx.numpy().astype(np.int64)
    if numbers.min() < 0 or numbers.max() >= groups:
        raise ValueError(f"g_idx has groups outside 0 to {groups - 1}, which have scales")
    sizes = np.bincount(numbers, minlength=groups)
    if (sizes != sizes[0]).any():
        raise ValueError(f"groups have {sizes.min()} to {sizes.max()} inputs")
    order = np.argsort(numbers, kind="stable")
    return None if (order == np.arange(len(order))).all() else order
