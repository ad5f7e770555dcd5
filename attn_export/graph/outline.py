"""The sizes of inputs and the operators of an ONNX file, read without onnx.

`verify` compares them with what a manifest says of the file, while the runtimes start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from attn_export.errors import GraphError, one_line
from attn_export.tensorproto import fields
from attn_export.untrusted_files import read_bytes

_MOST_BYTES = 2**31 - 1
"""The largest size of a protobuf message."""

# The numbers of fields, see https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
_GRAPH, _FUNCTION = 7, 25
_NODE, _INPUT = 1, 11
_OP_TYPE, _ATTRIBUTE = 4, 5
_SUBGRAPH, _SUBGRAPHS = 6, 11
_FUNCTION_NODE, _DIM_VALUE, _DIM_NAME = 7, 1, 2


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a file says of itself.

    Attributes:
        inputs: The size or name of each axis of each input, by name.
        operators: The types of the nodes, also of those in subgraphs and functions.
    """

    inputs: dict[str, list[int | str]]
    operators: frozenset[str]


def read_outline(path: Path) -> Outline:
    """Read the outline of a graph."""
    try:
        return _outline(read_bytes(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise GraphError(f"{path} is not an ONNX model: {one_line(error)}") from error


def _outline(data: bytes) -> Outline:
    inputs, nodes = dict[str, list[int | str]](), list[bytes]()
    for graph in _messages(data, _GRAPH):
        for value in _messages(graph, _INPUT):
            name = next(_messages(value, 1), b"").decode()
            inputs[name] = [*map(_size, _within(value, 2, 1, 2, 1))]
        nodes += _nodes_of(graph)
    for function in _messages(data, _FUNCTION):
        nodes += [
            each for node in _messages(function, _FUNCTION_NODE) for each in _with_inner(node)
        ]
    operators = (name.decode() for node in nodes for name in _messages(node, _OP_TYPE))
    return Outline(inputs, frozenset(operators))


def _nodes_of(graph: bytes) -> Iterator[bytes]:
    for node in _messages(graph, _NODE):
        yield from _with_inner(node)


def _with_inner(node: bytes) -> Iterator[bytes]:
    """Yield a node and those in its subgraphs."""
    yield node
    for attribute in _messages(node, _ATTRIBUTE):
        for field in (_SUBGRAPH, _SUBGRAPHS):
            for graph in _messages(attribute, field):
                yield from _nodes_of(graph)


def _size(dim: bytes) -> int | str:
    sizes = [value for field, value in fields(dim) if field in (_DIM_VALUE, _DIM_NAME)]
    size = sizes[-1] if sizes else b""
    return size.decode() if isinstance(size, bytes) else size


def _within(data: bytes, *path: int) -> Iterator[bytes]:
    """Yield the messages that lie within others, along the numbers of their fields."""
    if not path:
        yield data
        return
    for message in _messages(data, path[0]):
        yield from _within(message, *path[1:])


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    return (value for field, value in fields(data) if field == number and isinstance(value, bytes))
