"""Checks that graphs are what the manifest says of them, where that decides what is tried.

Anybody can write a manifest. A runtime leaves a graph out by the features in it, and cases are left
out by the fixed axes. What a claim does not loosen is not compared: runs show it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from attn_export.bundle.manifest import MANIFEST
from attn_export.dialect_names import CUDA, QUANTISED, dialect_of
from attn_export.errors import BundleError, GraphError, one_line
from attn_export.results import Arrays, Golden
from attn_export.rule import largest_tolerance
from attn_export.runtimes.child import limited
from attn_export.runtimes.pool import Pool
from attn_export.runtimes.protocol import known_limit
from attn_export.schema import GraphEntry, Manifest, Tolerance
from attn_export.tensorfile import is_floating
from attn_export.tensorproto import fields
from attn_export.untrusted_files import read_bytes


def check_claims(folder: Path, manifest: Manifest, pool: Pool | None, *, plain_layer: bool) -> None:
    """Raise BundleError if a graph is not what the manifest or the spec says of it.

    `pool`: That of the runtimes whose reasons to leave graphs out are compared; None for none.
    `plain_layer`: Whether the bundle is of a layer whose spec quantises nothing.
    """
    try:
        wrong = next(_wrong(folder, manifest, pool, plain_layer=plain_layer), "")
    except GraphError as error:
        raise BundleError(f"{error}; build the bundle again") from error
    if wrong:
        raise BundleError(f"{folder / MANIFEST} is wrong: {wrong}; build the bundle again")


def within_limits(folder: Path, manifest: Manifest, goldens: Sequence[Golden]) -> list[Golden]:
    """Return golden vectors with a budget, which allows a float graph no more than its types do."""
    if any(QUANTISED & _read_outline(folder / name).operators for name in manifest.graphs):
        return list(goldens)
    return [dataclasses.replace(g, tolerance=dict(_limits(g.expected))) for g in goldens]


def _limits(reference: Arrays) -> Iterator[tuple[str, Tolerance | None]]:
    for name, array in reference.items():
        most = largest_tolerance(array.dtype) if is_floating(array.dtype) else None
        yield name, Tolerance(most.whole, most.row) if most else None


def _wrong(
    folder: Path, manifest: Manifest, pool: Pool | None, *, plain_layer: bool
) -> Iterator[str]:
    for name, entry in manifest.graphs.items():
        if entry.fixed or entry.layouts or plain_layer:
            outline = _read_outline(folder / name)
            yield from _wrong_sizes(manifest, entry, outline)
            operators = sorted(QUANTISED & outline.operators)
            if plain_layer and operators:
                yield f"{name} quantises ({operators[0]}), and the spec says that nothing does"
    if (
        plain_layer
        and len({manifest.inputs[n].dtype for n in _TOKENS & manifest.inputs.keys()}) > 1
    ):
        yield "a cache has another type than the tokens, and the spec says that it has not"
    for name, entry in manifest.graphs.items():
        if entry.exact:
            problem = limited(
                "attn_export.graph.accuracy_level:difference_of_files", str(folder),
                pool.run.limits if pool else None,
                path=str(folder / name), exact=str(folder / entry.exact),
            )  # fmt: skip
            if problem:
                yield f"of {name}, {problem}"
    if pool is not None:
        yield from _wrongly_left_out(folder, manifest, pool)


_TOKENS = {"query", "past_key", "past_value"}
"""The inputs of our own layers that have one type unless a cache is quantised."""


def _wrong_sizes(manifest: Manifest, entry: GraphEntry, outline: _Outline) -> Iterator[str]:
    """Yield axes that are not as fixed, or not in the order, that the manifest says."""
    found: dict[str, int | str] = {}
    for name, sizes in outline.inputs.items():
        stated = manifest.inputs[name].shape if name in manifest.inputs else ()
        axes = [stated[axis] for axis in entry.layouts.get(name, range(len(stated)))]
        for axis, size in zip(axes, sizes, strict=False):
            if isinstance(axis, int) and name in entry.layouts and size not in (axis, ""):
                yield f"{name} is {sizes} in {entry.name}, not {axes}"
            elif isinstance(axis, str):
                found[axis] = size
    for axis, size in entry.fixed.items():
        if found.get(axis) != size:
            yield f"{axis} is said to be {size} in {entry.name}, where it is {found.get(axis)}"


def _wrongly_left_out(folder: Path, manifest: Manifest, pool: Pool) -> Iterator[str]:
    """Yield why runtimes leave graphs out where the files give no reason to."""
    left_out = [
        (runtime, file) for runtime, file in pool.left_out() if file.name in manifest.graphs
    ]
    files = {file.name: file for _, file in left_out}
    files |= {name: file for name, file in manifest.graphs.items() if file.dialect == CUDA}
    if not files:
        return
    paths = [str(folder / name) for name in files]
    function = "attn_export.graph.requirements:features_of_files"
    lists = limited(function, str(folder), pool.run.limits, paths=paths)
    features = {name: tuple(each) for name, each in zip(files, lists, strict=True)}
    narrow = any(end.dtype == "bfloat16" for end in manifest.outputs.values())
    for name, file in files.items():
        if file.dialect == CUDA and not _is_for_cuda(features[name], in_bfloat16=narrow):
            yield f"{name} is said to be for CUDA, and it does not compute in half precision"
    for runtime, file in left_out:
        has = features[file.name]
        dialect = file.dialect if file.dialect == dialect_of(file.name) else _dialect(has)
        of_file = replace(file, features=has, dialect=dialect)
        if not known_limit(runtime, of_file):
            yield f"{file.name} gives no reason for this: {known_limit(runtime, file)}"


def _dialect(features: tuple[str, ...]) -> str:
    from attn_export.graph.requirements import dialect_of as of_features

    return of_features(features)


def _is_for_cuda(features: tuple[str, ...], *, in_bfloat16: bool) -> bool:
    if in_bfloat16:
        computing = (name for name in features if not name.startswith("Cast("))
        return any(name.endswith("(BFLOAT16)") for name in computing)
    return not {"input FLOAT16", "input BFLOAT16"}.isdisjoint(features)


# -- what a file of any size holds, read without its tensors ------------------------------------

_MOST_BYTES = 2**31 - 1
"""The largest size of a protobuf message."""

# The numbers of fields, see https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
_GRAPH, _FUNCTION = 7, 25
_NODE, _INPUT = 1, 11
_OP_TYPE, _ATTRIBUTE = 4, 5
_SUBGRAPH, _SUBGRAPHS = 6, 11
_FUNCTION_NODE, _DIM_VALUE, _DIM_NAME = 7, 1, 2


@dataclasses.dataclass(frozen=True)
class _Outline:
    """What a file says of itself.

    Attributes:
        inputs: The size or name of each axis of each input, by name.
        operators: The types of the nodes, also of those in subgraphs and functions.
    """

    inputs: dict[str, list[int | str]]
    operators: frozenset[str]


def _read_outline(path: Path) -> _Outline:
    """Read the outline of a graph."""
    try:
        return _outline(read_bytes(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise GraphError(f"{path} is not an ONNX model: {one_line(error)}") from error


def _outline(data: bytes) -> _Outline:
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
    return _Outline(inputs, frozenset(operators))


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
