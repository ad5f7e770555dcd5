"""Tensors of random numbers, and how they are stored as a seed in place of their values."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct, to_builtins

from attn_export.schema import Count, Name
from attn_export.untrusted_files import checked, parse_json, read_text

_MOST = 2**28
"""The most values that a seed stands for."""

_FIRST = 16
"""The number of values that are drawn to rule out a seed."""

_Unsigned = Annotated[int, Meta(ge=0, lt=2**32)]


VISIBLE = 0.7
"""The share of True, or of finite values, in a random mask."""


class _SeededTensor(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor of random numbers, by the seed of numpy's default generator.

    Attributes:
        crc32: The checksum of its bytes, since another numpy may draw others.
        is_mask: Whether keys are hidden at random, by False or -inf.
    """

    name: Name
    dtype: Annotated[str, Meta(pattern=r"\A(bool|float(16|32|64))\Z")]
    dims: Annotated[list[Count], Meta(max_length=8)]
    seed: _Unsigned
    crc32: _Unsigned
    is_mask: bool = False


def write_seed(path: Path, name: str, array: np.ndarray, seed: int) -> bool:
    """Write a seed if it gives the values of an array; return whether it does."""
    dtype = array.dtype.name
    if dtype not in ("bool", "float16", "float32", "float64") or array.size > _MOST:
        return False
    is_mask = dtype == "bool" or bool(np.isneginf(array).any())
    start = min(array.size, _FIRST)
    if not is_mask and not np.array_equal(
        _drawn((start,), dtype, seed, is_mask=False), array.reshape(-1)[:start]
    ):
        return False  # most seeds that are tried
    if not np.array_equal(_drawn(array.shape, dtype, seed, is_mask=is_mask), array):
        return False
    checksum = zlib.crc32(array.tobytes())
    tensor = _SeededTensor(name, dtype, list(array.shape), seed, checksum, is_mask)
    path.write_text(json.dumps(to_builtins(tensor)) + "\n", encoding="utf-8")
    return True


def draw(path: Path) -> tuple[str, np.ndarray]:
    """Return the name and the values of a tensor that is stored as a seed."""
    tensor = checked(parse_json(read_text(path)), _SeededTensor)
    if math.prod(tensor.dims) > _MOST:
        raise ValueError(f"{path.name} stands for {tensor.dims} values, more than {_MOST}")
    array = _drawn(tensor.dims, tensor.dtype, tensor.seed, is_mask=tensor.is_mask)
    if zlib.crc32(array.tobytes()) != tensor.crc32:
        raise ValueError(
            f"{path.name}: numpy {np.__version__} draws other values from the seed than those of "
            "the evidence; write it again"
        )
    return tensor.name, array


def _drawn(shape: Sequence[int], dtype: str, seed: int, *, is_mask: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return visible_keys(rng, shape, with_first=True)
    return random_floats(rng, shape, np.dtype(dtype), is_mask=is_mask)


def random_floats(
    rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype, *, is_mask: bool
) -> np.ndarray:
    """Return standard normal numbers; in a mask, -inf hides keys, but never the first one."""
    values = rng.standard_normal(shape)
    if is_mask:
        values = np.where(visible_keys(rng, shape, with_first=True), values, -np.inf)
    return np.asarray(values.astype(dtype))


def visible_keys(rng: np.random.Generator, shape: Sequence[int], *, with_first: bool) -> np.ndarray:
    """Return True for each key that is visible, with probability `VISIBLE`, or always the first."""
    mask = np.asarray(rng.random(shape) < VISIBLE)
    if with_first and mask.ndim:
        mask[..., 0] = True
    return mask
