"""Masks: which keys a query may attend to, and what is added to their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_export.spec.mask import MASK_FLOOR

MASK_FLOOR_FLOAT16 = -6e4
"""`MASK_FLOOR` for float16, which ends at 65504."""


def clamp_mask(mask: Tensor | None) -> Tensor | None:
    """A float mask with its finite values at least `MASK_FLOOR`; a bool mask as it is."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    floor = MASK_FLOOR_FLOAT16 if mask.dtype == torch.float16 else MASK_FLOOR
    return torch.where(mask == -torch.inf, mask, mask.clamp(min=floor))


def causal(L: int, S: int, device: torch.device) -> Tensor:
    """Query i sees keys up to S - L + i: bool `[L, S]`."""
    return torch.ones(L, S, dtype=torch.bool, device=device).tril(S - L)


def restrict(mask: Tensor | None, shown: Tensor | None) -> Tensor | None:
    """`mask`, with every key hidden that `shown` (bool) does not show."""
    if mask is None or shown is None:
        return shown if mask is None else mask
    if mask.dtype == torch.bool:
        return mask & shown
    return torch.where(
        shown, mask, torch.full((), -torch.inf, dtype=mask.dtype, device=mask.device)
    )


def add_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """`mask` as a float mask with `bias` added to the scores."""
    if bias is None:
        return mask
    if mask is None:
        return bias
    return restrict(bias, mask) if mask.dtype == torch.bool else mask + bias


def as_float(mask: Tensor | None, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    """A mask in full, as scores to add, `shape` `[B, H, L, S]` of the dtype of `like`."""
    zeros = like.new_zeros(shape)
    added = add_bias(mask, zeros)
    return zeros if added is None else added.expand(shape)
