"""List of all checks, and checks of types, unused nodes, metadata and external data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from attn_export.errors import one_line
from attn_export.graph import check_structure
from attn_export.graph.checked_graph import Check, CheckedGraph, CheckFinding, Expected
from attn_export.graph.load import external_problems, load_proto, subgraphs

SCALES = {"DequantizeLinear": 1, "QuantizeLinear": 1, "MatMulNBits": 2}
"""The index of the input that holds scales, by operator."""

HOST_PATH = re.compile(
    r"(?:^|[\s\"'`(\[<{=:,;])"
    r"(?P<path>/(?:[\w.+@~-]+/)+[\w.+@~-]+|[A-Za-z]:[\\/][\w\\/.+@~-]+|\\\\[\w.-]+\\\S+|file://\S+)"
)


def no_float64(graph: CheckedGraph) -> Iterator[str]:
    """Check that no input and no output is float64, which few runtimes support.

    Within the graph, float64 is allowed to a user's module (a table of angles, for example), but
    not to attn-export's own.
    """
    model = graph.proto.graph
    ours = graph.expected is not None and graph.expected.ours
    for value in (*model.input, *model.output, *(model.value_info if ours else ())):
        if value.type.tensor_type.elem_type == TensorProto.DOUBLE:
            yield f"{value.name} is float64; convert the module with .float() before the export"
    if ours:
        yield from _float64_inside(model)


def _float64_inside(graph: onnx.GraphProto) -> Iterator[str]:
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.DOUBLE:
            yield f"the initializer {tensor.name} is float64; make it float32 in the module"
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.DOUBLE:
                yield f"{_name(node)} casts to float64; compute in float32 instead"
            elif attribute.t.data_type == TensorProto.DOUBLE:
                yield f"{_name(node)} holds float64; make it float32 in the module"


def quantisation_scales(graph: CheckedGraph) -> Iterator[str]:
    """Check that the constant scales of quantised values are finite, and not 0 before a division.

    Ours are positive. Other quantisers also write negative ones, and 0 for a block of zeros.
    """
    initializers = {tensor.name: tensor for tensor in graph.proto.graph.initializer}
    nodes = graph.proto.graph.node
    computed = {node.output[1] for node in nodes if node.op_type == "DynamicQuantizeLinear"}
    for node in nodes:
        scales = initializers.get(_scales(node, computed))
        if scales is None or scales.data_location == TensorProto.EXTERNAL:
            continue
        values = onnx.numpy_helper.to_array(scales).astype("float64")
        positive = graph.expected is not None
        for problem, wrong in (
            ("not finite", ~np.isfinite(values)),
            ("not positive", positive & (values <= 0)),
            ("0", (node.op_type == "QuantizeLinear") & (values == 0)),
        ):
            if wrong.any():
                yield (
                    f"{_name(node)}: {int(wrong.sum())} of {values.size} scales in {scales.name} "
                    f"are {problem}; quantise the weight again"
                )
                break


def _scales(node: onnx.NodeProto, computed: Set[str]) -> str:
    """Return the name of the scales that a node reads, or "".

    Scales that DynamicQuantizeLinear computes are multiplied with the constant one of the weight.
    """
    if node.op_type == "Mul" and not computed.isdisjoint(node.input):
        return next((name for name in node.input if name not in computed), "")
    return node.input[SCALES[node.op_type]] if node.op_type in SCALES else ""


def no_dead_nodes(graph: CheckedGraph) -> Iterator[str]:
    """Check that every node and every initialiser is used."""
    model = graph.proto.graph
    read = {name for node in model.node for name in _reads(node)} | {o.name for o in model.output}
    for node in model.node:
        if not read.intersection(filter(None, node.output)):
            yield f"the outputs of {_name(node)} are not used; remove it"
    for tensor in model.initializer:
        if tensor.name not in read:
            yield f"the initializer {tensor.name} is not used; remove it"


def no_duplicate_initializers(graph: CheckedGraph) -> Iterator[str]:
    """Check that no two initialisers have the same type, shape and values.

    Tensors in external data are compared by their place in the file.
    """
    seen: dict[tuple[object, ...], str] = {}
    for tensor in graph.proto.graph.initializer:
        key = (tensor.data_type, tuple(tensor.dims), _digest(tensor))
        if key in seen:
            yield f"{tensor.name} and {seen[key]} hold the same values; keep one of them"
        seen.setdefault(key, tensor.name)


def no_host_paths(graph: CheckedGraph) -> Iterator[str]:
    """Check that metadata and doc strings hold no path of the exporting machine."""
    for location, text in _texts(graph.proto):
        match = HOST_PATH.search(text)
        if match:
            yield f"{location} holds the path {match['path']!r}; strip metadata and doc strings"


def external_data(graph: CheckedGraph) -> Iterator[str]:
    """Check that external data lies inside the model's folder and is complete."""
    yield from external_problems(graph.proto, graph.path.parent)


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node and its subgraphs read."""
    yield from node.input
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from _reads(inner)
        yield from (output.name for output in graph.output)


def _digest(tensor: TensorProto) -> object:
    if tensor.data_location == TensorProto.EXTERNAL:
        return tuple(sorted((entry.key, entry.value) for entry in tensor.external_data))
    raw = tensor.HasField("raw_data")
    data = tensor.raw_data if raw else onnx.numpy_helper.to_array(tensor).tobytes()
    return hashlib.sha256(data).digest()


def _texts(model: onnx.ModelProto) -> Iterator[tuple[str, str]]:
    """Yield doc strings and metadata of a model and its parts, with their location."""
    graph = model.graph
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    parts: list[tuple[str, Any]] = [("the model", model), ("the graph", graph)]
    parts += [(_name(node), node) for node in graph.node]
    parts += [(value.name, value) for value in values]
    for location, part in parts:
        yield f"the doc string of {location}", part.doc_string
        for entry in part.metadata_props:
            yield f"{entry.key} of {location}", entry.value


def _name(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else f"an unnamed {node.op_type}"


# -- all checks, in order -----------------------------------------------------------------------

CHECKS: tuple[Check, ...] = (
    check_structure.onnx_checker,
    check_structure.value_sizes,
    check_structure.strict_shape_inference,
    check_structure.declared_shapes,
    check_structure.empty_axes,
    check_structure.signature,
    check_structure.dynamic_axes,
    check_structure.named_axes,
    check_structure.attention_count,
    check_structure.expected_operators,
    check_structure.opset_version,
    check_structure.ir_version,
    no_float64,
    quantisation_scales,
    no_dead_nodes,
    no_duplicate_initializers,
    no_host_paths,
    external_data,
)

PROJECT_RULES = frozenset({
    "empty_axes", "ir_version", "named_axes", "no_dead_nodes", "no_duplicate_initializers",
    "no_float64", "no_host_paths",
})  # fmt: skip
"""Checks of rules of this project, which the ONNX standard does not have."""


def check_graph(path: Path, expected: Expected | None = None) -> list[CheckFinding]:
    """Return the findings of every check on an ONNX file."""
    graph = CheckedGraph(load_proto(path), path, expected)
    return [finding for check in CHECKS for finding in _findings(check, graph)]


def _findings(check: Check, graph: CheckedGraph) -> list[CheckFinding]:
    try:
        warns = graph.expected is None and check.__name__ in PROJECT_RULES
        return [CheckFinding(check.__name__, message, warns) for message in check(graph)]
    except Exception as error:  # damaged files may raise anything, by names that are not UTF-8
        message = f"could not look at the graph ({one_line(error)}); it is damaged, export it again"
        return [CheckFinding(check.__name__, message)]
