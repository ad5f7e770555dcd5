"""Attention as the one `Attention` node of the canonical graph, while exporting.

ai.onnx `Attention`, opset 23: https://onnx.ai/onnx/operators/onnx__Attention.html. A cache that
is written in place takes opset 24: https://onnx.ai/onnx/operators/onnx__TensorScatter.html.
The exporter would otherwise take `scaled_dot_product_attention` apart, and the cache
and the causal mask with it; every dialect is a rewrite of this node instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from attn_export.attention import functional

OPSET = 23
"""The first opset with `Attention`."""

IN_PLACE_OPSET = 24
"""The first opset with `TensorScatter`, and with an `Attention` whose input gives the number of
valid keys of each row."""

SOFTMAX_OUTPUT = 3
"""`qk_matmul_output_mode` of `Attention`: the fourth output is the softmax."""

_EXPORTING: ContextVar[bool] = ContextVar("attn_export_canonical", default=False)


@contextmanager
def emit_canonical_attention(*, emit: bool = True) -> Iterator[None]:
    """Make `Attention` modules emit the ONNX node instead of computing, within the block."""
    token = _EXPORTING.set(emit)
    try:
        yield
    finally:
        _EXPORTING.reset(token)


def emitting() -> bool:
    """Return whether an `Attention` module must emit the ONNX node."""
    return _EXPORTING.get()


def attention_node(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    past_length: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Emit one `Attention` node.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, Hkv, S - P, D]`, without the past; all S, if it is written in place.
        value: `[B, Hkv, S - P, Dv]`, likewise.
        attn_mask: Bool or float, broadcasts to `[B, H, L, S]`.
        past_key: `[B, Hkv, P, D]` or None.
        past_value: `[B, Hkv, P, Dv]` or None.
        past_length: The number of keys of each row of the past, `[B]`, if it is written in place.
        causal: Whether query i sees keys up to P + i only.
        scale: Factor on the scores.
        softcap: Scores become softcap * tanh(score / softcap) before the mask.

    Returns:
        The attention `[B, H, L, Dv]`, `present_key`, `present_value` and the weights
        `[B, H, L, S]`. Unused outputs are dropped from the node later.
    """
    B, H, L, _ = query.shape
    parts = [past_key, past_value]
    if past_length is not None:
        parts = [None, None, past_length + L]
    Hkv, S, D, Dv = key.shape[1], key.shape[2], key.shape[3], value.shape[3]
    if parts[0] is not None:
        S = S + parts[0].shape[2]
    shapes = ((B, H, L, Dv), (B, Hkv, S, D), (B, Hkv, S, Dv), (B, H, L, S))
    attended, present_key, present_value, weights = torch.onnx.ops.symbolic_multi_out(
        "Attention",
        (query, key, value, _spread_over_queries(attn_mask, L), *parts),
        {
            "is_causal": int(causal),
            "scale": scale,
            "softcap": softcap or 0.0,
            "qk_matmul_output_mode": SOFTMAX_OUTPUT,
        },
        dtypes=(query.dtype,) * 4,
        shapes=shapes,
        version=OPSET if past_length is None else IN_PLACE_OPSET,
    )
    return attended, present_key, present_value, weights


def write(past: Tensor, new: Tensor, past_length: Tensor) -> Tensor:
    """Emit a `TensorScatter` node: `functional.written`, of the same arguments.

    Args:
        past: The cache, `[B, Hkv, capacity, D]`.
        new: The new keys or values, `[B, Hkv, L, D]`.
        past_length: Filled rows of the cache, int64 `[B]`.
    """
    return torch.onnx.ops.symbolic(
        "TensorScatter",
        (past, new, past_length),
        {"mode": "linear", "axis": -2},
        dtype=past.dtype,
        shape=past.shape,
        version=IN_PLACE_OPSET,
    )


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    """Emit a `QuantizeLinear` node: int8, rounded half to even and clipped.

    Args:
        x: New keys or values, float32 `[B, Hkv, L, D]`.
        scale: A scalar, or `[Hkv, 1, D]`: the operator has scales along one axis only, so that `x`
            is divided first.
    """
    if scale.dim():
        x, scale = x / scale, torch.ones(())
    return torch.onnx.ops.symbolic(
        "QuantizeLinear", (x, scale, _zero()), dtype=torch.int8, shape=x.shape, version=OPSET
    )


def dequantise(x: Tensor, scale: Tensor) -> Tensor:
    """Emit a `DequantizeLinear` node, and the product with the scale: float32.

    ONNX Runtime 1.31 moves `DequantizeLinear` behind `Transpose` and `Slice`, and makes int8
    unsigned there: without a zero point its numbers are wrong in opset 18, with one it refuses its
    own graph in opset 24. Behind a product it moves nothing.

    Args:
        x: A cache, int8 `[B, Hkv, S, D]`.
        scale: A scalar, or `[Hkv, 1, D]`.
    """
    found = torch.onnx.ops.symbolic(
        "DequantizeLinear",
        (x, torch.ones(()), _zero()),
        dtype=torch.float32,
        shape=x.shape,
        version=OPSET,
    )
    return found * scale


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.int8)


def sink_attention_nodes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor,
    *,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Emit an `Attention` node in which each head has a sink.

    The operator has no sinks, so there is one more key: its score is 0 and its mask the sink,
    and its value is 0.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, Hkv, S, D]`, with the past.
        value: `[B, Hkv, S, Dv]`, with the past.
        attn_mask: As for `attention_node`.
        sinks: `[H]`.
        causal: As for `attention_node`.
        scale: As for `attention_node`.
        softcap: As for `attention_node`.

    Returns:
        The attention `[B, H, L, Dv]` and the weights `[B, H, L, S]`.
    """
    B, H, L, _ = query.shape
    S = key.shape[2]
    if causal:
        attn_mask = functional.restrict(attn_mask, functional.causal_mask(L, S, query.device))
    mask = functional.as_float(attn_mask, (B, H, L, S), query)
    column = sinks.to(query.dtype)[None, :, None, None].expand(B, H, L, 1)
    one_more = [torch.zeros_like(x[:, :, :1]) for x in (key, value)]
    attended, _, _, weights = attention_node(
        query,
        torch.cat([key, one_more[0]], dim=2),
        torch.cat([value, one_more[1]], dim=2),
        torch.cat([mask, column], dim=-1),
        None,
        None,
        causal=False,
        scale=scale,
        softcap=softcap,
    )
    return attended, weights[..., :S]


def _spread_over_queries(mask: Tensor | None, L: int) -> Tensor | None:
    """Expand a mask of rank 2 or 4 to all L rows.

    ONNX Runtime refuses a mask whose L axis is 1 (every key-padding mask), and runtimes
    read rank 3 differently, so both are written out.
    """
    if mask is None:
        return None
    if mask.dim() == 3:
        mask = mask.unsqueeze(0)
    if mask.shape[-2] != 1:
        return mask
    return mask.expand(*mask.shape[:-2], L, mask.shape[-1])
