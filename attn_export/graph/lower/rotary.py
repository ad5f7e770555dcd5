"""`RotaryEmbedding` of opset 23 in operators of opset 18.

https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html. r is the width that is rotated, D that of
a head.
"""

from __future__ import annotations

import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.ir_helpers import dims, optional_input
from attn_export.graph.lower.node_builder import Builder, take_over


def lower_rotary(model: ir.Model, node: ir.Node) -> None:
    """Replace one node by portable operators.

    Raises:
        GraphError: If the shape of its input is not known.
    """
    x, cos, sin, positions = (optional_input(node, index) for index in range(4))
    rank = len(dims(x)) if x is not None else 0
    if x is None or cos is None or sin is None or rank not in (3, 4):
        raise GraphError(f"{node.name}: the shape of what it rotates is not known; declare it")
    op, out = Builder(model, node), node.outputs[0]
    if positions is not None:
        cos, sin = (op("Gather", cache, positions, axis=0) for cache in (cos, sin))
    heads = node.attributes.get_int("num_heads", 0)
    width = dims(x)[-1]
    if rank == 3:
        if not heads or not isinstance(width, int) or width % heads:
            raise GraphError(f"{node.name}: {width} is not {heads} heads; give num_heads")
        width //= heads
        x = op("Reshape", x, op.ints(0, 0, heads, width))
    # [B, L, r/2] over [B, L, H, D], or over [B, H, L, D].
    cos, sin = (op("Unsqueeze", cache, op.ints(2 if rank == 3 else 1)) for cache in (cos, sin))
    turned = _turned(op, node, x, width, cos, sin)
    take_over(out, turned if rank == 4 else op("Reshape", turned, op.ints(0, 0, -1)))
    model.graph.remove(node, safe=True)


def _turned(
    op: Builder,
    node: ir.Node,
    x: ir.Value,
    width: int | ir.SymbolicDim,
    cos: ir.Value,
    sin: ir.Value,
) -> ir.Value:
    """Return the first r of D rotated, with the rest unchanged."""
    rotated = node.attributes.get_int("rotary_embedding_dim", 0) or width
    interleaved = bool(node.attributes.get_int("interleaved", 0))
    if not isinstance(rotated, int) or not isinstance(width, int):
        raise GraphError(f"{node.name}: the width of its heads is not known; declare it")
    half, rest = rotated // 2, width - rotated
    stays: list[ir.Value] = []
    if interleaved:
        if rest:
            x, *stays = op.several("Split", [x, op.ints(rotated, rest)], 2, axis=-1)
        pairs = op("Reshape", x, op.ints(0, 0, 0, half, 2))
        one, other = op.several("Split", [pairs], 2, axis=-1, num_outputs=2)
        cos, sin = (op("Unsqueeze", cache, op.ints(-1)) for cache in (cos, sin))
    else:
        sizes = [half, half, rest] if rest else [half, half]
        one, other, *stays = op.several("Split", [x, op.ints(*sizes)], len(sizes), axis=-1)
    real = op("Sub", op("Mul", cos, one), op("Mul", sin, other))
    imaginary = op("Add", op("Mul", sin, one), op("Mul", cos, other))
    if not interleaved:
        return op("Concat", real, imaginary, *stays, axis=-1)
    turned = op("Reshape", op("Concat", real, imaginary, axis=-1), op.ints(0, 0, 0, rotated))
    return op("Concat", turned, *stays, axis=-1) if stays else turned
