"""A graph of a newer opset in opset 18."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.lower.opset18_operators import DECOMPOSED

OPSET, IR_VERSION = 18, 8

FOUR_BITS = frozenset({ir.DataType.INT4, ir.DataType.UINT4})
"""Types that opset 18 does not have; DequantizeLinear takes them from 21 on."""

ONLY_TYPES_ADDED = frozenset(
    {
        "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cast", "CastLike", "Constant",
        "ConstantOfShape", "Conv", "ConvTranspose", "Cos", "Cosh", "Det", "Dropout", "Elu", "Equal",
        "EyeLike", "Flatten", "GRU", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool",
        "HardSigmoid", "HardSwish", "Identity", "If", "InstanceNormalization", "IsInf", "IsNaN",
        "LSTM", "Loop", "LpNormalization", "LpPool", "MaxRoiPool", "MaxUnpool", "Mish", "Pad",
        "RNN", "ReduceMax", "ReduceMin", "Reshape", "RoiAlign", "Round", "Scan", "Selu", "Shape",
        "Sin", "Sinh", "Size", "Softplus", "Softsign", "SplitToSequence", "Squeeze", "Tan",
        "ThresholdedRelu", "TopK", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators whose versions after 18 only take more types: https://onnx.ai/onnx/operators/."""


def _rounds_down(node: ir.Node) -> bool:
    # Opset 19 says which windows count where sizes are rounded up, and adds dilations.
    dilations = node.attributes.get_ints("dilations", [])
    pools = node.op_type == "MaxPool" or all(step == 1 for step in dilations)
    return pools and not node.attributes.get_int("ceil_mode", 0)


def _is_per_axis(node: ir.Node) -> bool:
    later = any(node.attributes.get_int(name, 0) for name in ("block_size", "output_dtype"))
    ends = (*node.inputs, *node.outputs)
    return not later and not any(end is not None and end.dtype in FOUR_BITS for end in ends)


SAME_IF: dict[str, Callable[[ir.Node], bool]] = {
    "AveragePool": _rounds_down,
    "DequantizeLinear": _is_per_axis,
    "MaxPool": _rounds_down,
    "QuantizeLinear": _is_per_axis,
    "Resize": lambda node: (
        node.attributes.get_string("coordinate_transformation_mode", "") != "half_pixel_symmetric"
    ),
}
"""Operators with more attributes after 18, by the condition under which they mean the same."""

LACKS = {"DequantizeLinear": "has neither blocks nor integers of 4 bits"}
"""Descriptions of the difference, for messages; by operator."""

NEW_ATTRIBUTES = frozenset(
    {"saturate", "round_mode", "block_size", "output_dtype", "precision", "dilations"}
)
"""Attributes after 18 that opset 18 does not have; they matter to other types or have defaults."""


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
    if now.since_version != then.since_version and not _means_the_same(node):
        problem = LACKS.get(node.op_type, "means something else")
        raise GraphError(
            f"{node.name}: {node.op_type} {problem} in opset {OPSET}; keep the standard dialect"
        )
    for name in NEW_ATTRIBUTES - set(then.attributes):
        node.attributes.pop(name, None)


def _means_the_same(node: ir.Node) -> bool:
    condition = SAME_IF.get(node.op_type)
    return node.op_type in ONLY_TYPES_ADDED if condition is None else condition(node)
