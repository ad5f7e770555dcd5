"""Norms and gated activations of a whole model in half precision, by operators that launch less."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT
from attn_export.graph.ir_helpers import dims, nodes_of, producer_of, value_before
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.ort_fusions import fuse_silu, fuse_sums_into_norms
from attn_export.graph.lower.read import SWAP_HEADS_AND_LENGTH

_SCALES = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 2.0**50}
"""The factor of a norm whose epsilon is its square, by type: of values far below it, the norm is
the values themselves. Float16 values with a mean square of 1e6 change by an eighth of a rounding;
products of larger ones with gates overflow."""

_MOST = 1024
"""The largest number of values that a norm takes together, so that several blocks share a row."""


def move_norms_after_transposes(model: ir.Model) -> None:
    """Normalise heads `[B, H, L, D]` and not `[B, L, H, D]`, as the operator of attention does."""
    for node in nodes_of(model, "Transpose"):
        norm = producer_of(node.inputs[0], "RMSNormalization")
        if norm is None or len(norm.outputs[0].uses()) > 1:
            continue
        perm, axis = node.attributes.get_ints("perm", ()), norm.attributes.get_int("axis", -1)
        if tuple(perm) == SWAP_HEADS_AND_LENGTH and axis in (-1, 3):
            op, x = Builder(model, node), norm.inputs[0]
            moved = op("Transpose", x, perm=SWAP_HEADS_AND_LENGTH)
            moved.shape, moved.type = node.outputs[0].shape, node.outputs[0].type
            (out,) = op.copy_node(norm, {x: moved} if x is not None else {})
            take_over(node.outputs[0], out)
            model.graph.remove([node, norm], safe=True)


def launch_fewer_kernels(model: ir.Model) -> None:
    """Fuse sums into norms, and gates with what they multiply."""
    fuse_sums_into_norms(model, tuple(_SCALES))
    for node in nodes_of(model, "Mul"):
        for gate, value in (node.inputs, node.inputs[::-1]):
            before = _silu_of(gate)
            if (
                before is not None
                and value is not None
                and _multiply_by_silu(model, node, value, before)
            ):
                break
    fuse_silu(model, tuple(_SCALES))


def _silu_of(gate: ir.Value | None) -> ir.Value | None:
    """Return x if a value is x * sigmoid(x), and nothing else reads it; None for other values."""
    node = producer_of(gate, "Mul")
    if node is None or len(node.outputs[0].uses()) > 1:
        return None
    for x, sigmoid in (node.inputs, node.inputs[::-1]):
        if x is not None and x is value_before(sigmoid, "Sigmoid"):
            return x
    return None


def _multiply_by_silu(model: ir.Model, node: ir.Node, value: ir.Value, gate: ir.Value) -> bool:
    """Replace a product by a gated norm that changes nothing; return whether its type has one."""
    scale, shape = _SCALES.get(value.dtype or ir.DataType.UNDEFINED), dims(value)
    if scale is None or not shape or shape != dims(gate) or not isinstance(shape[-1], int):
        return False
    size = max(n for n in range(1, min(shape[-1], _MOST) + 1) if shape[-1] % n == 0)
    op = Builder(model, node)
    assert value.dtype is not None
    scales = op.array(np.full(size, scale, value.dtype.numpy()))
    gated = op(
        "GatedRMSNorm", value, scales, gate, domain=MICROSOFT, epsilon=scale**2, activation="silu"
    )
    take_over(node.outputs[0], gated)
    model.graph.remove(node, safe=True)
    return True
