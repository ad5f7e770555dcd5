"""A graph of a newer opset in opset 18."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.ir_helpers import dims, optional_input
from attn_export.graph.lower.activations import lower_gelu, lower_swish
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.rotary import lower_rotary

OPSET, IR_VERSION = 18, 8

ONLY_TYPES_ADDED = frozenset(
    {
        "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cast", "Constant", "ConstantOfShape",
        "Cos", "Cosh", "Elu", "Equal", "Flatten", "HardSigmoid", "HardSwish", "Identity", "If",
        "IsInf", "IsNaN", "Loop", "Mish", "Pad", "ReduceMax", "ReduceMin", "Reshape", "Round",
        "Scan", "Selu", "Shape", "Sin", "Sinh", "Size", "Softplus", "Softsign", "Squeeze", "Tan",
        "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators whose versions after 18 only take more types: https://onnx.ai/onnx/operators/."""

NEW_ATTRIBUTES = frozenset({"saturate", "round_mode"})
"""Attributes of `Cast` after 18, for types that opset 18 does not have."""


def to_opset18(model: ir.Model) -> None:
    """Declare opset 18, once every operator has a form in it.

    Raises:
        GraphError: If one has none.
    """
    for node in list(model.graph):
        if node.domain in ("", "ai.onnx"):
            _convert(model, node)
    model.graph.opset_imports[""] = OPSET
    model.ir_version = IR_VERSION


def _convert(model: ir.Model, node: ir.Node) -> None:
    decompose = DECOMPOSED.get(node.op_type)
    if decompose is not None:
        decompose(model, node)
        return
    used = model.graph.opset_imports.get("", OPSET)
    try:
        then = onnx.defs.get_schema(node.op_type, OPSET)
    except onnx.defs.SchemaError as error:
        raise GraphError(
            f"{node.name}: {node.op_type} has no form in opset {OPSET}; keep the standard dialect"
        ) from error
    now = onnx.defs.get_schema(node.op_type, used)
    if now.since_version != then.since_version and node.op_type not in ONLY_TYPES_ADDED:
        raise GraphError(
            f"{node.name}: {node.op_type} means something else in opset {OPSET}; keep the standard "
            "dialect"
        )
    for name in NEW_ATTRIBUTES:
        node.attributes.pop(name, None)


def _rms_normalization(model: ir.Model, node: ir.Node) -> None:
    """Replace the node by x / sqrt(mean(x²) + ε) · weight (Zhang and Sennrich 2019).

    The mean is computed in the stash type.
    """
    x, weight = node.inputs[0], node.inputs[1]
    assert x is not None
    assert weight is not None
    op, out = Builder(model, node), node.outputs[0]
    kind = x.dtype or out.dtype or ir.DataType.FLOAT
    stash = ir.DataType(node.attributes.get_int("stash_type", ir.DataType.FLOAT))
    if node.attributes.get_int("axis", -1) != -1:
        raise GraphError(f"{node.name} normalises more than the last axis; normalise one")
    wide = x if stash == kind else op("Cast", x, to=stash)
    mean = op("ReduceMean", op("Mul", wide, wide), op.ints(-1), keepdims=1)
    eps = op.number(node.attributes.get_float("epsilon", 1e-5), stash)
    normed = op("Div", wide, op("Sqrt", op("Add", mean, eps)))
    narrow = normed if stash == kind else op("Cast", normed, to=kind)
    take_over(out, op("Mul", narrow, weight))
    model.graph.remove(node, safe=True)


def _tensor_scatter(model: ir.Model, node: ir.Node) -> None:
    """Replace the node by a write of `new` into a copy of `past`, from a place of each row on."""
    past, new = node.inputs[0], node.inputs[1]
    if past is None or new is None or not dims(past):
        raise GraphError(f"{node.name}: the shape of its cache is not known; declare it")
    op, place = Builder(model, node), optional_input(node, 2)
    axis = node.attributes.get_int("axis", -2) % len(dims(past))
    along = [_coordinates(op, new, i, axis) for i in range(axis + 1)]
    if place is not None:
        along[axis] = op("Add", along[axis], op("Unsqueeze", place, op.ints(*range(1, axis + 1))))
    if node.attributes.get_string("mode", "linear") == "circular":
        along[axis] = op("Mod", along[axis], op.size(past, axis))
    grid = along[0]
    for other in along[1:]:
        grid = op("Add", grid, other)
    nothing = op("Mul", grid, op.scalar_int(0))  # not every runtime has a dynamic Expand
    spread = [op("Unsqueeze", op("Add", nothing, c), op.ints(-1)) for c in along]
    take_over(node.outputs[0], op("ScatterND", past, op("Concat", *spread, axis=-1), new))
    model.graph.remove(node, safe=True)


def _coordinates(op: Builder, x: ir.Value, axis: int, last: int) -> ir.Value:
    """Return 0, 1, 2 … along an axis of `x`; the shape has the axes up to `last`, all others 1."""
    size = dims(x)[axis]
    if isinstance(size, int):
        shape = [size if i == axis else 1 for i in range(last + 1)]
        return op.array(np.arange(size).reshape(shape))
    length = op("Squeeze", op.size(x, axis))
    numbers = op("Range", op.scalar_int(0), length, op.scalar_int(1))
    return op("Unsqueeze", numbers, op.ints(*(i for i in range(last + 1) if i != axis)))


DECOMPOSED: dict[str, Callable[[ir.Model, ir.Node], None]] = {
    "Gelu": lower_gelu,
    "RMSNormalization": _rms_normalization,
    "RotaryEmbedding": lower_rotary,
    "Swish": lower_swish,
    "TensorScatter": _tensor_scatter,
}
