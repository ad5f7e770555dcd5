"""The mathematics of attention, without projections.

Legend: B batch, H query heads, Hkv key/value heads, L query length, S key length
(past included), P past length, D head width, Dv value head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MASK_FLOOR = -1e30
"""Finite values of a float mask are clamped to this: runtimes differ below it (ONNX
Runtime takes finfo.min for "masked", PyTorch does not), and agree above it."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax(scale * Q K^T + mask) V (Vaswani et al. 2017, eq. 1).

    Query head h attends to key/value head ``h // (H // Hkv)``. A row that may attend to
    nothing gives 0, and its weights are 0.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, Hkv, S, D]`, S = P + L where there is a past.
        value: `[B, Hkv, S, Dv]`.
        attn_mask: Bool (True = may attend) or float (added; -inf = may not attend),
            broadcasts to `[B, H, L, S]`.
        causal: Whether query i sees keys up to S - L + i only.
        scale: Factor on the scores.
        dropout: Probability of dropping a weight. 0 outside training.
        need_weights: Whether to return the weights.

    Returns:
        The attention `[B, H, L, Dv]`, and the weights `[B, H, L, S]` or None.
    """
    mask = clamp_mask(attn_mask)
    if causal and mask is None and query.shape[2] == key.shape[2] and not need_weights:
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=True
        )
        return attended, None
    if causal:
        mask = _and_causal(mask, query.shape[2], key.shape[2], query.device)
    if need_weights:
        return _with_weights(query, key, value, mask, scale, dropout)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=True
    )
    return attended, None


def clamp_mask(mask: Tensor | None) -> Tensor | None:
    """A float mask with its finite values at least `MASK_FLOOR`; a bool mask as it is."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return torch.where(mask == -torch.inf, mask, mask.clamp(min=MASK_FLOOR))


def _and_causal(mask: Tensor | None, L: int, S: int, device: torch.device) -> Tensor:
    """`mask` and "query i sees keys up to S - L + i": `[L, S]` or the shape of `mask`."""
    causal = torch.ones(L, S, dtype=torch.bool, device=device).tril(S - L)
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)


def _with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float
) -> tuple[Tensor, Tensor]:
    """The same attention step by step, for those who want to see the weights."""
    # Repeated rather than broadcast: a broadcast matmul rounds otherwise than that of an MHA
    # with repeated heads, to which this is equal to the bit.
    repeats = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (key, value))  # [B, H, S, ...]
    scores = (query @ k.transpose(-1, -2)) * scale  # [B, H, L, S]
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    # Softmax over nothing is 0/0. Such rows get scores of 0 first, so that neither they nor
    # their gradients are NaN, and weights of 0 afterwards.
    nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)
    return F.dropout(weights, dropout) @ v, weights
