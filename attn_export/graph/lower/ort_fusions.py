"""Norms and activations as ONNX Runtime's own operators, which do the work of several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT
from attn_export.graph.axis_names import known_equal
from attn_export.graph.ir_helpers import constant_array, dims, nodes_of, producer_of, value_before
from attn_export.graph.lower.node_builder import Builder, take_over

_SKIPS = {
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}
"""The norm of a sum, which is an output, too, by the operator of the norm."""

_Dtypes: TypeAlias = Sequence[ir.DataType]
FLOAT = (ir.DataType.FLOAT,)


def fuse_for_ort(model: ir.Model) -> None:
    """Run all passes of this file."""
    fuse_sums_into_norms(model)
    fuse_silu(model)


def fuse_sums_into_norms(model: ir.Model, dtypes: _Dtypes = FLOAT) -> None:
    """Replace the norm of a sum of equal shapes by a node that returns both."""
    for op_type, fused in _SKIPS.items():
        for node in nodes_of(model, op_type):
            total = node.inputs[0]
            add = producer_of(total, "Add")
            if add is None or total is None or not _fits(add, node, dtypes):
                continue
            epsilon = node.attributes.get_float("epsilon", 1e-5)
            outputs = Builder(model, add).add_node(
                fused, [*add.inputs, *node.inputs[1:]], 4, MICROSOFT, epsilon=epsilon
            )
            outputs[1].name = outputs[2].name = ""
            take_over(node.outputs[0], outputs[0])
            take_over(total, outputs[3])
            model.graph.remove([node, add], safe=True)


def _fits(add: ir.Node, norm: ir.Node, dtypes: _Dtypes) -> bool:
    """Return whether one node may add two values `[…, E]` and normalise the sum."""
    total, weights = norm.inputs[0], [x for x in norm.inputs[1:] if x is not None]
    shapes = [dims(x) for x in add.inputs if x is not None]
    if total is None or total.dtype not in dtypes or len(dims(total)) not in (2, 3):
        return False
    same = all(
        len(shape) == len(dims(total)) and all(map(known_equal, shape, dims(total)))
        for shape in shapes
    )
    of_last_axis = norm.attributes.get_int("axis", -1) in (-1, len(dims(total)) - 1)
    vectors = all(constant_array(x) is not None and len(dims(x)) == 1 for x in weights)
    return same and of_last_axis and vectors and len(norm.outputs) == 1


def fuse_silu(model: ir.Model, dtypes: _Dtypes = FLOAT) -> None:
    """Replace x * Sigmoid(x) by QuickGelu with an alpha of 1, where a product reads it.

    Far below 0 its error is 5e-8. Among the products of a gated MLP it is below a rounding; what is
    read by itself stays exact.
    """
    for node in nodes_of(model, "Mul"):
        x = value_before(node.inputs[1], "Sigmoid")
        readers = {use.node.op_type for use in node.outputs[0].uses()}
        is_silu = x is not None and x is node.inputs[0] and x.dtype in dtypes
        if is_silu and readers and readers <= {"Mul", "MatMul"}:
            silu = Builder(model, node)("QuickGelu", x, domain=MICROSOFT, alpha=1.0)
            take_over(node.outputs[0], silu)
            model.graph.remove(node, safe=True)
