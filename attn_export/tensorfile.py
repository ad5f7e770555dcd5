"""Reading and writing of tensor files (ONNX TensorProto) without importing onnx.

`import onnx` takes longer than a runtime needs for all cases of a small model. It would delay
`verify` and every runtime's process.
"""

from __future__ import annotations

import math
import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.system_info import allow_many_files
from attn_export.tensorproto import CODES, TensorMessage, parse, serialise
from attn_export.untrusted_files import read_bytes

Array = np.ndarray[Any, Any]
"""An array of any dtype and shape."""

SEED = ".seed"
"""The suffix of a file that holds a seed in place of values; see `seeded_tensors`."""

ArrayDict = dict[str, Array]
"""Arrays by the names of inputs or outputs."""


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name; `np.savez` takes none whose name is one of its parameters, as file."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asanyarray(array), allow_pickle=False)


def write_tensor(path: Path, name: str, array: np.ndarray) -> None:
    """Write one tensor.

    `array`: The values, of any shape.
    """
    if array.dtype.name not in CODES:
        raise ValueError(f"{name} is of type {array.dtype}, which has no ONNX type")
    foreign = array.dtype.byteorder == (">" if sys.byteorder == "little" else "=")
    little = array.byteswap() if foreign and array.dtype.itemsize > 1 else array
    message = TensorMessage(name, array.dtype.name, list(array.shape), little.tobytes())
    path.write_bytes(serialise(message))


def read_tensor(path: Path) -> tuple[str, np.ndarray]:
    """Return the name of the tensor in a file, and its values, of any shape and dtype."""
    data = read_bytes(path)
    try:
        message = parse(data)
    except ValueError as error:
        raise ValueError(f"{path.name} holds {error}") from error
    dtype = numpy_dtype(message.dtype)
    expected = math.prod(message.dims) * dtype.itemsize
    if len(message.raw) != expected:
        raise ValueError(
            f"{path.name} holds {len(message.raw)} bytes, and {message.dims} of {message.dtype} "
            f"take {expected}"
        )
    array = np.frombuffer(message.raw, dtype)
    little = array if sys.byteorder == "little" else array.byteswap()
    return message.name, little.reshape(message.dims)


def write_tensors(folder: Path, stem: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to `STEM_0.pb`, `STEM_1.pb` …, in their order."""
    for number, (name, array) in enumerate(arrays.items()):
        write_tensor(folder / f"{stem}_{number}.pb", name, array)


_MAPPED_FROM = 2**16
"""The size in bytes from which on `mapped` reads an array from its file."""


def mapped(folder: Path, stem: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays that `write_tensors` wrote, large ones as views of their files."""
    return {
        name: _mapped(folder / f"{stem}_{number}.pb", array)
        for number, (name, array) in enumerate(arrays.items())
    }


def _mapped(path: Path, array: Array) -> Array:
    # Windows removes no file that is mapped.
    is_large = array.nbytes >= _MAPPED_FROM and path.is_file()  # else drawn by its seed
    if not is_large or sys.byteorder != "little" or os.name != "posix":
        return array
    start = path.stat().st_size - array.nbytes  # values are the last field
    allow_many_files()
    # Not read-only, as PyTorch takes no such arrays; what is written stays in memory.
    return np.memmap(path, array.dtype, "c", start, array.shape)


def read_tensors(folder: Path, stem: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the tensors with expected names in `STEM_0.pb`, `STEM_1.pb` …, or by their seeds."""
    arrays = {}
    for number, name in enumerate(names):
        path = folder / f"{stem}_{number}.pb"
        if not path.exists() and path.with_suffix(SEED).exists():
            from attn_export.seeded_tensors import draw  # a runtime's process starts sooner

            actual, arrays[name] = draw(path.with_suffix(SEED))
        else:
            actual, arrays[name] = read_tensor(path)
        if actual != name:
            raise ValueError(f"{path.name} holds {actual!r}, expected {name!r}")
    return arrays


def read_outputs(folder: Path, count: int) -> dict[str, np.ndarray]:
    """Return the outputs of a runtime in `output_0.pb` …, by the names in the files.

    Large ones are views of the files.
    """
    paths = [folder / f"output_{number}.pb" for number in range(count)]
    return {name: _mapped(path, array) for path in paths for name, array in [read_tensor(path)]}


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy dtype of a name, with that of ml_dtypes for bfloat16."""
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)


def is_floating(dtype: np.dtype) -> bool:
    """Return whether a dtype is floating point, bfloat16 included."""
    return np.issubdtype(dtype, np.floating) or dtype.name == "bfloat16"


def to_float64(array: Array) -> Array:
    """Return a floating array of any shape as float64; return others as they are."""
    return array.astype(np.float64) if is_floating(array.dtype) else array


def lowest_number(dtype: np.dtype) -> float:
    """Return the lowest finite number of a floating point dtype."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).min)
