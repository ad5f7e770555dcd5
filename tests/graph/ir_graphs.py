"""Small graphs of onnx_ir, for passes that change them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def value(name: str, *shape: str | int | None, dtype: ir.DataType = FLOAT) -> ir.Value:
    return ir.val(name, dtype, ir.Shape(shape))


def weight(name: str, array: np.ndarray) -> ir.Value:
    return ir.val(name, const_value=ir.tensor(array, name=name))


def model_of(
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    nodes: Sequence[ir.Node],
    initializers: Sequence[ir.Value] = (),
) -> ir.Model:
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, initializers=initializers, opset_imports={"": 23}, name="g"
    )
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, **inputs: np.ndarray) -> list[np.ndarray]:
    return ReferenceEvaluator(ir.to_proto(model)).run(None, inputs)


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def node_of(model: ir.Model, operator: str) -> ir.Node:
    (node,) = (node for node in model.graph if node.op_type == operator)
    return node


def shape_of(value: ir.Value) -> list[str | int | None]:
    return [dim.value if isinstance(dim, ir.SymbolicDim) else dim for dim in value.shape]
