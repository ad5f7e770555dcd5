"""Writers of graphs, with weights in the file or in a shared `weights.safetensors`."""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attn_export.dialect_names import WEIGHTS as WEIGHTS
from attn_export.errors import GraphError, OutputError, UsageError
from attn_export.graph.ir_helpers import same_bytes
from attn_export.graph.load import load_proto, tensors_of, weight_files
from attn_export.output_folder import sha256
from attn_export.temp_folders import folder_beside
from attn_export.untrusted_files import safetensors_entries

# -- safetensors files --------------------------------------------------------------------------

# The package safetensors takes all tensors at once, and copies those that are not contiguous;
# weights are often transposed views.


_TYPES = {
    "BOOL": "BOOL", "UINT8": "U8", "INT8": "I8", "UINT16": "U16", "INT16": "I16", "UINT32": "U32",
    "INT32": "I32", "UINT64": "U64", "INT64": "I64", "FLOAT16": "F16", "BFLOAT16": "BF16",
    "FLOAT": "F32", "DOUBLE": "F64", "FLOAT8E4M3FN": "F8_E4M3", "FLOAT8E5M2": "F8_E5M2",
    "INT4": "U8", "UINT4": "U8",
}  # fmt: skip
"""Names of types in the header, by their names in ONNX."""

_PACKED = frozenset({"INT4", "UINT4"})
"""Types with two elements in a byte."""

_ALIGNMENT = 64
"""Alignment of the first tensor in bytes: the size of a cache line."""

PART = 2**24
"""The number of bytes that are transposed at once, while the part before is written."""

_TILE = 16
"""The number of columns that are copied at once: 16 float32 fill a cache line."""


def write_tensors(path: Path, tensors: Mapping[str, ir.TensorProtocol]) -> None:
    """Write a safetensors file, tensors with wide elements first."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        dtype, shape = _TYPES[tensor.dtype.name], list(tensor.shape.numpy())
        if tensor.dtype.name in _PACKED:  # the format has no such type: bytes, two numbers in each
            shape = [tensor.nbytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file, ThreadPoolExecutor(1) as writer:
        written = writer.submit(file.write, struct.pack("<Q", len(text)) + text)
        for name in order:
            for part in _parts(_file_bytes(tensors[name])):
                written.result()
                written = writer.submit(file.write, part.reshape(-1).view(np.uint8).data)
        written.result()


def _file_bytes(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return an array with the bytes of a tensor, in the order of its shape."""
    if tensor.dtype.name in _PACKED:
        return np.frombuffer(tensor.tobytes(), np.uint8)
    return tensor.numpy()


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield contiguous parts of an array; each is overwritten when the next but one is made."""
    if array.flags.c_contiguous:
        yield array
        return
    step = max(PART // max(array[:1].nbytes, 1), 1)
    buffers = [np.empty((min(step, len(array)), *array.shape[1:]), array.dtype) for _ in range(2)]
    for start in range(0, len(array), step):
        buffers.reverse()
        rows = array[start : start + step]
        part = buffers[0][: len(rows)]
        for column in range(0, rows.shape[-1], _TILE):
            columns = ..., slice(column, column + _TILE)
            part[columns] = rows[columns]
        yield part


def tensor_places(path: Path) -> dict[str, tuple[int, int]]:
    """Return offset and length in bytes of every tensor of a safetensors file."""
    first, entries = safetensors_entries(path)
    offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
    return {name: (first + start, end - start) for name, (start, end) in offsets.items()}


# -- graphs -------------------------------------------------------------------------------------


EXTERNAL_ABOVE = 64 * 2**20
"""Weights of more bytes than this go to `weights.safetensors` (protobuf ends at 2 GiB)."""

_INLINE_BELOW = 1024
"""Initialisers of fewer bytes stay in the graph: every tool must be able to read shapes."""

DIGITS = 16
"""Number of digits of the SHA-256 in the name of a file of weights."""


def save_graph(model: ir.Model, path: Path) -> list[str]:
    """Write one graph, and its weights beside it if they are large.

    Returns:
        The names of the files written.
    """
    return save_graphs({path.name: model}, path.parent)


def save_graphs(models: Mapping[str, ir.Model], folder: Path) -> list[str]:
    """Write graphs that share weights. The weights of several graphs, or large ones, get a file.

    Returns:
        The names of the files written.
    """
    weights: dict[str, ir.TensorProtocol] = {}
    for model in models.values():
        for name, tensor in _weights(model).items():
            first = weights.setdefault(name, tensor)
            # What is computed when it is written would be computed twice more; runs judge it.
            is_lazy = isinstance(tensor, ir.LazyTensor)
            assert is_lazy or same_bytes(first, tensor), f"two weights {name}"
    if len(models) == 1 and sum(t.nbytes for t in weights.values()) <= EXTERNAL_ABOVE:
        weights = {}
    if weights:
        write_tensors(folder / WEIGHTS, weights)
    places = tensor_places(folder / WEIGHTS) if weights else {}
    for name, model in models.items():
        _save_with_offsets(model, folder / name, places)
    return [*models, *([WEIGHTS] if weights else [])]


def _weights(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Return the initialisers that may lie in a separate file."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {n: t for n, t in tensors.items() if t is not None and t.nbytes >= _INLINE_BELOW}


def _save_with_offsets(model: ir.Model, path: Path, places: Mapping[str, tuple[int, int]]) -> None:
    """Write a graph, with pointers to the weights that have a place in the weight file."""
    external = {name: t for name, t in _weights(model).items() if name in places}
    try:
        for name, tensor in external.items():
            value = model.graph.initializers[name]
            value.const_value = ir.ExternalTensor(
                WEIGHTS, *places[name], tensor.dtype,
                name=name, shape=value.shape or ir.Shape([]), base_dir=path.parent,
            )  # fmt: skip
        ir.save(model, path)
    finally:
        for name, tensor in external.items():
            model.graph.initializers[name].const_value = tensor


def replace_graph(
    model: ir.Model, output: Path, *, beside: bool, kept: Collection[Path] = ()
) -> None:
    """Write a graph with its weights, atomically.

    Large weights go to ``OUTPUT.<digest>.data``, so that no graph ever points to the weights of
    another. The weights of a replaced graph are removed.
    """
    data = None
    if not beside:
        model = ir.external_data.load_to_model(model)
        tensors = (value.const_value for value in model.graph.initializers.values())
        if sum(tensor.nbytes for tensor in tensors if tensor is not None) > EXTERNAL_ABOVE:
            data = "data"
    with folder_beside(output) as folder:
        ir.save(model, folder / output.name, external_data=data)
        if data is not None:
            data = name_by_digest(folder / output.name, folder / data)
        put_in_place(folder / output.name, data, output, kept)


def put_in_place(graph: Path, data: str | None, output: Path, kept: Collection[Path] = ()) -> None:
    """Let a graph replace another one in one step, after its weights lie beside it.

    The weights of the replaced graph are removed, unless another graph there names them.

    `data`: The file of `name_by_digest` beside the graph, if its weights have one.
    """
    if data is not None:
        graph.with_name(data).replace(output.parent / data)
    graph.replace(output)
    for path in _data_files(output):
        is_kept = path.name == data or any(other.samefile(path) for other in kept)
        if not is_kept and not _is_named_beside(path, output):
            path.unlink()


def check_replaceable(output: Path, source: Path, option: str = "--output") -> None:
    """Refuse to replace the graph that is read, its weights, or a file that is no graph."""
    if not os.path.lexists(output):
        return
    if output.exists() and output.samefile(source):
        raise UsageError(f"{output} is the file to read; choose another {option}")
    weights = (path for path in weight_files(load_proto(source), source.parent) if path.exists())
    if output.exists() and any(map(output.samefile, weights)):
        raise UsageError(f"{output} holds weights of {source}; choose another {option}")
    if not _is_graph_or_empty(output):
        raise OutputError(f"{output} exists and is not an ONNX model; choose another {option}")


def _is_graph_or_empty(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        return path.stat().st_size == 0 or bool(load_proto(path))
    except GraphError:
        return False


def external_files(model: ir.Model) -> set[Path]:
    """Return the files of external data of a graph's initialisers."""
    tensors = (
        value.const_value for graph in model.graphs() for value in graph.initializers.values()
    )
    return {Path(tensor.path) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}


def name_by_digest(graph: Path, data: Path) -> str:
    """Rename a file of weights by its digest, update the graph, and return the name."""
    import onnx

    name = f"{graph.name}.{sha256(data)[:DIGITS]}.data"
    data.rename(data.with_name(name))
    proto = onnx.load(graph, load_external_data=False)
    for tensor in tensors_of(proto):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    onnx.save(proto, graph)
    return name


def _data_files(output: Path) -> list[Path]:
    """Return the files beside a graph whose name is that of weights with their own digest."""
    pattern = re.compile(re.escape(output.name) + rf"\.([0-9a-f]{{{DIGITS}}})\.data")
    candidates = ((path, pattern.fullmatch(path.name)) for path in output.parent.iterdir())
    return [
        path for path, match in candidates
        if match and path.is_file() and not path.is_symlink() and sha256(path).startswith(match[1])
    ]  # fmt: skip


def _is_named_beside(data: Path, output: Path) -> bool:
    """Return whether another graph in the folder names a file of weights."""
    name = data.name.encode()
    for path in output.parent.glob("*.onnx"):
        if path.name != output.name and path.is_file() and path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
                if m.find(name) >= 0:
                    return True
    return False
