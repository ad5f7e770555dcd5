"""Functions of attention without projections: masks, scaled dot-product attention, caches in place.

Legend: B batch, H query heads, Hkv key/value heads, L query length, S key length
(past included), P past length, D head width, Dv value head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.interface import MASK_FLOOR
from attn_export.spec import AttentionSpec

# -- masks --------------------------------------------------------------------------------------

_MASK_FLOOR_FLOAT16 = -6e4
"""`MASK_FLOOR` for float16, whose largest number is 65504."""


def clamp_mask(mask: Tensor | None) -> Tensor | None:
    """Return a float mask, of any shape, with finite values clamped to at least `MASK_FLOOR`.

    A bool mask, or None, is returned as it is.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask
    floor = _MASK_FLOOR_FLOAT16 if mask.dtype == torch.float16 else MASK_FLOOR
    return torch.where(mask == -torch.inf, mask, mask.clamp(min=floor))


def causal_mask(L: int, S: int, device: torch.device) -> Tensor:
    """Return the causal mask, bool `[L, S]`: query i sees keys up to S - L + i."""
    return torch.ones(L, S, dtype=torch.bool, device=device).tril(S - L)


def restrict(mask: Tensor | None, shown: Tensor | None) -> Tensor | None:
    """Return `mask` in which the keys that `shown` hides are hidden, too.

    `mask`: Bool or float, broadcasts to `[B, H, L, S]`; None for no mask.
    `shown`: Bool, broadcasts to `[B, H, L, S]`: True = may attend; None for no mask.
    """
    if mask is None or shown is None:
        return shown if mask is None else mask
    if mask.dtype == torch.bool:
        return mask & shown
    return torch.where(shown, mask, mask.new_full((), -torch.inf))


def add_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Return `mask` and `bias` as one float mask.

    `mask`: Bool or float, broadcasts to `[B, H, L, S]`; None for no mask.
    `bias`: Float, broadcasts to `[B, H, L, S]`.
    """
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, bias.new_full((), -torch.inf))
    return mask + bias


def as_float(mask: Tensor | None, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    """Return a mask as a float mask that is expanded to `[B, H, L, S]`.

    `mask`: Bool or float, broadcasts to `[B, H, L, S]`; None for no mask.
    `shape`: The sizes `(B, H, L, S)`.
    """
    return add_bias(mask, like.new_zeros(shape)).expand(shape)


# -- additional keys: `add_bias_kv` and `add_zero_attn` of PyTorch ------------------------------


class AddedKeys(nn.Module):
    """Additional keys and values at the end, as in `torch.nn.MultiheadAttention`.

    `add_bias_kv` adds a learned key and value, then `add_zero_attn` a key and value of 0. Every
    query attends to them: no mask hides them.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.add_bias_kv:
            Hkv, D, Dv = spec.num_kv_heads, spec.head_dim, spec.v_head_dim
            self.bias_k: nn.Parameter = nn.Parameter(nn.init.xavier_normal_(torch.empty(Hkv, D)))
            self.bias_v: nn.Parameter = nn.Parameter(nn.init.xavier_normal_(torch.empty(Hkv, Dv)))

    def forward(
        self,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        L: int,
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and mask with the added keys, A of them, appended.

        `key`: `[B, Hkv, S, D]`.
        `value`: `[B, Hkv, S, Dv]`.
        `mask`: Bool or float, broadcasts to `[B, H, L, S]`; None for no mask.

        Returns:
            `[B, Hkv, S + A, D]`, `[B, Hkv, S + A, Dv]`, and the mask that includes the causal one;
            None if nothing is hidden.
        """
        count = self.spec.added_keys
        if causal:
            mask = restrict(mask, causal_mask(L, key.shape[2], key.device))
        if mask is not None:
            visible: bool | float = True if mask.dtype == torch.bool else 0.0
            mask = torch.cat([mask, mask.new_full((*mask.shape[:-1], count), visible)], dim=-1)
        if self.spec.add_bias_kv:
            key = torch.cat([key, _expand_to_batch(self.bias_k, key)], dim=2)
            value = torch.cat([value, _expand_to_batch(self.bias_v, value)], dim=2)
        if self.spec.add_zero_attn:
            key, value = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (key, value))
        return key, value, mask


def _expand_to_batch(x: Tensor, like: Tensor) -> Tensor:
    """Expand `[Hkv, D]` to `[B, Hkv, 1, D]`, B of `like`."""
    return x[None, :, None, :].expand(like.shape[0], -1, -1, -1)


# -- attention ----------------------------------------------------------------------------------


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
    """Compute softmax(scale * Q K^T + mask) V (Vaswani et al. 2017, eq. 1), with softcap and sinks.

    Query head h attends to key/value head ``h // (H // Hkv)``. Unlike in PyTorch's function of this
    name, `causal` is aligned to the last key, and for a query that may attend to no key the result
    and the weights are 0.

    `query`: `[B, H, L, D]`.
    `key`: `[B, Hkv, S, D]`; S = P + L if there is a past.
    `value`: `[B, Hkv, S, Dv]`.
    `attn_mask`: Bool (True = may attend) or float (added; -inf = may not attend), broadcasts to
    `[B, H, L, S]`.
    `sinks`: For each head a score that takes part in the softmax but has no key, `[H]`.

    Returns:
        The attention `[B, H, L, Dv]`, and the weights `[B, H, L, S]` or None.
    """
    L, S = query.shape[2], key.shape[2]
    mask = clamp_mask(attn_mask)
    stepwise = need_weights or softcap is not None or sinks is not None
    is_causal = causal and mask is None and L == S and not stepwise
    if causal and not is_causal:
        mask = restrict(mask, causal_mask(L, S, query.device))
    if not stepwise:
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal,
            scale=scale, enable_gqa=True,
        )  # fmt: skip
        return attended, None
    attended, weights = _step_by_step(query, key, value, mask, scale, softcap, sinks, dropout)
    return attended, weights if need_weights else None


def _step_by_step(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float,
    softcap: float | None, sinks: Tensor | None, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention and its weights step by step, for options that PyTorch's function lacks."""
    # Repeated heads are bitwise equal to an MHA with repeated heads; a broadcast matmul is not.
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
    # Softmax over no key is 0/0. Such rows get scores of 0 first, so that neither they nor
    # their gradients are NaN, and weights of 0 afterwards.
    masked = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(masked, 0.0).softmax(dim=-1).masked_fill(masked, 0.0)


# -- a cache in place: new keys are written into its buffers ------------------------------------

# Legend: S capacity of the buffers. Batch element b has `past_length[b]` keys before L new ones.


Past = tuple[Tensor | None, Tensor | None]
"""Cached keys and values, in the type of the cache; None for no past."""


def scatter(past: Tensor, new: Tensor, past_length: Tensor) -> Tensor:
    """Return a copy of a buffer with new keys or values after the past of each batch element.

    `past`: The buffer, `[B, Hkv, S, D]`.
    `new`: The new keys or values, `[B, Hkv, L, D]`.
    `past_length`: The number of past keys of each batch element, int64 `[B]`.
    """
    indices = positions(past_length, new.shape[2])[:, None, :, None]
    return past.scatter(2, indices.expand(new.shape), new)


def positions(past_length: Tensor, L: int) -> Tensor:
    """Return the positions of the new keys and queries, int64 `[B, L]`.

    `past_length`: The number of past keys of each batch element, int64 `[B]`.
    """
    return past_length[:, None] + torch.arange(L, device=past_length.device)


def visible_keys(past_length: Tensor, L: int, S: int, *, causal: bool) -> Tensor:
    """Return the mask of the keys in use, bool `[B, 1, L, S]`, or `[B, 1, 1, S]` if not causal.

    `past_length`: The number of past keys of each batch element, int64 `[B]`.
    """
    last = positions(past_length, L) if causal else past_length[:, None] + (L - 1)
    shown = torch.arange(S, device=past_length.device) <= last[..., None]  # [B, L or 1, S]
    return shown.unsqueeze(1)
