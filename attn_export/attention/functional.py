"""The mathematics of attention, without projections.

Legend: B batch, H query heads, Hkv key/value heads, L query length, S key length
(past included), P past length, D head width, Dv value head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_export.attention import masking


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax(scale * Q K^T + mask) V (Vaswani et al. 2017, eq. 1).

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
        softcap: Scores become softcap * tanh(score / softcap) before the mask.
        sinks: A score for each head that takes part in the softmax and stands for no key, `[H]`.
        dropout: Probability of dropping a weight. 0 outside training.
        need_weights: Whether to return the weights.

    Returns:
        The attention `[B, H, L, Dv]`, and the weights `[B, H, L, S]` or None.
    """
    L, S = query.shape[2], key.shape[2]
    mask = masking.clamp_mask(attn_mask)
    by_hand = need_weights or softcap is not None or sinks is not None
    if causal and mask is None and L == S and not by_hand:
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=True
        )
        return attended, None
    if causal:
        mask = masking.restrict(mask, masking.causal_mask(L, S, query.device))
    if not by_hand:
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=True
        )
        return attended, None
    attended, weights = _step_by_step(query, key, value, mask, scale, softcap, sinks, dropout)
    return attended, weights if need_weights else None


def _step_by_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Compute the same attention step by step, for options that PyTorch's own function lacks."""
    # Repeated rather than broadcast: a broadcast matmul rounds otherwise than that of an MHA
    # with repeated heads, to which this is equal to the bit.
    repeats = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (key, value))  # [B, H, S, ...]
    scores = (query @ k.transpose(-1, -2)) * scale  # [B, H, L, S]
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    weights = _softmax(scores, sinks)
    return F.dropout(weights, dropout) @ v, weights


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    # Softmax over nothing is 0/0. Such rows get scores of 0 first, so that neither they nor
    # their gradients are NaN, and weights of 0 afterwards.
    nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)


# -- a cache that stays where it is: new keys are written into its buffers, row by row ----------

# Legend: S capacity of the buffers; row b holds `past_length[b]` keys before L new ones.


def written(past: Tensor, new: Tensor, past_length: Tensor) -> Tensor:
    """Return a copy of `past` `[B, Hkv, S, D]` with `new` `[B, Hkv, L, D]` after each row's keys.

    Args:
        past: The buffer.
        new: The new keys or values.
        past_length: The number of keys of each row, int64 `[B]`.

    Raises:
        RuntimeError: If a row lacks capacity for L more keys.
    """
    places = positions(past_length, new.shape[2])[:, None, :, None]
    return past.scatter(2, places.expand(new.shape), new)


def positions(past_length: Tensor, L: int) -> Tensor:
    """Return the positions of the new keys and queries of each row, int64 `[B, L]`.

    Args:
        past_length: Filled rows of the cache, int64 `[B]`.
        L: The number of new keys.
    """
    return past_length[:, None] + torch.arange(L, device=past_length.device)


def visible(past_length: Tensor, L: int, S: int, *, causal: bool) -> Tensor:
    """Return the valid keys that a query may see, bool `[B, 1, L, S]`; L is 1 if not causal.

    Args:
        past_length: The number of past keys of each row, int64 `[B]`.
        L: The number of new keys.
        S: The capacity.
        causal: Whether later keys are hidden.
    """
    last = positions(past_length, L) if causal else past_length[:, None] + (L - 1)
    shown = torch.arange(S, device=past_length.device) <= last[..., None]  # [B, L or 1, S]
    return shown.unsqueeze(1)
