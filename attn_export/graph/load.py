"""Readers of ONNX files, which raise GraphError with one line of text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from attn_export.errors import AttnExportError, GraphError, UsageError, one_line, printable
from attn_export.untrusted_files import read_bytes

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnx_ir as ir


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the subgraphs of a node: branches of an `If`, the body of a `Loop`."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def names_read(node: onnx.NodeProto) -> set[str]:
    """Return the names of the values that a node and its subgraphs read from outside of it."""
    names = set(node.input)
    for body in subgraphs(node):
        inner = {name for each in body.node for name in names_read(each)}
        own = {x.name for x in (*body.input, *body.initializer)}
        own |= {name for each in body.node for name in each.output}
        names |= (inner | {output.name for output in body.output}) - own
    return names


# -- tensors of a model that lie in other files -------------------------------------------------


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the initialisers and tensor attributes of a model, its subgraphs and functions."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for sparse in attribute.sparse_tensors:
                yield from (sparse.values, sparse.indices)
            if attribute.HasField("sparse_tensor"):
                yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)
        for graph in subgraphs(node):
            yield from _graph_tensors(graph)


def weight_files(model: onnx.ModelProto, folder: Path) -> set[Path]:
    """Return the files of external data that a model in a folder names; they may be missing."""
    entries = (entry for tensor in tensors_of(model) for entry in tensor.external_data)
    return {folder / entry.value for entry in entries if entry.key == "location"}


def external_problems(model: onnx.ModelProto, folder: Path) -> Iterator[str]:
    """Yield defects of external data, which must lie in the folder of the model and be complete."""
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
        elif problem := _location_problem(tensor, entries, file.stat().st_size):
            yield f"{tensor.name} {problem} {location}; the file was cut off or changed"


def _location_problem(tensor: onnx.TensorProto, entries: dict[str, str], size: int) -> str:
    """Return the defect of a tensor's location in a file of `size` bytes; "" if it has none."""
    from onnx import TensorProto, helper

    if min(tensor.dims, default=0) < 0:
        return f"has the size {min(tensor.dims)} in"
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size - offset))
        width = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except ValueError:
        return "has a place that is not a number in"
    except KeyError:
        return f"has the unknown type {tensor.data_type} in"
    # Several elements of these types share a byte.
    is_packed = TensorProto.DataType.Name(tensor.data_type).endswith(
        ("INT2", "INT4", "E2M1", "E2M3", "E3M2")
    )
    if not is_packed and length != width * math.prod(tensor.dims):
        return f"takes {length} bytes, not {width * math.prod(tensor.dims)}, in"
    return "" if 0 <= offset <= offset + length <= size else "ends beyond the end of"


# -- ONNX files ---------------------------------------------------------------------------------

_MOST_BYTES = 2**31 - 1
"""The largest size of a protobuf message."""

MOST_NODES = 10_000_000
"""The largest number of nodes after all calls of functions are inlined."""


_MOST_INLINED = 2**17
"""The largest number of nodes of a graph with functions that is evaluated node by node."""


def load_proto(path: Path) -> onnx.ModelProto:
    """Read an ONNX file without its external data."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model_from_string(read_bytes(path, _MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"cannot read {path}: no such file") from error
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a folder; give an ONNX file in it") from error
    except OSError as error:
        raise GraphError(f"cannot read {path}: {error.strerror}") from error
    except (DecodeError, ValueError) as error:
        raise GraphError(
            f"{path} is not an ONNX model, or only the beginning of one: {error}"
        ) from error
    if not model.ir_version or not model.graph.output:
        raise GraphError(f"{path} is not an ONNX model: it has no graph with outputs")
    for opset in model.opset_import:
        if not 0 <= opset.version < 2**31:
            raise GraphError(f"{path} is of the opset {opset.version}, which is none")
    if _node_count(model, path) > MOST_NODES:
        raise GraphError(
            f"{path} calls functions in functions: it has more than {MOST_NODES} nodes without "
            "them; inline fewer"
        )
    return model


def load_model(path: Path) -> onnx.ModelProto:
    """Read an ONNX file with its external data."""
    model = load_proto(path)
    refuse_bad_data(model, path)
    for tensor in tensors_of(model):
        embed(tensor, path.parent)
    return model


def mapped_data(tensor: onnx.TensorProto, folder: Path, dtype: np.dtype) -> np.ndarray:
    """Return the external data of a tensor, in its file; `refuse_bad_data` has checked it."""
    import numpy as np

    entries = {entry.key: entry.value for entry in tensor.external_data}
    return np.memmap(
        folder / entries["location"], dtype, "r", int(entries.get("offset", 0)), tuple(tensor.dims)
    )


def embed(tensor: onnx.TensorProto, folder: Path) -> None:
    """Put into a tensor its external data, in a folder, which `refuse_bad_data` has checked."""
    from onnx import TensorProto

    if tensor.data_location != TensorProto.EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    start, length = int(entries.get("offset", 0)), entries.get("length")
    tensor.raw_data = read_bytes(
        folder / entries["location"], start=start, length=None if length is None else int(length)
    )
    tensor.ClearField("data_location")
    del tensor.external_data[:]


def load_graph(path: Path) -> ir.Model:
    """Read an ONNX file as an `onnx_ir` model, with functions inlined.

    External data is read when it is used.
    """
    proto = load_proto(path)
    refuse_bad_data(proto, path)
    _refuse_dangling(proto, path)
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass

    with sound(path):
        model = ir.load(path)
        return InlinePass()(model).model if model.functions else model


@contextlib.contextmanager
def sound(path: Path | str) -> Iterator[None]:
    """Turn what libraries raise in this block, of a graph of unknown origin, into a GraphError."""
    try:
        yield
    except (AttnExportError, MemoryError, OSError):
        raise
    except Exception as error:
        raise GraphError(f"{path} is not a sound ONNX model: {one_line(error)}") from error


def inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a sound model with the nodes of its functions in place of their calls.

    Their names begin with those of the calls.
    """
    _refuse_dangling(proto, "the graph")
    if not proto.functions:
        return proto
    if _node_count(proto, "the graph") > _MOST_INLINED:
        raise GraphError(f"the graph has more than {_MOST_INLINED} nodes without its functions")
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass

    model = ir.from_proto(proto)
    own = set(model.graph)
    calls = {v.name: node.name for node in own for v in node.outputs if node.name}
    model, call = InlinePass()(model).model, None
    for node in reversed(model.graph):
        if node not in own:
            call = next((calls[v.name] for v in node.outputs if v.name in calls), call)
            node.name = f"{call}/{node.name}" if call else node.name
    return ir.to_proto(model)


def refuse_bad_data(proto: onnx.ModelProto, path: Path) -> None:
    """Check that each tensor has its data, and that external data lies in the model's folder."""
    problems = (*external_problems(proto, path.parent), *_embedded_problems(proto))
    if problems:
        raise GraphError(f"{path}: {problems[0]}")


def _embedded_problems(model: onnx.ModelProto) -> Iterator[str]:
    """Yield tensors whose data in the file do not fit their dimensions."""
    from onnx import TensorProto, numpy_helper

    for tensor in tensors_of(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            continue
        problem = f"has the size {min(tensor.dims)}" if min(tensor.dims, default=0) < 0 else ""
        try:
            numpy_helper.to_array(tensor)
        except Exception as error:  # what it raises depends on the type
            problem = f"cannot be read: {one_line(error)}"
        if problem:
            yield f"{printable(tensor.name or 'a constant', 80)} {problem}; export it again"


def _refuse_dangling(proto: onnx.ModelProto, path: Path | str) -> None:
    problem = next(_dangling(proto.graph, set()), "")
    if not all(end.name for end in (*proto.graph.input, *proto.graph.output)):
        problem = "an input or output has no name"
    if problem:
        raise GraphError(f"{path} is not a sound ONNX model: {problem}; export it again")


def _dangling(graph: onnx.GraphProto, outer: Set[str]) -> Iterator[str]:
    """Yield nodes and outputs that read an undefined value, or define a name again."""
    defined = {"", *outer, *(i.name for i in graph.input), *(t.name for t in graph.initializer)}
    defined |= {t.values.name for t in graph.sparse_initializer}
    for node in graph.node:
        for name in node.input:
            if name not in defined:
                yield f"{_label(node)} reads {printable(name, 80)}, which nothing before it gives"
        for inner in subgraphs(node):
            yield from _dangling(inner, defined)
        for name in node.output:
            if name and name in defined:
                yield f"{_label(node)} gives {printable(name, 80)}, which is there already"
            defined.add(name)
    for output in graph.output:
        if output.name not in defined:
            yield f"the output {printable(output.name, 80)} is given by nothing"


def _label(node: onnx.NodeProto) -> str:
    return f"the node {printable(node.name or node.op_type, 80)}"


def _node_count(model: onnx.ModelProto, path: Path | str) -> int:
    """Count the nodes as if all functions were inlined; stop at more than `MOST_NODES`."""
    functions = {(f.domain, f.name): f.node for f in model.functions}
    counts: dict[tuple[str, str], int] = {}
    call_stack: list[tuple[str, str]] = []

    def count(nodes: Sequence[onnx.NodeProto]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            total += 1 + sum(count(graph.node) for graph in subgraphs(node))
            total += of_function(key) if key in functions else 0
        return min(total, MOST_NODES + 1)

    def of_function(key: tuple[str, str]) -> int:
        if key in call_stack or len(call_stack) > len(functions):
            raise GraphError(f"{path}: the function {printable(key[1], 80)} calls itself")
        if key not in counts:
            call_stack.append(key)
            counts[key] = count(functions[key])
            call_stack.pop()
        return counts[key]

    try:
        return count(model.graph.node)
    except RecursionError as error:
        raise GraphError(f"{path} calls functions in functions too deep; inline some") from error
