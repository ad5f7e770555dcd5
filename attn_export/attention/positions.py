"""Distances between queries and keys: ALiBi, T5's relative bias, windows.

Legend: L queries, S keys at positions 0 … S - 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def distances(queries: Tensor, S: int) -> Tensor:
    """Return key position minus query position, int64 `[L, S]` or `[B, L, S]`.

    Args:
        queries: Their positions, `[L]`, or `[B, L]` where every row has its own.
        S: The number of keys.
    """
    return torch.arange(S, device=queries.device) - queries[..., None]


def window(offsets: Tensor, left: int | None, right: int | None) -> Tensor | None:
    """Return the keys that a window shows, bool like `offsets`; None without a window.

    Args:
        offsets: Key position minus query position.
        left: The number of visible keys before the query's own; None for all.
        right: The number of visible keys after it; None for all.
    """
    shown = None if left is None else offsets >= -left
    if right is not None:
        shown = offsets <= right if shown is None else shown & (offsets <= right)
    return shown


def alibi_slopes(heads: int) -> list[float]:
    """Return one slope for each head: 2^(-8h/H) for powers of 2 (Press et al. 2022, sec. 3).

    Other numbers of heads take the slopes of the power of 2 below, then every other one of the
    power above, as in the paper's code.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]


def relative_buckets(buckets: int, max_distance: int, *, both_sides: bool) -> Tensor:
    """Return the bucket of every offset in [-max_distance, max_distance], int64 `[2 * max + 1]`.

    Of the buckets of one side, half are distances of their own, the others grow logarithmically
    (Raffel et al. 2020, sec. 2.1). A table, since a logarithm at the edge of a bucket rounds
    differently in every runtime.

    Args:
        buckets: The number of buckets.
        max_distance: Distances from here on share the last bucket.
        both_sides: Whether keys after the query have buckets of their own, the second half.
    """
    one_side = buckets // 2 if both_sides else buckets
    exact = one_side // 2
    distance = torch.arange(max_distance + 1)
    share = (distance.clamp(min=1) / exact).log() / math.log(max_distance / exact)
    far = exact + (share * (one_side - exact)).to(torch.int64)
    before = torch.where(distance < exact, distance, far.clamp(max=one_side - 1))
    after = before[1:] + one_side if both_sides else torch.zeros_like(before[1:])
    return torch.cat([before.flip(0), after])
