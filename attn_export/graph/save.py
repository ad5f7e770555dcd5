"""A graph on disk: weights within it, or once in `weights.safetensors`."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attn_export.dialect_names import WEIGHTS as WEIGHTS
from attn_export.graph.ir_helpers import same_bytes
from attn_export.output_folder import sha256
from attn_export.temp_folders import folder_beside

# -- A safetensors file, written tensor by tensor and read by offset ----------------------------

# The format: 8 bytes of header length, a JSON header, then the tensors
# (https://github.com/huggingface/safetensors, "Format"). The package of that name takes all tensors
# at once, each in the order of its shape; weights are often views that are transposed.


TYPES = {
    "BOOL": "BOOL", "UINT8": "U8", "INT8": "I8", "UINT16": "U16", "INT16": "I16", "UINT32": "U32",
    "INT32": "I32", "UINT64": "U64", "INT64": "I64", "FLOAT16": "F16", "BFLOAT16": "BF16",
    "FLOAT": "F32", "DOUBLE": "F64", "FLOAT8E4M3FN": "F8_E4M3", "FLOAT8E5M2": "F8_E5M2",
    "INT4": "U8", "UINT4": "U8",
}  # fmt: skip
"""Names of types in a header, by ONNX's."""

PACKED = frozenset({"INT4", "UINT4"})
"""Types of which a byte holds two."""

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
        if tensor.dtype.name in PACKED:  # the format has no such type: bytes, two numbers in each
            shape = [tensor.nbytes]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file, ThreadPoolExecutor(1) as writer:
        written = writer.submit(file.write, struct.pack("<Q", len(text)) + text)
        for name in order:
            for part in _parts(_stored(tensors[name])):
                written.result()
                written = writer.submit(file.write, part.reshape(-1).view(np.uint8).data)
        written.result()


def _stored(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the array whose bytes are those of a tensor in a file."""
    if tensor.dtype.name in PACKED:
        return np.frombuffer(tensor.tobytes(), np.uint8)
    return tensor.numpy()


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


# -- A graph on disk: weights within it, or once in `weights.safetensors` -----------------------


EXTERNAL_ABOVE = 64 * 2**20
"""Weights of more bytes than this lie in `weights.safetensors` (protobuf ends at 2 GiB)."""

INLINE_BELOW = 1024
"""Initialisers of fewer bytes stay in the graph: shapes have to be known to every tool."""

DIGITS = 16
"""Number of digits of the SHA-256 in the name of a file of weights."""


def save_graph(model: ir.Model, path: Path) -> list[str]:
    """Write one graph, and its weights beside it where they are large.

    Args:
        model: Its initialisers are left as they are.
        path: The `.onnx` file. The folder exists.

    Returns:
        The names of the files written.
    """
    return save_graphs({path.name: model}, path.parent)


def save_graphs(models: Mapping[str, ir.Model], folder: Path) -> list[str]:
    """Write graphs of the same weights; those lie once beside them, where they are large.

    Args:
        models: By the names of their files. Their initialisers are left as they are.
        folder: It exists.

    Returns:
        The names of the files written.
    """
    weights: dict[str, ir.TensorProtocol] = {}
    for model in models.values():
        for name, tensor in _weights(model).items():
            held = weights.setdefault(name, tensor)
            assert same_bytes(held, tensor), f"two weights {name}"
    if len(models) == 1 and sum(t.nbytes for t in weights.values()) <= EXTERNAL_ABOVE:
        weights = {}
    if weights:
        write_tensors(folder / WEIGHTS, weights)
    places = tensor_places(folder / WEIGHTS) if weights else {}
    for name, model in models.items():
        _save_pointing(model, folder / name, places)
    return [*models, *([WEIGHTS] if weights else [])]


def save_beside_weights(model: ir.Model, path: Path) -> None:
    """Write a graph to a bundle; its weights are those of the bundle's file, where it has them.

    Args:
        model: Its initialisers are left as they are.
        path: The `.onnx` file in the bundle's folder.
    """
    weights = path.with_name(WEIGHTS)
    _save_pointing(model, path, tensor_places(weights) if weights.is_file() else {})


def _weights(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Return the initialisers that are not small."""
    held = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {n: t for n, t in held.items() if t is not None and t.nbytes >= INLINE_BELOW}


def _save_pointing(model: ir.Model, path: Path, places: Mapping[str, tuple[int, int]]) -> None:
    """Write a graph whose weights are pointed to, where they have a place in the file beside."""
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
    """Write a graph with its weights as one file, or two; nothing half-written after a failure.

    Large weights go to ``OUTPUT.<digest>.data``: a graph that is replaced never points to the
    weights of another. Those of the graph that was there before are removed.

    Args:
        model: Its weights may lie in files.
        output: The `.onnx` file.
        beside: Whether those files are beside `output`, and are pointed to.
        kept: Files that are not removed.

    Raises:
        OSError: If the folder cannot be written.
    """
    data = None
    if not beside:
        model = ir.external_data.load_to_model(model)
        held = (value.const_value for value in model.graph.initializers.values())
        if sum(tensor.nbytes for tensor in held if tensor is not None) > EXTERNAL_ABOVE:
            data = "data"
    with folder_beside(output) as folder:
        ir.save(model, folder / output.name, external_data=data)
        if data is not None:
            data = _named_by_digest(folder / output.name, folder / data)
            (folder / data).replace(output.parent / data)
        (folder / output.name).replace(output)
    for path in _data_files(output):
        if path.name != data and not any(other.samefile(path) for other in kept):
            path.unlink()


def external_files(model: ir.Model) -> set[Path]:
    """Return the files into which a graph's initialisers point."""
    tensors = (
        value.const_value for graph in model.graphs() for value in graph.initializers.values()
    )
    return {Path(tensor.path) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}


def _named_by_digest(graph: Path, data: Path) -> str:
    """Rename a file of weights after its content, and return the name."""
    import onnx

    name = f"{graph.name}.{sha256(data)[:DIGITS]}.data"
    data.rename(data.with_name(name))
    proto = onnx.load(graph, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    onnx.save(proto, graph)
    return name


def _data_files(output: Path) -> list[Path]:
    """List the files beside a graph that have the name and the digest of its weights."""
    named = re.compile(re.escape(output.name) + rf"\.([0-9a-f]{{{DIGITS}}})\.data")
    found = ((path, named.fullmatch(path.name)) for path in output.parent.iterdir())
    return [
        path for path, match in found
        if match and path.is_file() and not path.is_symlink() and sha256(path).startswith(match[1])
    ]  # fmt: skip
