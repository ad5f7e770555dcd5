"""Which dialects there are, and a graph in one of them."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.errors import GraphError, UsageError
from attn_export.graph.lower.opset18 import to_opset18
from attn_export.graph.lower.portable import lower_to_portable

STANDARD, PORTABLE = "standard", "portable"


def lower(model: ir.Model, dialect: str) -> ir.Model:
    """A copy of a graph in a dialect; the same weights, in memory or on disk.

    Args:
        model: With ai.onnx `Attention` nodes, whoever made it. It is left alone.
        dialect: One of `DIALECTS`.

    Raises:
        UsageError: If there is no such dialect.
        GraphError: If the dialect cannot say what the graph does; names the node.
    """
    form = DIALECTS.get(dialect)
    if form is None:
        raise UsageError(f"unknown dialect {dialect!r}; choose from {', '.join(DIALECTS)}")
    lowered = model.clone()
    if any(value.shape is None for value in _read_by_attention(lowered)):
        lowered = _with_shapes(lowered)
    form(lowered)
    common.RemoveUnusedNodesPass()(lowered)
    common.RemoveUnusedOpsetsPass()(lowered)
    return lowered


def _read_by_attention(model: ir.Model) -> list[ir.Value]:
    nodes = (node for node in model.graph if node.op_type == "Attention")
    return [value for node in nodes for value in node.inputs if value is not None]


def _with_shapes(model: ir.Model) -> ir.Model:
    """Shapes inferred by onnx; those that are declared stay, since it takes some unknowns for 0."""
    declared = {value.name: value.shape for value in model.graph.outputs}
    inferred = common.ShapeInferencePass()(model).model
    for value in inferred.graph.outputs:
        value.shape = declared[value.name]
    return inferred


def _standard(model: ir.Model) -> None:
    """ai.onnx only: what it is already, or not at all."""
    for node in model.graph:
        if node.domain not in ("", "ai.onnx"):
            raise GraphError(
                f"{node.name}: {node.op_type} of {node.domain} is not in the standard dialect; "
                "give the graph before it was lowered"
            )


def _portable(model: ir.Model) -> None:
    _standard(model)
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        lower_to_portable(model, node)
    to_opset18(model)


DIALECTS: dict[str, Callable[[ir.Model], None]] = {STANDARD: _standard, PORTABLE: _portable}
