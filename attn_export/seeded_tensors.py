"""Tensors of random numbers that are stored as a seed, such as the caches of whole models."""

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

_Unsigned = Annotated[int, Meta(ge=0, lt=2**32)]


class _SeededTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of standard normal numbers, by the seed of numpy's default generator.

    Attributes:
        crc32: The checksum of its bytes, since another numpy may draw others.
    """

    name: Name
    dtype: Annotated[str, Meta(pattern=r"\Afloat(16|32|64)\Z")]
    dims: Annotated[list[Count], Meta(max_length=8)]
    seed: _Unsigned
    crc32: _Unsigned


def write_seed(path: Path, name: str, array: np.ndarray, seed: int) -> bool:
    """Write a seed if it gives the values of an array; return whether it does."""
    dtype = array.dtype.name
    if dtype not in ("float16", "float32", "float64") or array.size > _MOST:
        return False
    if not np.array_equal(_normal(array.shape, dtype, seed), array):
        return False
    tensor = _SeededTensor(name, dtype, list(array.shape), seed, zlib.crc32(array.tobytes()))
    path.write_text(json.dumps(to_builtins(tensor)) + "\n", encoding="utf-8")
    return True


def draw(path: Path) -> tuple[str, np.ndarray]:
    """Return the name and the values of a tensor that is stored as a seed."""
    tensor = checked(parse_json(read_text(path)), _SeededTensor)
    if math.prod(tensor.dims) > _MOST:
        raise ValueError(f"{path.name} stands for {tensor.dims} values, more than {_MOST}")
    array = _normal(tensor.dims, tensor.dtype, tensor.seed)
    if zlib.crc32(array.tobytes()) != tensor.crc32:
        raise ValueError(
            f"{path.name}: numpy {np.__version__} draws other values from the seed than those of "
            "the evidence; write it again"
        )
    return tensor.name, array


def _normal(shape: Sequence[int], dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
