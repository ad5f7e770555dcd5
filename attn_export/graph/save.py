"""A graph on disk: weights within it, or once in `weights.safetensors`."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir

WEIGHTS = "weights.safetensors"

EXTERNAL_ABOVE = 64 * 2**20
"""Weights of more bytes than this lie in `weights.safetensors` (protobuf ends at 2 GiB)."""

INLINE_BELOW = 1024
"""Initialisers of fewer bytes stay in the graph: shapes have to be known to every tool."""


def save_graph(model: ir.Model, path: Path) -> list[str]:
    """Write a graph, and its weights beside it where they are large.

    Args:
        model: Its initialisers are left as they are.
        path: The `.onnx` file. The folder exists.

    Returns:
        The names of the files written.
    """
    weights = {
        name: value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes >= INLINE_BELOW
    }
    in_memory = {name: value.const_value for name, value in weights.items()}
    if sum(t.nbytes for t in in_memory.values() if t is not None) <= EXTERNAL_ABOVE:
        ir.save(model, path)
        return [path.name]
    import safetensors.numpy  # needed for large weights only

    # safetensors writes an array in the order in which it lies in memory.
    arrays = {
        name: np.ascontiguousarray(t.numpy()) for name, t in in_memory.items() if t is not None
    }
    safetensors.numpy.save_file(arrays, path.parent / WEIGHTS)
    places = tensor_places(path.parent / WEIGHTS)
    try:
        for name, value in weights.items():
            offset, length = places[name]
            value.const_value = ir.ExternalTensor(
                WEIGHTS, offset, length, value.dtype or ir.DataType.FLOAT,
                name=name, shape=value.shape or ir.Shape([]), base_dir=path.parent,
            )  # fmt: skip
        ir.save(model, path)
    finally:
        for name, value in weights.items():
            value.const_value = in_memory[name]
    return [path.name, WEIGHTS]


def replace_graph(model: ir.Model, output: Path, *, beside: bool) -> None:
    """Write a graph with its weights as one file, or two; nothing half-written after a failure.

    Args:
        model: Its weights may lie in files.
        output: The `.onnx` file.
        beside: Whether those files are beside `output`, and are pointed to.

    Raises:
        OSError: If the folder cannot be written.
    """
    data = None
    if not beside:
        model = ir.external_data.load_to_model(model)
        held = (value.const_value for value in model.graph.initializers.values())
        if sum(tensor.nbytes for tensor in held if tensor is not None) > EXTERNAL_ABOVE:
            data = f"{output.name}.data"
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        ir.save(model, folder / output.name, external_data=data)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == output.name):
            path.replace(output.parent / path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tensor_places(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and length in bytes of every tensor of a safetensors file.

    The format: 8 bytes of header length, a JSON header, then the tensors
    (https://github.com/huggingface/safetensors, "Format").
    """
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
