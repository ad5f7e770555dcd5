"""Masks: which keys a query may attend to, and the bias on their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_export.spec.inputs import MASK_FLOOR

MASK_FLOOR_FLOAT16 = -6e4
"""`MASK_FLOOR` for float16, which ends at 65504."""


def clamp_mask(mask: Tensor | None) -> Tensor | None:
    """Return a float mask with finite values clamped to at least `MASK_FLOOR`; keep a bool mask."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    floor = MASK_FLOOR_FLOAT16 if mask.dtype == torch.float16 else MASK_FLOOR
    return torch.where(mask == -torch.inf, mask, mask.clamp(min=floor))


def causal(L: int, S: int, device: torch.device) -> Tensor:
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
