"""`Gelu` of opset 20 and `Swish` of opset 24 in operators of opset 18."""

from __future__ import annotations

import math

import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.lower.node_builder import Builder, take_over


def lower_gelu(model: ir.Model, node: ir.Node) -> None:
    """Replace `Gelu` by x · (1 + erf(x / √2)) / 2, or with tanh (Hendrycks and Gimpel 2016)."""
    op, x, kind = _start(model, node)
    if node.attributes.get_string("approximate", "none") == "tanh":
        cube = op("Mul", op("Mul", x, x), x)
        inner = op("Add", x, op("Mul", cube, op.number(0.044715, kind)))
        curve = op("Tanh", op("Mul", inner, op.number(math.sqrt(2 / math.pi), kind)))
    else:
        curve = op("Erf", op("Mul", x, op.number(math.sqrt(0.5), kind)))
    scaled = op("Mul", x, op("Add", curve, op.number(1.0, kind)))
    take_over(node.outputs[0], op("Mul", scaled, op.number(0.5, kind)))
    model.graph.remove(node, safe=True)


def lower_swish(model: ir.Model, node: ir.Node) -> None:
    """Replace `Swish` by x · sigmoid(α · x) (Ramachandran et al. 2017)."""
    op, x, kind = _start(model, node)
    alpha = node.attributes.get_float("alpha", 1.0)
    inner = x if alpha == 1 else op("Mul", x, op.number(alpha, kind))
    take_over(node.outputs[0], op("Mul", x, op("Sigmoid", inner)))
    model.graph.remove(node, safe=True)


def _start(model: ir.Model, node: ir.Node) -> tuple[Builder, ir.Value, ir.DataType]:
    x = node.inputs[0]
    kind = None if x is None else x.dtype or node.outputs[0].dtype
    if x is None or kind is None:
        raise GraphError(f"{node.name}: the type of its input is not known; declare it")
    return Builder(model, node), x, kind
