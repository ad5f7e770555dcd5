"""Tensors as files: ONNX TensorProto, read and written without importing onnx.

`import onnx` takes longer than a runtime needs for all cases of a small model, and both
`verify` and every runtime's process would pay for it. Of the protobuf message
(https://github.com/onnx/onnx/blob/main/onnx/onnx.proto, `TensorProto`) four fields are used:
dims (1), data_type (2), name (8) and raw_data (9), which is what `onnx.numpy_helper` writes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.errors import printable
from attn_export.results import CODES, DTYPES
from attn_export.untrusted_files import read_bytes

Array = np.ndarray[Any, Any]
"""An array of any type and shape."""
ArrayDict = dict[str, Array]
"""Arrays by the names of inputs or outputs."""

DIMS, DATA_TYPE, NAME, RAW_DATA = 1, 2, 8, 9
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MOST_DIMS, LARGEST_DIM = 8, 2**31 - 1


def write_tensor(path: Path, name: str, array: np.ndarray) -> None:
    """Write one tensor.

    Args:
        path: The file.
        name: The name of the tensor.
        array: Its values.

    Raises:
        ValueError: If there is no ONNX type for the array's dtype.
    """
    code = CODES.get(array.dtype.name)
    if code is None:
        raise ValueError(f"{name} is of type {array.dtype}, which has no ONNX type")
    foreign = array.dtype.byteorder == (">" if sys.byteorder == "little" else "=")
    little = array.byteswap() if foreign and array.dtype.itemsize > 1 else array
    dims = b"".join(_key(DIMS, VARINT) + _varint(size) for size in array.shape)
    path.write_bytes(
        dims
        + _key(DATA_TYPE, VARINT)
        + _varint(code)
        + _bytes(NAME, name.encode())
        + _bytes(RAW_DATA, little.tobytes())
    )


def read_tensor(path: Path) -> tuple[str, np.ndarray]:
    """Read one tensor: its name and its values.

    Raises:
        ValueError: If the file holds no tensor with raw data.
    """
    dims: list[int] = []
    dtype, name, raw = None, "", None
    for field, value in _fields(read_bytes(path)):
        if field == DIMS and isinstance(value, int):
            dims.append(value)
        elif field == DIMS and isinstance(value, bytes):  # packed, as other writers may do
            dims += _packed(value)
        elif field == DATA_TYPE and isinstance(value, int):
            dtype = DTYPES.get(value)
        elif field == NAME and isinstance(value, bytes):
            name = value.decode()
        elif field == RAW_DATA and isinstance(value, bytes):
            raw = value
    if dtype is None or (raw is None and 0 not in dims):
        raise ValueError(f"{path.name} holds no tensor with raw data")
    if len(dims) > MOST_DIMS or max(dims, default=0) > LARGEST_DIM:
        raise ValueError(f"{path.name} has the dims {printable(dims, 80)}, which no tensor has")
    kind = numpy_dtype(dtype)
    expected = math.prod(dims) * kind.itemsize
    if len(raw or b"") != expected:
        raise ValueError(
            f"{path.name} holds {len(raw or b'')} bytes, and {dims} of {dtype} take {expected}"
        )
    array = np.frombuffer(raw or b"", kind)
    little = array if sys.byteorder == "little" else array.byteswap()
    return name, little.reshape(dims)


def write_tensors(folder: Path, stem: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as `STEM_0.pb`, `STEM_1.pb` …, in their order.

    Args:
        folder: An existing folder.
        stem: STEM.
        arrays: The arrays by name.
    """
    for number, (name, array) in enumerate(arrays.items()):
        write_tensor(folder / f"{stem}_{number}.pb", name, array)


def read_tensors(folder: Path, stem: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read `STEM_0.pb`, `STEM_1.pb` … under these names.

    Args:
        folder: The folder.
        stem: STEM.
        names: The expected names, in the order of the files.

    Raises:
        ValueError: If a file is no tensor, or a tensor of another name.
    """
    arrays = {}
    for number, name in enumerate(names):
        path = folder / f"{stem}_{number}.pb"
        found, arrays[name] = read_tensor(path)
        if found != name:
            raise ValueError(f"{path.name} holds {found!r}, expected {name!r}")
    return arrays


def read_outputs(folder: Path, count: int) -> dict[str, np.ndarray]:
    """Read `output_0.pb` … of a runtime, under the names that they carry.

    Args:
        folder: The folder of the files.
        count: The number of outputs.
    """
    return dict(read_tensor(folder / f"output_{number}.pb") for number in range(count))


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy dtype of this name, bfloat16 included."""
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)


def is_floating(dtype: np.dtype) -> bool:
    """Return whether a dtype is floating point, bfloat16 included."""
    return np.issubdtype(dtype, np.floating) or dtype.name == "bfloat16"


def lowest_number(dtype: np.dtype) -> float:
    """Return the lowest finite number of a floating point dtype."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).min)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield field numbers and values of a protobuf message.

    Raises:
        ValueError: If the bytes are no message.
    """
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        field, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield field, value
            continue
        if kind == BYTES:
            length, at = _read_varint(data, at)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise ValueError("no protobuf message")
        if at + length > len(data):
            raise ValueError("the message was cut off")
        yield field, data[at : at + length]
        at += length


def _packed(data: bytes) -> list[int]:
    numbers, at = [], 0
    while at < len(data):
        number, at = _read_varint(data, at)
        numbers.append(number)
    return numbers


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("the message was cut off")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(value)) + value
