"""A safetensors file, written tensor by tensor and read by offset.

The format: 8 bytes of header length, a JSON header, then the tensors
(https://github.com/huggingface/safetensors, "Format"). The package of that name takes all tensors
at once, each in the order of its shape; weights are often views that are transposed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir

TYPES = {
    "BOOL": "BOOL", "UINT8": "U8", "INT8": "I8", "UINT16": "U16", "INT16": "I16", "UINT32": "U32",
    "INT32": "I32", "UINT64": "U64", "INT64": "I64", "FLOAT16": "F16", "BFLOAT16": "BF16",
    "FLOAT": "F32", "DOUBLE": "F64", "FLOAT8E4M3FN": "F8_E4M3", "FLOAT8E5M2": "F8_E5M2",
}  # fmt: skip
"""Names of types in a header, by ONNX's."""

ALIGNMENT = 64
"""The first tensor begins at a multiple of so many bytes: that of a cache line."""

PART = 2**24
"""The number of bytes that are brought into order at once, while as many before are written."""

TILE = 16
"""The number of columns that are copied at once: as many float32 fill a line of the cache."""


def write_tensors(path: Path, tensors: Mapping[str, ir.TensorProtocol]) -> None:
    """Write tensors one after the other, those of wide elements first.

    Args:
        path: The file; it is replaced.
        tensors: By name. None is held in another form than it is given in.

    Raises:
        OSError: If the file cannot be written.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        kind, shape = TYPES[tensor.dtype.name], list(tensor.shape.numpy())
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file, ThreadPoolExecutor(1) as writer:
        written = writer.submit(file.write, struct.pack("<Q", len(text)) + text)
        for name in order:
            for part in _parts(tensors[name].numpy()):
                written.result()
                written = writer.submit(file.write, part.reshape(-1).view(np.uint8).data)
        written.result()


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the parts of an array in the order of its shape, each good until the next but one."""
    if array.flags.c_contiguous:
        yield array
        return
    step = max(PART // max(array[:1].nbytes, 1), 1)
    held = [np.empty((min(step, len(array)), *array.shape[1:]), array.dtype) for _ in range(2)]
    for start in range(0, len(array), step):
        held.reverse()
        rows = array[start : start + step]
        part = held[0][: len(rows)]
        for left in range(0, rows.shape[-1], TILE):
            columns = ..., slice(left, left + TILE)
            part[columns] = rows[columns]
        yield part


def tensor_places(path: Path) -> dict[str, tuple[int, int]]:
    """Return offset and length in bytes of every tensor of a safetensors file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    start = 8 + size
    return {
        name: (
            start + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
