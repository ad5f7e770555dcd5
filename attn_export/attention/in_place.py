"""A cache that stays where it is: new keys are written into its buffers, row by row.

Legend: B batch, L new keys, S capacity of the buffers; row b holds `past_length[b]` keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
