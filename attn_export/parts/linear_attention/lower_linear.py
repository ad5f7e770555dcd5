"""Forms of the nodes of linear attention in the dialects: a `Scan`, and ONNX Runtime's operators.

Legend: B batch, H query heads, Hkv
key/value heads, r = H / Hkv, L tokens, D width of a key, Dv width of a value, C decays of a head.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT, PORTABLE
from attn_export.errors import GraphError
from attn_export.graph.ir_helpers import dims, nodes_of, optional_input
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.opset18 import to_opset

_FLOAT = ir.DataType.FLOAT


def lower_newer(model: ir.Model, dialect: str) -> None:
    """Replace the nodes by a `Scan` or `Conv` in the dialect `portable`, else by ONNX Runtime's."""
    forms = {"LinearAttention": _scan, "CausalConvWithState": _convolve}
    for node in [node for name in forms for node in nodes_of(model, name)]:
        form = forms[node.op_type] if dialect == PORTABLE else _contrib
        for old, new in zip(node.outputs, form(Builder(model, node), node), strict=False):
            take_over(old, new)
        model.graph.remove(node, safe=True)
    if dialect != PORTABLE:
        with contextlib.suppress(GraphError):  # another node needs the newer opset
            to_opset(model, 23, 11)


def _contrib(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return op.add_node(node.op_type, node.inputs, 2, MICROSOFT, **attributes)


def _convolve(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Return the outputs of a `Conv` behind the tokens that are kept."""
    x, weight, bias, past = (optional_input(node, index) for index in range(4))
    sizes = dims(weight) if weight is not None else ()
    if x is None or len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
        raise GraphError(f"{node.name}: the shape of its weight is not known; declare it")
    C, _, k = (int(str(size)) for size in sizes)
    if node.attributes.get_string("activation", "none") != "none":
        raise GraphError(f"{node.name} has an activation; keep the standard dialect")
    if past is None:
        shape = op("Concat", op.size(x, 0), op.ints(C, k - 1), axis=0)
        zero = np.zeros(1, (x.dtype or _FLOAT).numpy())
        past = op("ConstantOfShape", shape, value=ir.tensor(zero))
    padded = op("Concat", past, x, axis=-1)
    convolved = op("Conv", padded, weight, bias, group=C)
    last = op("Slice", padded, op.ints(1 - k), op.ints(2**31 - 1), op.ints(2))
    return convolved, last


def _scan(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """Return the outputs of a `Scan` over the tokens of a node, which computes in float32."""
    q, k, v, past, decay, beta = (optional_input(node, index) for index in range(6))
    H, Hkv = (node.attributes.get_int(f"{name}_num_heads", 1) for name in ("q", "kv"))
    D, Dv = (_width(node, x) // Hkv for x in (k, v))
    shapes = {
        "q": (Hkv, H // Hkv, D), "k": (Hkv, D, 1), "v": (Hkv, 1, Dv), "decay": (Hkv, -1, 1),
        "beta": (-1, 1, 1),
    }  # fmt: skip
    values = {
        name: op("Reshape", _tokens_first(op, x), op.ints(0, 0, *shapes[name]))
        for name, x in zip(shapes, (q, k, v, decay, beta), strict=True)
        if x is not None
    }
    if decay is not None:
        values["decay"] = op("Exp", values["decay"])
    scale = node.attributes.get_float("scale", 0.0) or D**-0.5
    values["q"] = op("Mul", values["q"], op.scalar(scale, _FLOAT))
    if past is None:
        shape = op("Concat", op.size(values["q"], 1), op.ints(Hkv, D, Dv), axis=0)
        past = op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, np.float32)))
    of_slices = ((Hkv, D, Dv), *(shapes[name] for name in values))
    all_sizes = [[None, *(size if size > 0 else None for size in sizes)] for sizes in of_slices]
    types = [ir.TypeAndShape(ir.TensorType(_FLOAT), ir.Shape(sizes)) for sizes in all_sizes]
    build = functools.partial(_token, [*values])
    state, rows = op.add_recurrence(_in_float32(op, past), [*values.values()], build, types)
    attended = op("Transpose", op("Reshape", rows, op.ints(0, 0, H * Dv)), perm=[1, 0, 2])
    ends = zip((attended, state), node.outputs, strict=False)
    return [x if y.dtype in (None, _FLOAT) else op("Cast", x, to=y.dtype) for x, y in ends]


def _token(
    names: Sequence[str], op: Builder, state: ir.Value, rows: Sequence[ir.Value]
) -> Sequence[ir.Value]:
    """Return the state after a token, and what its queries read, `[B, Hkv, r, Dv]`."""
    at = dict(zip(names, rows, strict=True))
    if "decay" in at:
        state = op("Mul", state, at["decay"])
    new = at["v"]
    if "beta" in at:
        turned = op("Transpose", at["k"], perm=[0, 1, 3, 2])
        new = op("Mul", at["beta"], op("Sub", new, op("MatMul", turned, state)))
    state = op("Add", state, op("Mul", at["k"], new))
    return state, op("MatMul", at["q"], state)


def _tokens_first(op: Builder, x: ir.Value) -> ir.Value:
    """Return `[B, L, N]` as `[L, B, N]`: few runtimes scan another axis than the first."""
    return op("Transpose", _in_float32(op, x), perm=[1, 0, 2])


def _in_float32(op: Builder, x: ir.Value) -> ir.Value:
    return x if x.dtype in (None, _FLOAT) else op("Cast", x, to=_FLOAT)


def _width(node: ir.Node, x: ir.Value | None) -> int:
    width = dims(x)[-1] if x is not None and dims(x) else None
    if not isinstance(width, int):
        raise GraphError(f"{node.name}: the width of its heads is not known; declare it")
    return width
