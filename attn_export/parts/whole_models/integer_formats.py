"""Linear layers whose weights are integers or float8 in a checkpoint, as their formats store them.

The formats are GPTQ, AWQ ("gemm"), compressed-tensors ("pack-quantized", "int-quantized" with
inputs in float, and "float-quantized") and "fp8". Shapes and types are checked before a tensor is
read.

Legend: out and in, the features of a layer; groups, the blocks of inputs that share a scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from attn_export.quantiser import FLOAT8, QuantisedWeight
from attn_export.weights.source import Stored

if TYPE_CHECKING:
    from torch import Tensor

GPTQ, AWQ = "GPTQ", "AWQ"
PACKED, PLAIN = "compressed-tensors, packed", "compressed-tensors, int8"

TENSORS: Final = {
    GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    AWQ: ("qweight", "qzeros", "scales"),
    PACKED: (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    ),
    PLAIN: ("weight", "weight_scale", "weight_zero_point", "weight_g_idx"),
    FLOAT8: ("weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale"),
}  # fmt: skip
"""The tensors that a layer may have, by format; by the first one, or its type, a layer is known.

The scales of float8 have one of two names; those of inputs are not used.
"""

_OPTIONAL: Final = {
    "g_idx", "weight_zero_point", "weight_g_idx", *TENSORS[FLOAT8][1:],
}  # fmt: skip
"""Tensors that a layer may lack, unless its `LayerKind` needs them."""

_WORDS, _INDICES, _FLOATS = ("I32",), ("I32", "I64"), ("F32", "F16", "BF16")
_TYPES: Final = {
    "qweight": _WORDS, "qzeros": _WORDS, "scales": _FLOATS, "g_idx": _INDICES,
    "weight_packed": _WORDS, "weight_scale": _FLOATS,
    **dict.fromkeys(TENSORS[FLOAT8][2:], _FLOATS),
    "weight_zero_point": ("I32", "I8"), "weight_shape": _INDICES, "weight_g_idx": _INDICES,
}  # fmt: skip

WEIGHT_TYPES: Final = {PLAIN: "I8", FLOAT8: "F8_E4M3"}
"""The type of the tensor ``weight`` of layers, in formats that have one."""

_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of each of 8 neighbouring outputs, in AWQ."""

_WORD: Final = 32


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """How a config says that layers are stored.

    Attributes:
        bits: The bits of an integer.
        group: The inputs that share a scale; 0 for all of an output.
        needs: Tensors that layers must have, beside those that all have.
        outputs: The outputs that share a scale; 0 for all.
    """

    bits: int
    group: int
    needs: frozenset[str] = frozenset()
    outputs: int = 1

    def __str__(self) -> str:
        """Return it in words."""
        if self.outputs != 1:
            blocks = f"in blocks of {self.outputs} by {self.group}"
            return f"{self.bits} bits {blocks if self.outputs else 'with one scale'}"
        return f"{self.bits} bits {f'in groups of {self.group}' if self.group else 'by output'}"

    def scales_of(self, shape: Iterable[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight `[out, in]`."""
        blocks = zip(shape, (self.outputs, self.group), strict=True)
        return tuple(-(-size // (block or size)) for size, block in blocks)


@dataclasses.dataclass(frozen=True)
class IntegerFormat:
    """The format of a checkpoint.

    Attributes:
        name: One of `TENSORS`.
        kinds: How its layers may be stored.
        adds_one: Whether zero points are stored minus 1, as in the first version of GPTQ.
        rounds_inputs: Whether the config rounds the inputs of layers as well.
    """

    name: str
    kinds: tuple[LayerKind, ...]
    adds_one: bool = False
    rounds_inputs: bool = False


def check_layer(
    of: IntegerFormat, stored: Mapping[str, Stored], weight_shape: Callable[[], list[int]]
) -> tuple[int, int]:
    """Return `[out, in]` of a layer, by the shapes of its tensors, which must fit each other.

    `weight_shape`: Reads the tensor of this name.

    Raises:
        ValueError: What is wrong.
    """
    missing = [x for x in TENSORS[of.name] if x not in stored and x not in _OPTIONAL]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    for part, tensor in stored.items():
        types = (WEIGHT_TYPES[of.name],) if part == "weight" else _TYPES[part]
        if tensor.dtype not in types:
            raise ValueError(f"{part} is {tensor.dtype}, not {' or '.join(types)}")
    if of.name == FLOAT8:
        return _float8_kind(of, {part: x.shape for part, x in stored.items()})[1]
    shapes = {part: tensor.shape for part, tensor in stored.items()}
    try:
        bits, (out, inputs), groups, expected = _expected(of, stored, weight_shape)
    except (ValueError, IndexError) as error:
        raise ValueError("its tensors have the wrong number of axes") from error
    for part, wanted in expected.items():
        if shapes.get(part, wanted) != wanted:
            raise ValueError(f"{part} is {list(shapes[part])}, expected {list(wanted)}")
    if min(out, inputs, groups) < 1 or inputs % groups:
        raise ValueError(f"{inputs} inputs do not divide into {groups} groups")
    if of.name == AWQ and out % 8:
        raise ValueError(f"it has {out} outputs, and words hold 8")
    _check_kind(of, stored, bits, inputs, groups)
    return out, inputs


def _check_kind(
    of: IntegerFormat, stored: Mapping[str, Stored], bits: int, inputs: int, groups: int
) -> None:
    """Check that a config says that layers are stored so."""
    group = inputs // groups
    fitting = [
        kind for kind in of.kinds
        if kind.bits == bits and (group == kind.group or (groups == 1 and not kind.group))
    ]  # fmt: skip
    if not fitting:
        own, told = LayerKind(bits, group if groups > 1 else 0), " or ".join(map(str, of.kinds))
        raise ValueError(f"it has {own}, and the config says {told}")
    missing = [sorted(kind.needs - stored.keys()) for kind in fitting]
    if all(missing):
        raise ValueError(f"{missing[0][0]} is missing, which the config asks for")


_Expected = tuple[int, tuple[int, int], int, Mapping[str, tuple[int, ...]]]


def _expected(
    of: IntegerFormat, stored: Mapping[str, Stored], weight_shape: Callable[[], list[int]]
) -> _Expected:
    """Return the bits and `[out, in]` of a layer, its groups, and the shapes of its tensors."""
    shapes = {part: tensor.shape for part, tensor in stored.items()}
    if of.name in (GPTQ, AWQ):
        (groups, out), (rows, _), (_, words) = (shapes[x] for x in ("scales", "qweight", "qzeros"))
        bits = _bits(words, out) if of.name == GPTQ else 4
        inputs = rows * _WORD // bits if of.name == GPTQ else rows
        zeros = groups, _words_of(out, bits)
        packed = (_words_of(inputs, bits), out) if of.name == GPTQ else (inputs, zeros[1])
        return bits, (out, inputs), groups, {"qweight": packed, "qzeros": zeros, "g_idx": (inputs,)}
    is_one = shapes["weight_scale"] in ((1,), ())  # of all outputs
    if of.name == PACKED:
        out, inputs = weight_shape() if shapes["weight_shape"] == (2,) else (0, 0)
        bits = _bits(shapes["weight_packed"][1], inputs)
    else:
        (out, inputs), bits = shapes["weight"], 8
    groups = 1 if is_one else shapes["weight_scale"][1]
    are_words = stored.get("weight_zero_point", Stored((), "I8")).dtype == "I32"
    zeros = (_words_of(out, bits) if are_words else out), groups
    return bits, (out, inputs), groups, {
        "weight_packed": (out, _words_of(inputs, bits)), "weight_shape": (2,),
        "weight_scale": shapes["weight_scale"] if is_one else (out, groups),
        "weight_zero_point": shapes["weight_scale"] if is_one and not are_words else zeros,
        "weight_g_idx": (inputs,),
    }  # fmt: skip


def _float8_kind(
    of: IntegerFormat, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[LayerKind, tuple[int, int], str]:
    """Return how a layer of float8 is stored, its `[out, in]`, and the name of its scales."""
    shape, names = shapes["weight"], [x for x in TENSORS[FLOAT8][1:3] if x in shapes]
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"weight is {list(shape)}, not [out, in]")
    if len(names) != 1:
        raise ValueError(f"{' and '.join(names)} are there" if names else "weight_scale is missing")
    scales = shapes[names[0]]
    for kind in of.kinds:
        if [x for x in kind.scales_of(shape) if x > 1] == [x for x in scales if x != 1]:
            return kind, (shape[0], shape[1]), names[0]
    wanted = " or ".join(f"{list(kind.scales_of(shape))}" for kind in of.kinds)
    raise ValueError(f"{names[0]} is {list(scales)}, expected {wanted}")


def _float8(of: IntegerFormat, parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read a layer of float8, whose scales are those of blocks of outputs and inputs."""
    import ml_dtypes
    import torch

    shapes = {part: tuple(x.shape) for part, x in parts.items()}
    kind, (out, inputs), name = _float8_kind(of, shapes)
    numbers = parts["weight"].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    scales = _scales(parts[name]).reshape(kind.scales_of((out, inputs)))
    if np.isnan(numbers).any():
        raise ValueError("a weight is NaN")
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise ValueError("a scale is NaN, infinite, 0 or negative")
    group = min(kind.group or inputs, inputs)
    step = math.gcd(group, inputs)  # the last block may be smaller
    blocks, outputs = np.arange(0, inputs, step) // group, np.arange(out) // (kind.outputs or out)
    by_block = np.ascontiguousarray(scales.T[np.ix_(blocks, outputs)])
    return QuantisedWeight(
        FLOAT8, np.ascontiguousarray(numbers.T), by_block, None, is_blocked=len(by_block) > 1
    )


def read_weight(of: IntegerFormat, parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Return the weight of a layer that `check_layer` passed.

    Raises:
        ValueError: What is wrong with its numbers.
    """
    if of.name == FLOAT8:
        return _float8(of, parts)
    if of.name in (PACKED, PLAIN):
        return _compressed(of, parts)
    words, zeros = _array(parts["qweight"]), _array(parts["qzeros"])
    scales = _scales(parts["scales"])
    if of.name == AWQ:
        order = np.arange(scales.shape[1]).reshape(-1, 8)[:, _AWQ_ORDER].reshape(-1)
        return _weight(4, _unpack(words, 4)[:, order], scales, _unpack(zeros, 4)[:, order], None)
    bits = _bits(zeros.shape[1], scales.shape[1])
    # One more than the largest is 0, as in the kernels of GPTQ.
    points = (_unpack(zeros, bits)[:, : scales.shape[1]] + int(of.adds_one)) & (2**bits - 1)
    return _weight(bits, _unpack(words.T, bits).T, scales, points, parts.get("g_idx"))


def _compressed(of: IntegerFormat, parts: Mapping[str, Tensor]) -> QuantisedWeight:
    """Read a layer of compressed-tensors, whose integers are stored with 2 ** (bits - 1) added."""
    scales, zeros = _scales(parts["weight_scale"]), parts.get("weight_zero_point")
    if of.name == PACKED:
        outputs, inputs = parts["weight_shape"].tolist()
        words = _array(parts["weight_packed"])
        bits = _bits(words.shape[1], inputs)
        integers = _unpack(words, bits)[:, :inputs].T
    else:
        integers, bits = _unsigned(parts["weight"], 8).T, 8
        outputs = integers.shape[1]
    scales = np.broadcast_to(scales.reshape(-1, 1) if scales.size == 1 else scales,
                             (outputs, scales.shape[1] if scales.ndim == 2 else 1)).T  # fmt: skip
    points: np.ndarray
    if zeros is None:
        points = np.full(scales.shape, 2 ** (bits - 1), np.int16)
    elif zeros.element_size() == 1:
        points = _unsigned(zeros, bits).reshape(-1, scales.shape[0]).T
        points = np.broadcast_to(points, scales.shape)
    else:
        points = _unpack(_array(zeros).T, bits)[:, :outputs]
    order = parts.get("weight_g_idx")
    return _weight(
        bits, integers, scales, points, None if order is None or (order == -1).all() else order
    )


def _weight(
    bits: int, integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: Tensor | None
) -> QuantisedWeight:
    """Return a weight of unsigned integers `[in, out]`; of signed ones if all stand around 0.

    `groups`: The group of each input, `[in]`, if they are not in the order of groups.
    """
    if not np.isfinite(scales).all():
        raise ValueError("a scale is NaN or infinite")
    if zeros.min() < 0 or zeros.max() >= 2**bits:
        raise ValueError(f"a zero point is none of {bits} bits")
    order = None if groups is None else _order(groups.numpy().astype(np.int64), len(scales))
    rows, points = integers if order is None else integers[order], None
    if not scales.all():
        apart = rows.reshape(len(scales), -1, rows.shape[1]) != zeros[:, None]
        if (apart & (scales == 0)[:, None]).any():
            raise ValueError("a scale is 0, and its integers are not")
    middle = 2 ** (bits - 1)
    name = f"int{bits}" if (zeros == middle).all() else f"uint{bits}"
    if name.startswith("int"):
        rows = (rows - middle).astype(np.int8)
    else:
        rows, points = rows.astype(np.uint8), np.ascontiguousarray(zeros.astype(np.uint8))
    rows, scales = np.ascontiguousarray(rows), np.ascontiguousarray(scales)
    return QuantisedWeight(name, rows, scales, points, len(scales) > 1, order)


def _order(groups: np.ndarray, count: int) -> np.ndarray | None:
    """Return the inputs in the order of their groups, `[in]`; None if they are in it already."""
    if groups.min() < 0 or groups.max() >= count:
        raise ValueError(f"g_idx names groups outside 0 to {count - 1}, which have scales")
    sizes = np.bincount(groups, minlength=count)
    if (sizes != sizes[0]).any():
        raise ValueError(f"g_idx has groups of {sizes.min()} to {sizes.max()} inputs")
    order = np.argsort(groups, kind="stable")
    return None if (order == np.arange(len(order))).all() else order


def _scales(tensor: Tensor) -> np.ndarray:
    scales: np.ndarray = tensor.float().numpy()
    return scales


def _array(words: Tensor) -> np.ndarray:
    array: np.ndarray = words.numpy().view(np.uint32)
    return array


def _unsigned(integers: Tensor, bits: int) -> np.ndarray:
    """Return signed integers as those from 0, int16."""
    unsigned: np.ndarray = integers.numpy().astype(np.int16) + 2 ** (bits - 1)
    return unsigned


def _bits(words: int, count: int) -> int:
    """Return the bits of an integer, 4 or 8, by the words that so many integers fill."""
    return 8 if words == _words_of(count, 8) and words != _words_of(count, 4) else 4


def _words_of(count: int, bits: int) -> int:
    """Return the number of words that integers fill."""
    return -(-count * bits // _WORD)


def _unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack words `[rows, columns]` to int16 `[rows, columns * 32 / bits]`, lowest bits first."""
    shifts = np.arange(0, _WORD, bits, dtype=np.uint32)
    numbers = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
    integers: np.ndarray = numbers.astype(np.int16).reshape(len(words), -1)
    return integers
