"""The mathematics of attention, without projections: masks, the operator, a cache in place.

Legend: B batch, H query heads, Hkv key/value heads, L query length, S key length
(past included), P past length, D head width, Dv value head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.spec import AttentionSpec
from attn_export.spec.inputs import MASK_FLOOR

# -- masks: the keys that a query may attend to, the bias on their scores, and added keys -------

MASK_FLOOR_FLOAT16 = -6e4
"""`MASK_FLOOR` for float16, which ends at 65504."""


def clamp_mask(mask: Tensor | None) -> Tensor | None:
    """Return a float mask with finite values clamped to at least `MASK_FLOOR`; keep a bool mask."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    floor = MASK_FLOOR_FLOAT16 if mask.dtype == torch.float16 else MASK_FLOOR
    return torch.where(mask == -torch.inf, mask, mask.clamp(min=floor))


def causal_mask(L: int, S: int, device: torch.device) -> Tensor:
    """Return the causal mask, bool `[L, S]`: query i sees keys up to S - L + i.

    Args:
        L: The number of queries.
        S: The number of keys.
        device: The device of the mask.
    """
    return torch.ones(L, S, dtype=torch.bool, device=device).tril(S - L)


def restrict(mask: Tensor | None, shown: Tensor | None) -> Tensor | None:
    """Return `mask` with every key hidden that the bool mask `shown` does not show.

    Args:
        mask: Bool or float, broadcasts to `[B, H, L, S]`; None for no mask.
        shown: Bool, broadcasts to `[B, H, L, S]`: True where a key may be seen.
    """
    if mask is None or shown is None:
        return shown if mask is None else mask
    if mask.dtype == torch.bool:
        return mask & shown
    return torch.where(
        shown, mask, torch.full((), -torch.inf, dtype=mask.dtype, device=mask.device)
    )


def add_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return `mask` as a float mask with `bias` added to the scores.

    Args:
        mask: Bool or float, broadcasts to `[B, H, L, S]`; None for no mask.
        bias: Float, broadcasts to `[B, H, L, S]`.
    """
    if bias is None:
        return mask
    if mask is None:
        return bias
    return restrict(bias, mask) if mask.dtype == torch.bool else mask + bias


def as_float(mask: Tensor | None, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    """Expand a mask to additive scores of `shape` `[B, H, L, S]` in the dtype of `like`.

    Args:
        mask: A bool or float mask, or None.
        shape: `[B, H, L, S]`.
        like: A tensor of the wanted dtype and device.
    """
    zeros = like.new_zeros(shape)
    added = add_bias(mask, zeros)
    return zeros if added is None else added.expand(shape)


# -- additional keys at the end: `add_bias_kv` and `add_zero_attn` of PyTorch ---------------------


class AddedKeys(nn.Module):
    """A learned key and value, and a key and value of 0, as far as a spec has them.

    They come after all other keys, in this order, and every query sees them: no mask hides them
    (`torch.nn.MultiheadAttention`).

    Args:
        spec: Its `add_bias_kv` and `add_zero_attn` are used.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.add_bias_kv:
            Hkv, D, Dv = spec.num_kv_heads, spec.head_dim, spec.v_head_dim
            self.bias_k = nn.Parameter(nn.init.xavier_normal_(torch.empty(Hkv, D)))
            self.bias_v = nn.Parameter(nn.init.xavier_normal_(torch.empty(Hkv, Dv)))

    def forward(
        self,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        L: int,
        *,
        causal: bool,
        mixed: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys `[B, Hkv, S, D]`, values and mask with the added keys appended.

        The mask that comes back holds the causal one too.

        Args:
            key: `[B, Hkv, S, D]`.
            value: `[B, Hkv, S, Dv]`.
            mask: The mask that broadcasts to `[B, H, L, S]`, or None.
            L: The number of queries.
            causal: Whether query i sees keys up to P + i only.
            mixed: Applied to a learned key as to all others: a rotation, or nothing.
        """
        count = self.spec.added_keys
        if causal:
            mask = restrict(mask, causal_mask(L, key.shape[2], key.device))
        if mask is not None:
            visible: bool | float = True if mask.dtype == torch.bool else 0.0
            mask = torch.cat([mask, mask.new_full((*mask.shape[:-1], count), visible)], dim=-1)
        if self.spec.add_bias_kv:
            key = torch.cat([key, _of_every_batch(mixed(self.bias_k), key)], dim=2)
            value = torch.cat([value, _of_every_batch(self.bias_v, value)], dim=2)
        if self.spec.add_zero_attn:
            key, value = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (key, value))
        return key, value, mask


def _of_every_batch(one: Tensor, like: Tensor) -> Tensor:
    """Expand `[Hkv, D]` to `[B, Hkv, 1, D]`."""
    return one[None, :, None, :].expand(like.shape[0], -1, -1, -1)


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
    mask = clamp_mask(attn_mask)
    by_hand = need_weights or softcap is not None or sinks is not None
    if causal and mask is None and L == S and not by_hand:
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=True
        )
        return attended, None
    if causal:
        mask = restrict(mask, causal_mask(L, S, query.device))
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
