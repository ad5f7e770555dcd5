"""The ONNX form of `F.scaled_dot_product_attention` in modules of the user's.

The exporter's own asserts that inputs are 4-D and heads match where PyTorch broadcasts; the
`Attention` operator expresses all of it (https://onnx.ai/onnx/operators/onnx__Attention.html).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset23 as op

HEADS_AXES = 4


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 (the operator shares heads by their numbers)
) -> Any:
    """Emit one `Attention` node.

    Raises:
        ValueError: If inputs have more than 4 axes, or weights are dropped.
    """
    ranks = {len(x.shape) for x in (query, key, value)}
    if len(ranks) != 1 or max(ranks) > HEADS_AXES:
        raise ValueError(f"only 4D query, key, and value are supported; got {sorted(ranks)} axes")
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}; pass 0 outside training")
    missing = list(range(HEADS_AXES - ranks.pop()))
    if missing:
        axes: Any = op.Constant(value_ints=missing)
        query, key, value = (op.Unsqueeze(x, axes) for x in (query, key, value))
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    attended, *_ = op.Attention(
        query, key, value, attn_mask, None, None, is_causal=int(is_causal), **options
    )
    return op.Squeeze(attended, axes) if missing else attended


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: scaled_dot_product_attention
}
