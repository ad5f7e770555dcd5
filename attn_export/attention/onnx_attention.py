"""ONNX nodes that `Attention` modules emit while they are exported.

The canonical graph has one ai.onnx `Attention` node for each module, opset 23:
https://onnx.ai/onnx/operators/onnx__Attention.html. A cache that is written in place requires
opset 24: https://onnx.ai/onnx/operators/onnx__TensorScatter.html. Otherwise the exporter
would decompose `scaled_dot_product_attention` together with the cache and the causal mask. All
dialects are rewritten from this graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from attn_export.attention import functional

OPSET = 23
"""The first opset with `Attention`."""

_IN_PLACE_OPSET = 24
"""The first opset with `TensorScatter`, and with an `Attention` that has an input for the number of
valid keys of each batch element."""

_SOFTMAX_OUTPUT = 3
"""The `qk_matmul_output_mode` of `Attention` in which the fourth output is the softmax."""

_EXPORTING: ContextVar[bool] = ContextVar("attn_export_emitting", default=False)


@contextmanager
def emit_canonical_attention(*, emit: bool = True) -> Iterator[None]:
    """Make `Attention` modules emit ONNX nodes instead of computing, inside this block."""
    token = _EXPORTING.set(emit)
    try:
        yield
    finally:
        _EXPORTING.reset(token)


def emitting() -> bool:
    """Return whether `Attention` modules must emit ONNX nodes."""
    return _EXPORTING.get()


def attention_node(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_length: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Emit one `Attention` node.

    `query`: `[B, H, L, D]`.
    `key`: `[B, Hkv, S - P, D]`, without the past; `[B, Hkv, S, D]` if the cache is written in
    place.
    `value`: `[B, Hkv, S - P, Dv]`, or `[B, Hkv, S, Dv]`.
    `attn_mask`: Bool or float, broadcasts to `[B, H, L, S]`.
    `past_key`: `[B, Hkv, P, D]`; None if there is no past, or the cache is written in place.
    `past_value`: `[B, Hkv, P, Dv]` or None.
    `past_length`: The number of past keys of each batch element, int64 `[B]`, if the cache is
    written in place.

    Returns:
        The attention `[B, H, L, Dv]`, `present_key`, `present_value` and the weights
        `[B, H, L, S]`. Unused outputs are dropped from the node later.
    """
    B, H, L, _ = query.shape
    Hkv, S, D, Dv = key.shape[1], key.shape[2], key.shape[3], value.shape[3]
    cache_inputs = [past_key, past_value]
    if past_length is not None:
        cache_inputs = [None, None, past_length + L]
    elif past_key is not None:
        S = S + past_key.shape[2]
    shapes = ((B, H, L, Dv), (B, Hkv, S, D), (B, Hkv, S, Dv), (B, H, L, S))
    attended, present_key, present_value, weights = torch.onnx.ops.symbolic_multi_out(
        "Attention",
        (query, key, value, _expand_mask(attn_mask, L), *cache_inputs),
        {
            "is_causal": int(causal),
            "scale": scale,
            "softcap": softcap or 0.0,
            "qk_matmul_output_mode": _SOFTMAX_OUTPUT,
        },
        dtypes=(query.dtype,) * 4,
        shapes=shapes,
        version=OPSET if past_length is None else _IN_PLACE_OPSET,
    )
    return attended, present_key, present_value, weights


def append(past: Tensor | None, new: Tensor, past_length: Tensor | None) -> Tensor:
    """Return a cache `[B, Hkv, S, D]` with new keys or values; one in place by a `TensorScatter`.

    `past`: The cache, `[B, Hkv, P, D]`, or None.
    `new`: The new keys or values, `[B, Hkv, L, D]`.
    `past_length`: The number of past keys of each batch element, int64 `[B]`, if the cache is
    written in place.
    """
    if past is None:
        return new
    if past_length is None:
        return torch.cat([past, new], dim=2)
    if not emitting():
        return functional.scatter(past, new, past_length)
    return torch.onnx.ops.symbolic(
        "TensorScatter",
        (past, new, past_length),
        {"mode": "linear", "axis": -2},
        dtype=past.dtype,
        shape=past.shape,
        version=_IN_PLACE_OPSET,
    )


def sink_attention_nodes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor,
    *,
    causal: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Emit an `Attention` node for heads with sinks.

    The operator has no sinks, so a key is added. Key and value are 0, so the score is 0; the mask
    adds the sink to it.

    `query`: `[B, H, L, D]`.
    `key`: `[B, Hkv, S, D]`, with the past.
    `value`: `[B, Hkv, S, Dv]`, with the past.
    `sinks`: The score of the sink of each head, `[H]`.

    Returns:
        The attention `[B, H, L, Dv]` and the weights `[B, H, L, S]`.
    """
    B, H, L, _ = query.shape
    S = key.shape[2]
    if causal:
        attn_mask = functional.restrict(attn_mask, functional.causal_mask(L, S, query.device))
    mask = functional.as_float(attn_mask, (B, H, L, S), query)
    column = sinks.to(query.dtype)[None, :, None, None].expand(B, H, L, 1)
    zeros = [torch.zeros_like(x[:, :, :1]) for x in (key, value)]
    attended, _, _, weights = attention_node(
        query,
        torch.cat([key, zeros[0]], dim=2),
        torch.cat([value, zeros[1]], dim=2),
        torch.cat([mask, column], dim=-1),
        causal=False,
        **options,
    )
    return attended, weights[..., :S]


def _expand_mask(mask: Tensor | None, L: int) -> Tensor | None:
    """Return a mask of rank 2 or 4 whose query axis has L elements.

    ONNX Runtime rejects masks whose query axis is 1, such as key-padding masks, and runtimes
    interpret masks of rank 3 differently.
    """
    if mask is None:
        return None
    if mask.dim() == 3:
        mask = mask.unsqueeze(0)
    if mask.shape[-2] != 1:
        return mask
    return mask.expand(*mask.shape[:-2], L, mask.shape[-1])
