"""A cache that stays where it is: new keys are written into its buffers, row by row.

Legend: B batch, L new keys, S capacity of the buffers; row b holds `past_length[b]` keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def written(past: Tensor, new: Tensor, past_length: Tensor) -> Tensor:
    """A copy of `past` `[B, Hkv, S, D]` with `new` `[B, Hkv, L, D]` after what each row holds.

    Raises:
        RuntimeError: If a row has no room for L more.
    """
    places = positions(past_length, new.shape[2])[:, None, :, None]
    return past.scatter(2, places.expand(new.shape), new)


def positions(past_length: Tensor, L: int) -> Tensor:
    """Where the new keys and queries of each row are, int64 `[B, L]`."""
    return past_length[:, None] + torch.arange(L, device=past_length.device)


def visible(past_length: Tensor, L: int, S: int, *, causal: bool) -> Tensor:
    """Which keys hold something that a query may see, bool `[B, 1, L, S]`, L 1 if not causal."""
    last = positions(past_length, L) if causal else past_length[:, None] + (L - 1)
    shown = torch.arange(S, device=past_length.device) <= last[..., None]  # [B, L or 1, S]
    return shown.unsqueeze(1)
