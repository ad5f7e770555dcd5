"""Named arrays in untrusted .npz files."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from attn_export.errors import WeightsError, counted
from attn_export.tensorfile import Array
from attn_export.untrusted_files import read_bytes
from attn_export.weights.source import listed

_NPY = ".npy"
"""The suffix of an array inside a .npz file."""

_MAX_HEADER = 1024
"""The largest size in bytes of the header of an array in a .npz file; usual headers have 128."""


def read_npz(path: Path, names: Sequence[str], max_bytes: int) -> dict[str, Array]:
    """Return the arrays of a .npz file, none of which is a pickle.

    `max_bytes`: The largest size of the file, and of each array in it, in bytes.
    """
    with zipfile.ZipFile(io.BytesIO(read_bytes(path, max_bytes))) as archive:
        members = {info.filename.removesuffix(_NPY): info for info in archive.infolist()}
        _check_names(path, members, names)
        arrays = {}
        for name, info in members.items():
            if info.file_size > max_bytes:
                raise WeightsError(
                    f"{path}: {name} takes {info.file_size} bytes, and {max_bytes} is the most"
                )
            with archive.open(info) as stream:
                arrays[name] = _npy(stream.read(max_bytes))
        return arrays


def _npy(data: bytes) -> Array:
    """Read an .npy file; the header is checked before an array is allocated."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array has the version {version} of the format")
    read = (
        np.lib.format.read_array_header_1_0 if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )  # fmt: skip
    shape, is_fortran, dtype = read(stream, max_header_size=_MAX_HEADER)
    content = data[stream.tell() :]
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes are no {list(shape)} of {dtype}")
    array = np.frombuffer(content, dtype).astype(dtype.newbyteorder("="))
    return array.reshape(shape, order="F" if is_fortran else "C").copy()


def _check_names(path: Path, arrays: Iterable[str], names: Sequence[str]) -> None:
    """Raise WeightsError if an array has another name."""
    other = [name for name in arrays if name not in names]
    if other:
        raise WeightsError(
            f"{path} holds {counted(len(other), 'array')} of another name: {listed(other)}; it "
            f"may hold {', '.join(names)}"
        )
