"""Tensors of a model that lie in other files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of a model: initialisers and attributes, of all graphs and functions."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _of_graph(graph)


def external_problems(model: onnx.ModelProto, folder: Path) -> Iterator[str]:
    """Yield defects of external data: it must lie in the folder and be complete.

    Args:
        model: The model.
        folder: The folder of its file.
    """
    from onnx import TensorProto

    for tensor in tensors_of(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = PurePosixPath(entries.get("location", ""))
        if location.is_absolute() or ".." in location.parts or not location.parts:
            yield f"{tensor.name} lies at {str(location)!r}, outside the folder; move it inside"
            continue
        file = folder / location
        if not file.is_file():
            yield f"{tensor.name} lies in {location}, which is missing; ship it beside the model"
        elif not file.resolve().is_relative_to(folder.resolve()):
            yield f"{tensor.name} lies in {location}, a link out of the folder; copy it inside"
        elif problem := _misplaced(tensor, entries, file.stat().st_size):
            yield f"{tensor.name} {problem} {location}; the file was cut off or changed"


def _misplaced(tensor: onnx.TensorProto, entries: dict[str, str], size: int) -> str:
    """Return the defect of a tensor's location in a file of `size` bytes, or ""."""
    from onnx import TensorProto, helper

    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size - offset))
        width = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except ValueError:
        return "has a place that is no number in"
    except KeyError:
        return f"has the unknown type {tensor.data_type} in"
    # Several elements of these types share a byte.
    packed = TensorProto.DataType.Name(tensor.data_type).endswith(
        ("INT2", "INT4", "E2M1", "E2M3", "E3M2")
    )
    if not packed and length != width * math.prod(tensor.dims):
        return f"takes {length} bytes, not {width * math.prod(tensor.dims)}, in"
    return "" if 0 <= offset <= offset + length <= size else "ends beyond the end of"
