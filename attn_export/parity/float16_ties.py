"""Rounding ties of a float16 cache: queries moved off ties, and values that may round either way.

A float32 value near the middle of two neighbouring float16 numbers may become either of them (see
`near_ties` for integers). Queries are moved until no large value is near a tie. The rounding error
of small values may be as large as the spacing of float16, so they are near a tie wherever they are,
and a correct graph may take either neighbour. The runs with random rounding choose one at random,
so that the allowed error covers these choices and no more.
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
    compute_margin,
    distance_from_tie,
    move_along_gradients,
)
from attn_export.parity.draw import seed_of
from attn_export.results import Case


@dataclasses.dataclass(frozen=True)
class Float16Values:
    """New keys and values of a case, rounded to float16 and held in float64.

    Attributes:
        nearest: The nearest float16 numbers, which are the truth: keys `[B, Hkv, L, D]` and values
            `[B, Hkv, L, Dv]`.
        other: The float16 neighbour on the other side of each value, of the same shapes.
        near: Masks of the values so near a tie that either neighbour is correct.
        overflow: Whether a finite value became infinite.
    """

    nearest: Pair
    other: Pair
    near: Pair
    overflow: bool

    @property
    def uncertain_tokens(self) -> int:
        """The number of tokens with at least one value near a tie."""
        tokens = (near.any(-1).any(1) for near in self.near)  # [B, L]
        return int(torch.stack(list(tokens)).any(0).sum())

    def draw(self, number: int) -> Pair:
        """Return keys `[B, Hkv, L, D]` and values; those near a tie may take their other neighbour.

        Args:
            number: The number of the run. In run 0 all values near a tie take the other neighbour;
                in later runs each takes it with probability 0.5.
        """
        random = torch.Generator().manual_seed(seed_of("float16", number))
        pair: list[Tensor] = []
        for nearest, other, near in zip(self.nearest, self.other, self.near, strict=True):
            takes_other = torch.rand(near.shape, generator=random) < 0.5 if number else near
            pair.append(torch.where(near & takes_other, other, nearest))
        return pair[0], pair[1]


def move_off_ties(case: Case, module: Attention) -> Case:
    """Return a case whose large new keys and values are not near float16 rounding ties.

    All values of a token that are near a tie move at once, along the gradient of the sum of their
    squared shifts. This takes few steps if few of many channels are near ties. Values that stay
    near a tie increase the allowed error.

    Args:
        case: The case; its query may be moved by a little.
        module: A float64 copy of an `Attention` with a cache in float16.
    """
    return move_along_gradients(case, module, _weigh_all)[0]


def _weigh_all(shift: Tensor, units: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights that move all values of a token at once, and the change that their sum needs.

    Shifts are multiplied by `units`, so that they count as differences of cached values.
    """
    assert units is not None
    return shift * units.square(), (shift * units).square().sum(-1, keepdim=True)


@torch.no_grad()
def round_to_float16(module: Attention, case: Case) -> Float16Values:
    """Return the new keys and values of a case, with both neighbours of values near a tie.

    Args:
        module: A float64 copy of an `Attention` with a cache in float16.
        case: The case.
    """
    quotients = CacheQuotients(module, case)
    query = case.inputs["query"]
    margin = compute_margin(quotients, query)
    values = quotients(torch.from_numpy(query.astype(np.float64)))
    units = quotients.units
    assert units is not None
    near = (distance_from_tie(values) < margin) & values.isfinite()
    whole = values.round()
    other = whole + torch.where(values >= whole, 1.0, -1.0)
    spec = module.spec
    widths = [spec.num_kv_heads * width for width in spec.cache_widths]

    def as_pair(x: Tensor) -> Pair:
        """Split `[B, L, N]` into keys `[B, Hkv, L, D]` and values `[B, Hkv, L, Dv]`."""
        heads = (part.unflatten(-1, (spec.num_kv_heads, -1)) for part in x.split(widths, -1))
        key, value = (part.transpose(1, 2) for part in heads)
        return key, value

    rounding = module.kv_scales
    assert rounding is not None
    nearest = rounding(*quotients.new_pair)
    before_and_after = zip(quotients.new_pair, nearest, strict=True)
    overflow = any(bool((x.isfinite() & ~y.isfinite()).any()) for x, y in before_and_after)
    return Float16Values(nearest, as_pair(other * units), as_pair(near), overflow)


@contextlib.contextmanager
def force_cache_values(pair: Pair, module: Attention) -> Iterator[None]:
    """Replace the new keys and values that a module puts into its cache inside this block.

    Args:
        pair: Keys `[B, Hkv, L, D]` and values `[B, Hkv, L, Dv]`: float16 numbers, in any floating
            type.
        module: The module.
    """
    rounding = module.kv_scales
    assert rounding is not None

    def replace(_: object, __: object, rounded: Pair) -> Pair:
        return pair[0].to(rounded[0].dtype), pair[1].to(rounded[1].dtype)

    hook = rounding.register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()
