"""Cases of a float16 cache whose large numbers are certain, and the error that small ones allow.

A value in float32 that lies near the middle of two float16 numbers may become either of them, as
`near_ties` says of integers. Queries are moved until no large value lies there. The error of small
values may be as large as the step between their neighbours, so these lie near a tie anyway: a right
graph may take either neighbour. The runs that round at random then take either, by chance, so that
the error allowed is that of such steps and no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from attn_export.attention import Attention
from attn_export.attention.quantised_cache import Pair
from attn_export.parity.cache_quotients import (
    CacheQuotients,
    distance,
    margin_of,
    moved_along_gradients,
)
from attn_export.parity.draw import seed_of
from attn_export.results import Case


@dataclasses.dataclass(frozen=True)
class Float16Rows:
    """New keys and values of a case as float16 numbers, in float64.

    Attributes:
        nearest: The truth: keys `[B, Hkv, L, D]` and values `[B, Hkv, L, Dv]`.
        other: The neighbours on the other side of each value, of the same shapes.
        near: Where values are so near the middle that either is right.
        overflow: Whether a finite value became infinite.
    """

    nearest: Pair
    other: Pair
    near: Pair
    overflow: bool

    @property
    def uncertain_tokens(self) -> int:
        """The number of tokens that have a value near a tie."""
        tokens = (near.any(-1).any(1) for near in self.near)  # [B, L]
        return int(torch.stack(list(tokens)).any(0).sum())

    def drawn(self, number: int) -> Pair:
        """Return rows that take either neighbour where both are right.

        Args:
            number: The number of the run: the first takes the other one everywhere, later ones
                draw.
        """
        random = torch.Generator().manual_seed(seed_of("float16", number))
        found: list[Tensor] = []
        for nearest, other, near in zip(self.nearest, self.other, self.near, strict=True):
            drawn = torch.rand(near.shape, generator=random) < 0.5 if number else near
            found.append(torch.where(near & drawn, other, nearest))
        return found[0], found[1]


def away_from_ties(case: Case, module: Attention) -> Case:
    """Return a case whose large keys and values are certain as float16 numbers.

    All values near a tie move at once, along the slope of the sum of their squared ways: what a
    few of many channels lack takes few steps so. Where some stay near one, the error allowed is
    larger.

    Args:
        case: The case; its query may be moved by a little.
        module: A float64 copy of an `Attention` with a cache in float16.
    """
    return moved_along_gradients(case, module, _all_at_once)[0]


def _all_at_once(shift: Tensor, units: Tensor | None) -> tuple[Tensor, Tensor]:
    """Move all values of each token, as far as each lacks in absolute terms."""
    assert units is not None
    return shift * units.square(), (shift * units).square().sum(-1, keepdim=True)


@torch.no_grad()
def float16_rows(module: Attention, case: Case) -> Float16Rows:
    """Return the new keys and values of a case, and the other numbers that are right.

    Args:
        module: A float64 copy of an `Attention` with a cache in float16.
        case: The case.
    """
    quotients = CacheQuotients(module, case)
    query = case.inputs["query"]
    margin = margin_of(quotients, query)
    values = quotients(torch.from_numpy(query.astype(np.float64)))
    units = quotients.units
    assert units is not None
    near = (distance(values) < margin) & values.isfinite()
    whole = values.round()
    other = whole + torch.where(values >= whole, 1.0, -1.0)
    spec = module.spec
    widths = [spec.num_kv_heads * width for width in spec.cache_widths]

    def rows(x: Tensor) -> Pair:
        """Return `[B, L, N]` as keys and values `[B, Hkv, L, .]`."""
        heads = (part.unflatten(-1, (spec.num_kv_heads, -1)) for part in x.split(widths, -1))
        key, value = (part.transpose(1, 2) for part in heads)
        return key, value

    rounding = module.kv_scales
    assert rounding is not None
    nearest = rounding(*quotients.rows)
    before_and_after = zip(quotients.rows, nearest, strict=True)
    overflow = any(bool((x.isfinite() & ~y.isfinite()).any()) for x, y in before_and_after)
    return Float16Rows(nearest, rows(other * units), rows(near), overflow)


@contextlib.contextmanager
def rounding_to(rows: Pair, module: Attention) -> Iterator[None]:
    """Let runs of a module keep these new keys and values inside this block.

    Args:
        rows: Float16 numbers, in any type.
        module: Changed for the time of the block.
    """
    rounding = module.kv_scales
    assert rounding is not None

    def replace(_: object, __: object, own: Pair) -> Pair:
        return rows[0].to(own[0].dtype), rows[1].to(own[1].dtype)

    hook = rounding.register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()
