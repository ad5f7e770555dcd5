"""Graphs whose products round their inputs to 8 bits, beside the same graphs without rounding.

`accuracy_level` of MatMulNBits says what a kernel may multiply: floats, or integers, which is
faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from msgspec import structs

from attn_export.dialect_names import EXACT_PHASE, MICROSOFT, dialect_of, graph_name, phase_of
from attn_export.errors import printable
from attn_export.graph import IrGraph
from attn_export.graph.ir_helpers import every_node
from attn_export.graph.load import load_proto, subgraphs
from attn_export.graph.requirements import features
from attn_export.quantiser import FLOAT32_PRODUCTS, INTEGER_PRODUCTS

_LEVEL = "accuracy_level"


def with_rounded_inputs(graph: IrGraph) -> list[IrGraph]:
    """Return a copy of a graph whose kernels may round inputs, and the graph under another name.

    One that has no products with integers is returned alone.
    """
    if not any(_is_packed(node) for node in every_node(graph.model.graph)):
        return [graph]
    phases = filter(None, (phase_of(graph.file.name), EXACT_PHASE))
    exact = graph_name(dialect_of(graph.file.name), "-".join(phases))
    rounding = graph.model.clone()
    for node in filter(_is_packed, every_node(rounding.graph)):
        node.attributes[_LEVEL] = ir.AttrInt64(_LEVEL, INTEGER_PRODUCTS)
    file = structs.replace(graph.file, exact=exact, features=features(rounding))
    return [
        dataclasses.replace(graph, model=rounding, file=file),
        dataclasses.replace(graph, file=structs.replace(graph.file, name=exact)),
    ]


def _is_packed(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (MICROSOFT, "MatMulNBits")


def rounding_levels(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """Yield the attributes that allow a kernel to round inputs of its products."""
    for node in nodes_in(model):
        yield from (a for a in node.attribute if a.name == _LEVEL and a.i > FLOAT32_PRODUCTS)


def forbid_rounding(model: onnx.ModelProto) -> int:
    """Set the levels of products at which kernels round no inputs; return how many are changed."""
    levels = list(rounding_levels(model))
    for level in levels:
        level.i = FLOAT32_PRODUCTS
    return len(levels)


def difference_of_files(path: str, exact: str) -> str:
    """Return `other_difference` of two files."""
    return other_difference(load_proto(Path(path)), Path(exact))


def other_difference(model: onnx.ModelProto, exact: Path) -> str:
    """Return how a graph that rounds inputs differs from another beside its levels; "" if not."""
    rounding, other = onnx.ModelProto(), load_proto(exact)
    rounding.CopyFrom(model)
    if next(rounding_levels(other), None) is not None:
        return f"{printable(exact.name, 80)} rounds inputs of products, too"
    if not forbid_rounding(rounding):
        return "it rounds no inputs of products"
    if _bytes(rounding) != _bytes(other):
        return f"it differs from {printable(exact.name, 80)} by more than accuracy_level"
    return ""


def _bytes(model: onnx.ModelProto) -> bytes:
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and its subgraphs."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from graphs_in(inner)


def nodes_in(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a model, also those of subgraphs and functions."""
    for graph in graphs_in(model.graph):
        yield from graph.node
    for function in model.functions:
        yield from function.node
