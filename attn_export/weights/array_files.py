"""Arrays by name from a .npz or .safetensors file that somebody else may have written."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_export.errors import WeightsError, counted, one_line
from attn_export.spec.fields import HUGE
from attn_export.untrusted_files import read_bytes
from attn_export.weights.source import bracketed, listed, open_source

# -- arrays by name from a .npz or .safetensors file --------------------------------------------

NPZ, SAFETENSORS = ".npz", ".safetensors"

NPY = ".npy"
"""The suffix of an array within a .npz file."""

HEADER = 1024
"""The most bytes of the header of such an array: one of numbers takes 128."""


def read_arrays(path: Path, names: Sequence[str], most: int) -> dict[str, Tensor]:
    """Return the arrays of a file, in the types that they have there.

    Args:
        path: A .npz or .safetensors file; nothing is unpickled.
        names: The names that the arrays may have.
        most: The largest size of the file, and of an array, in bytes.

    Raises:
        WeightsError: If it is no such file, is larger, holds other names or none of these.
    """
    readers = {NPZ: _npz, SAFETENSORS: _safetensors}
    if path.suffix not in readers:
        raise WeightsError(f"{path} is no {NPZ} or {SAFETENSORS} file by its name; give one")
    try:
        found = readers[path.suffix](path, names, most)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    except WeightsError:
        raise
    except Exception as error:  # a file may hold anything
        raise WeightsError(f"{path} is no {path.suffix} file: {one_line(error)}") from error
    if not found:
        raise WeightsError(f"{path} holds no arrays; it may hold {', '.join(names)}")
    return found


def _npz(path: Path, names: Sequence[str], most: int) -> dict[str, Tensor]:
    with zipfile.ZipFile(io.BytesIO(read_bytes(path, most))) as archive:
        members = {info.filename.removesuffix(NPY): info for info in archive.infolist()}
        _check_names(path, members, names)
        found = {}
        for name, info in members.items():
            _check_size(path, name, info.file_size, most)
            with archive.open(info) as stream:
                found[name] = torch.from_numpy(_npy(stream.read(most)))
        return found


def _npy(data: bytes) -> np.ndarray[Any, Any]:
    """Return the array of an .npy file: its header is checked before memory is taken.

    Raises:
        ValueError: If it is none, or holds objects.
    """
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array has the version {version} of the format")
    read = (
        np.lib.format.read_array_header_1_0 if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )  # fmt: skip
    shape, is_fortran, dtype = read(stream, max_header_size=HEADER)
    rest = data[stream.tell() :]
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(rest):
        raise ValueError(f"{len(rest)} bytes are no {list(shape)} of {dtype}")
    array = np.frombuffer(rest, dtype).astype(dtype.newbyteorder("="))
    return array.reshape(shape, order="F" if is_fortran else "C").copy()


def _safetensors(path: Path, names: Sequence[str], most: int) -> dict[str, Tensor]:
    source = open_source(path)
    _check_names(path, source.files, names)
    for name, stored in source.describe(source.files).items():
        _check_size(path, name, 4 * math.prod(stored.shape), most)
    return {name: tensor.clone() for name, tensor in source.read(source.files).items()}


def _check_names(path: Path, found: Any, names: Sequence[str]) -> None:
    other = [name for name in found if name not in names]
    if other:
        raise WeightsError(
            f"{path} holds {counted(len(other), 'array')} of another name: {listed(other)}; it "
            f"may hold {', '.join(names)}"
        )


def _check_size(path: Path, name: str, size: int, most: int) -> None:
    if size > most:
        raise WeightsError(f"{path}: {name} takes {size} bytes, and {most} is the most")


# -- scales of a cache of integers as a file ----------------------------------------------------

FILE = "kv_scales.npz"
"""The name of the file in a bundle."""

PARTS = ("k_scale", "v_scale")

MOST = 64 * 2**20
"""The largest size of such a file in bytes: a scale for each of 2^20 channels takes 8 MiB."""


def read_scales(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scales that a file holds, in the shapes of a module's own.

    Args:
        path: A .npz or .safetensors file with `k_scale` and `v_scale`, float32: scalars or `[1]`,
            or `[Hkv, D]` or `[Hkv, 1, D]` by channel.
        like: The module's own, by name.

    Raises:
        WeightsError: If it is no such file, or a scale is not positive and finite.
    """
    found = read_arrays(path, PARTS, MOST)
    return {name: _fitting(path, name, found, like[name]) for name in PARTS}


def _fitting(path: Path, name: str, found: Mapping[str, Tensor], like: Tensor) -> Tensor:
    if name not in found:
        raise WeightsError(f"{path} has no {name}; it has to hold {' and '.join(PARTS)}")
    scale = found[name]
    if scale.dtype != torch.float32:
        dtype = str(scale.dtype).removeprefix("torch.")
        raise WeightsError(f"{path}: {name} is {dtype}; store scales as float32")
    shapes = [tuple(like.shape), (like.shape[0], like.shape[-1]) if like.dim() else (1,)]
    if tuple(scale.shape) not in shapes:
        wanted = " or ".join(map(bracketed, shapes))
        kind = "per-channel" if like.dim() else "per-tensor"
        raise WeightsError(
            f"{path}: {name} has the shape {bracketed(scale.shape)}; with kv_scale = {kind!r} it "
            f"has to be {wanted}"
        )
    wrong = scale[~((scale >= 1 / HUGE) & (scale <= HUGE))]
    if wrong.numel():
        raise WeightsError(
            f"{path}: {name} holds {wrong[0].item():g}; a scale is a number from {1 / HUGE:g} to "
            f"{HUGE:g}"
        )
    return scale.reshape(like.shape)


def write_scales(folder: Path, scales: Mapping[str, Tensor]) -> None:
    """Write the scales of a module as a file that `read_scales` reads.

    Args:
        folder: An existing folder.
        scales: `k_scale` and `v_scale`.
    """
    arrays: dict[str, Any] = {name: scales[name].numpy() for name in PARTS}
    np.savez(folder / FILE, **arrays)
