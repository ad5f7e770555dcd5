"""Conversion of graphs of newer opsets to opset 18."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.axis_names import Size
from attn_export.graph.ir_helpers import dims, optional_input
from attn_export.graph.lower.node_builder import Builder, take_over

# -- nodes of newer operators in operators of opset 18 ------------------------------------------

# Each function adds nodes that compute the output of a node, and returns the new output. It raises
# GraphError if the shapes or types that it needs are not known.


def _gelu(op: Builder, node: ir.Node) -> ir.Value:
    """Return x · (1 + erf(x / √2)) / 2, or the form with tanh (Hendrycks and Gimpel 2016)."""
    x, dtype = _typed_input(node)
    if node.attributes.get_string("approximate", "none") == "tanh":
        cube = op("Mul", op("Mul", x, x), x)
        inner = op("Add", x, op("Mul", cube, op.scalar(0.044715, dtype)))
        curve = op("Tanh", op("Mul", inner, op.scalar(math.sqrt(2 / math.pi), dtype)))
    else:
        curve = op("Erf", op("Mul", x, op.scalar(math.sqrt(0.5), dtype)))
    scaled = op("Mul", x, op("Add", curve, op.scalar(1.0, dtype)))
    return op("Mul", scaled, op.scalar(0.5, dtype))


def _swish(op: Builder, node: ir.Node) -> ir.Value:
    """Return x · sigmoid(α · x) (Ramachandran et al. 2017)."""
    x, dtype = _typed_input(node)
    alpha = node.attributes.get_float("alpha", 1.0)
    inner = x if alpha == 1 else op("Mul", x, op.scalar(alpha, dtype))
    return op("Mul", x, op("Sigmoid", inner))


def _typed_input(node: ir.Node) -> tuple[ir.Value, ir.DataType]:
    x = node.inputs[0]
    dtype = None if x is None else x.dtype or node.outputs[0].dtype
    if x is None or dtype is None:
        raise GraphError(f"{node.name}: the type of its input is not known; declare it")
    return x, dtype


def _rotary_embedding(op: Builder, node: ir.Node) -> ir.Value:
    """Return the rotated input: https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html."""
    x, cos, sin, positions = (optional_input(node, index) for index in range(4))
    rank = len(dims(x)) if x is not None else 0
    if x is None or cos is None or sin is None or rank not in (3, 4):
        raise GraphError(f"{node.name}: the shape of what it rotates is not known; declare it")
    if positions is not None:
        cos, sin = (op("Gather", cache, positions, axis=0) for cache in (cos, sin))
    heads = node.attributes.get_int("num_heads", 0)
    width = dims(x)[-1]
    if rank == 3:
        if not heads or not isinstance(width, int) or width % heads:
            raise GraphError(f"{node.name}: {width} is not {heads} heads; give num_heads")
        width //= heads
        x = op("Reshape", x, op.ints(0, 0, heads, width))
    # [B, L, r/2] over [B, L, H, D], or over [B, H, L, D]; r is the rotated width.
    cos, sin = (op("Unsqueeze", cache, op.ints(2 if rank == 3 else 1)) for cache in (cos, sin))
    rotated = _rotate(op, node, x, width, cos, sin)
    return rotated if rank == 4 else op("Reshape", rotated, op.ints(0, 0, -1))


def _rotate(
    op: Builder, node: ir.Node, x: ir.Value, width: Size, cos: ir.Value, sin: ir.Value
) -> ir.Value:
    """Rotate the first r of D channels; the others stay unchanged."""
    rotated_width = node.attributes.get_int("rotary_embedding_dim", 0) or width
    interleaved = bool(node.attributes.get_int("interleaved", 0))
    if not isinstance(rotated_width, int) or not isinstance(width, int):
        raise GraphError(f"{node.name}: the width of its heads is not known; declare it")
    half, rest_width = rotated_width // 2, width - rotated_width
    unrotated: list[ir.Value] = []
    if interleaved:
        if rest_width:
            sizes = [rotated_width, rest_width]
            x, *unrotated = op.add_node("Split", [x, op.ints(*sizes)], 2, axis=-1)
        pairs = op("Reshape", x, op.ints(0, 0, 0, half, 2))
        one, other = op.add_node("Split", [pairs], 2, axis=-1, num_outputs=2)
        cos, sin = (op("Unsqueeze", cache, op.ints(-1)) for cache in (cos, sin))
    else:
        sizes = [half, half, rest_width] if rest_width else [half, half]
        one, other, *unrotated = op.add_node("Split", [x, op.ints(*sizes)], len(sizes), axis=-1)
    real = op("Sub", op("Mul", cos, one), op("Mul", sin, other))
    imaginary = op("Add", op("Mul", sin, one), op("Mul", cos, other))
    if not interleaved:
        return op("Concat", real, imaginary, *unrotated, axis=-1)
    merged = op("Reshape", op("Concat", real, imaginary, axis=-1), op.ints(0, 0, 0, rotated_width))
    return op("Concat", merged, *unrotated, axis=-1) if unrotated else merged


def _grid_sample(op: Builder, node: ir.Node) -> ir.Value:
    """Return a copy's output, with the names of modes before opset 20, which only has images."""
    if node.inputs[0] is None or len(dims(node.inputs[0])) != 4:
        raise GraphError(f"{node.name} samples no images; keep the standard dialect")
    (sampled,) = op.copy_node(node, {})
    copy = sampled.producer()
    assert copy is not None
    modes = {"linear": "bilinear", "cubic": "bicubic"}
    mode = node.attributes.get_string("mode", "linear")
    copy.attributes["mode"] = ir.AttrString("mode", modes.get(mode, mode))
    return sampled


def _group_normalization(op: Builder, node: ir.Node) -> ir.Value:
    """Return the input normalised by `InstanceNormalization` of groups (Wu and He 2018).

    In opset 18 it has a scale for each group, in opset 21 for each channel.
    """
    x, scale, bias = node.inputs[:3]
    if x is None or scale is None or bias is None or not dims(x) or x.dtype is None:
        raise GraphError(f"{node.name}: the shape of its input is not known; declare it")
    groups, dtype = node.attributes.get_int("num_groups", 1), x.dtype.numpy()
    one, zero = (op.array(np.full(groups, value, dtype)) for value in (1, 0))
    grouped = op("Reshape", x, op.ints(0, groups, -1))
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    normed = op("InstanceNormalization", grouped, one, zero, epsilon=epsilon)
    whole = op("Reshape", normed, op("Shape", x))
    axes = op.ints(*range(1, len(dims(x)) - 1))
    wide = [op("Unsqueeze", part, axes) if len(dims(x)) > 2 else part for part in (scale, bias)]
    return op("Add", op("Mul", whole, wide[0]), wide[1])


def _rms_normalization(op: Builder, node: ir.Node) -> ir.Value:
    """Return x / sqrt(mean(x²) + ε) · weight (Zhang and Sennrich 2019).

    The mean is computed in the stash type.
    """
    x, weight = node.inputs[0], node.inputs[1]
    assert x is not None
    assert weight is not None
    dtype = x.dtype or node.outputs[0].dtype or ir.DataType.FLOAT
    stash = ir.DataType(node.attributes.get_int("stash_type", ir.DataType.FLOAT))
    if node.attributes.get_int("axis", -1) != -1:
        raise GraphError(f"{node.name} normalises more than the last axis; normalise one")
    wide = x if stash == dtype else op("Cast", x, to=stash)
    mean = op("ReduceMean", op("Mul", wide, wide), op.ints(-1), keepdims=1)
    eps = op.scalar(node.attributes.get_float("epsilon", 1e-5), stash)
    normed = op("Div", wide, op("Sqrt", op("Add", mean, eps)))
    narrow = normed if stash == dtype else op("Cast", normed, to=dtype)
    return op("Mul", narrow, weight)


def _tensor_scatter(op: Builder, node: ir.Node) -> ir.Value:
    """Return `past` with `new` in it from an index per batch element on, by ScatterND."""
    past, new, start = (optional_input(node, index) for index in range(3))
    if past is None or new is None or not dims(past):
        raise GraphError(f"{node.name}: the shape of its cache is not known; declare it")
    axis = node.attributes.get_int("axis", -2) % len(dims(past))
    coordinates = [_coordinates(op, new, i, axis) for i in range(axis + 1)]
    if start is not None:
        starts = op("Unsqueeze", start, op.ints(*range(1, axis + 1)))
        coordinates[axis] = op("Add", coordinates[axis], starts)
    if node.attributes.get_string("mode", "linear") == "circular":
        coordinates[axis] = op("Mod", coordinates[axis], op.size(past, axis))
    grid = coordinates[0]
    for other in coordinates[1:]:
        grid = op("Add", grid, other)
    zeros = op("Mul", grid, op.scalar(0))  # not every runtime has a dynamic Expand
    spread = [op("Unsqueeze", op("Add", zeros, c), op.ints(-1)) for c in coordinates]
    return op("ScatterND", past, op("Concat", *spread, axis=-1), new)


def _coordinates(op: Builder, x: ir.Value, axis: int, last: int) -> ir.Value:
    """Return the indices along an axis of `x`, of rank `last` + 1 with size 1 in all other axes."""
    size = dims(x)[axis]
    if isinstance(size, int):
        shape = [size if i == axis else 1 for i in range(last + 1)]
        return op.array(np.arange(size).reshape(shape))
    length = op("Squeeze", op.size(x, axis))
    numbers = op("Range", op.scalar(0), length, op.scalar(1))
    return op("Unsqueeze", numbers, op.ints(*(i for i in range(last + 1) if i != axis)))


DECOMPOSED: dict[str, Callable[[Builder, ir.Node], ir.Value]] = {
    "Gelu": _gelu,
    "GridSample": _grid_sample,
    "GroupNormalization": _group_normalization,
    "RMSNormalization": _rms_normalization,
    "RotaryEmbedding": _rotary_embedding,
    "Swish": _swish,
    "TensorScatter": _tensor_scatter,
}


# -- conversion ---------------------------------------------------------------------------------

OPSET, _IR_VERSION = 18, 8

_LATER_TYPES = frozenset({ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.FLOAT8E4M3FN})
"""Types that DequantizeLinear supports from opset 19 or 21 on."""

ONLY_TYPES_ADDED = frozenset({
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cast", "CastLike", "Constant",
    "ConstantOfShape", "Conv", "ConvTranspose", "Cos", "Cosh", "Det", "Dropout", "Elu", "Equal",
    "EyeLike", "Flatten", "GRU", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool",
    "HardSigmoid", "HardSwish", "Identity", "If", "InstanceNormalization", "IsInf", "IsNaN",
    "LSTM", "Loop", "LpNormalization", "LpPool", "MaxRoiPool", "MaxUnpool", "Mish", "Pad",
    "RNN", "ReduceMax", "ReduceMin", "Reshape", "RoiAlign", "Round", "Scan", "Selu", "Shape",
    "Sin", "Sinh", "Size", "Softplus", "Softsign", "SplitToSequence", "Squeeze", "Tan",
    "ThresholdedRelu", "TopK", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators whose later versions only add types: https://onnx.ai/onnx/operators/."""


def _rounds_down(node: ir.Node) -> bool:
    # Opset 19 changes the windows for ceil_mode, and adds dilations.
    dilations = node.attributes.get_ints("dilations", [])
    pools = node.op_type == "MaxPool" or all(step == 1 for step in dilations)
    return pools and not node.attributes.get_int("ceil_mode", 0)


def _is_per_axis(node: ir.Node) -> bool:
    later = any(node.attributes.get_int(name, 0) for name in ("block_size", "output_dtype"))
    ends = (*node.inputs, *node.outputs)
    return not later and not any(end is not None and end.dtype in _LATER_TYPES for end in ends)


SAME_IF: dict[str, Callable[[ir.Node], bool]] = {
    "AveragePool": _rounds_down,
    "DequantizeLinear": _is_per_axis,
    "MaxPool": _rounds_down,
    "QuantizeLinear": _is_per_axis,
    "Resize": lambda node: (
        node.attributes.get_string("coordinate_transformation_mode", "") != "half_pixel_symmetric"
    ),
}
"""Operators with attributes added after 18: the condition under which they mean the same."""

_LACKS = {"DequantizeLinear": "has neither blocks nor numbers of 4 bits nor float8"}
"""Descriptions of the difference for error messages, by operator."""

_NEW_ATTRIBUTES = frozenset(
    {"saturate", "round_mode", "block_size", "output_dtype", "precision", "dilations"}
)
"""Attributes added after 18 that are dropped: they concern other types, or have their default."""


def to_opset18(model: ir.Model) -> None:
    """Replace operators that opset 18 does not have, and declare opset 18."""
    to_opset(model, OPSET, _IR_VERSION)


def to_opset(model: ir.Model, opset: int, ir_version: int) -> None:
    """Declare an older opset, 18 or later, and replace operators that only later ones have."""
    for node in list(model.graph):
        if node.domain in ("", "ai.onnx"):
            _convert(model, node, opset)
    model.graph.opset_imports[""] = opset
    model.ir_version = ir_version


def _convert(model: ir.Model, node: ir.Node, older: int) -> None:
    if older == OPSET and node.op_type in DECOMPOSED:
        take_over(node.outputs[0], DECOMPOSED[node.op_type](Builder(model, node), node))
        model.graph.remove(node, safe=True)
        return
    opset = model.graph.opset_imports.get("", OPSET)
    try:
        schema = onnx.defs.get_schema(node.op_type, older)
    except onnx.defs.SchemaError as error:
        raise GraphError(
            f"{node.name}: {node.op_type} has no form in opset {older}; keep the standard dialect"
        ) from error
    current_schema = onnx.defs.get_schema(node.op_type, opset)
    if current_schema.since_version != schema.since_version and not _means_the_same(node):
        problem = _LACKS.get(node.op_type, "means something else")
        raise GraphError(
            f"{node.name}: {node.op_type} {problem} in opset {older}; keep the standard dialect"
        )
    for name in _NEW_ATTRIBUTES - set(schema.attributes):
        node.attributes.pop(name, None)


def _means_the_same(node: ir.Node) -> bool:
    condition = SAME_IF.get(node.op_type)
    return node.op_type in ONLY_TYPES_ADDED if condition is None else condition(node)
