"""Golden vectors: the inputs of every case, and what the float64 reference gave.

Tensors are ONNX TensorProto messages, https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DIMS, DATA_TYPE, RAW_DATA = 1, 2, 9
DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 5: "int16", 6: "int32", 7: "int64", 9: "bool",
    10: "float16", 11: "float64",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One set of inputs, its truth, the error that is allowed, and rows that are not compared."""

    name: str
    inputs: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]
    allowed: Mapping[str, Mapping[str, float] | None]
    unusable: Mapping[str, str]
    ignored_rows: Sequence[int]


def cases(bundle: Path) -> Iterator[Case]:
    """Every case of a bundle.

    Raises:
        OSError, ValueError, KeyError: If a file is missing or is not what it should be.
    """
    folder = bundle / "golden"
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    for entry in index["cases"]:
        yield _case(folder / entry["folder"], index, entry)


def _case(folder: Path, index: Mapping[str, Any], entry: Mapping[str, Any]) -> Case:
    inputs, expected = (
        {name: read_tensor(folder / f"{kind}_{i}.pb") for i, name in enumerate(index[f"{kind}s"])}
        for kind in ("input", "output")
    )
    allowed = {name: _errors(entry["allowed"][name]) for name in expected}
    rows = [operator.index(row) for row in entry["ignored_rows"]]
    for name, truth in expected.items():
        # Of a negative number Python takes a row from the end.
        if truth.ndim and not all(0 <= row < len(truth) for row in rows):
            raise ValueError(f"{entry['name']} ignores rows that {name} does not have")
    return Case(entry["name"], inputs, expected, allowed, entry["unusable"], rows)


def _errors(allowed: Mapping[str, float] | None) -> dict[str, float] | None:
    if allowed is None:
        return None
    errors = {part: allowed[part] for part in ("whole", "row")}
    if any(error <= 0 for error in errors.values()):
        raise ValueError(f"errors of {errors} are allowed")
    return errors


def read_tensor(path: Path) -> np.ndarray:
    """Read a tensor file.

    Raises:
        ValueError: If it is no tensor with raw data.
    """
    dims: list[int] = []
    dtype = raw = None
    for field, value in _fields(path.read_bytes(), path):
        if field == DIMS:
            dims.append(value)
        elif field == DATA_TYPE:
            dtype = DTYPES.get(value)
        elif field == RAW_DATA:
            raw = value
    if dtype is None:
        raise ValueError(f"{path} is of a type that numpy does not have, or is no tensor")
    # A tensor without elements has no data.
    return np.frombuffer(raw or b"", np.dtype(dtype).newbyteorder("<")).reshape(dims)


def _fields(data: bytes, path: Path) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at, path)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at, path)
        elif kind == 2:
            size, at = _varint(data, at, path)
            if at + size > len(data):
                raise ValueError(f"{path} is cut off")
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"{path} is no tensor")
        yield key >> 3, value


def _varint(data: bytes, at: int, path: Path) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError(f"{path} is cut off")
