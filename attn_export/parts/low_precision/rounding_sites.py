"""What a layer rounds to integers or float16, and the margins within which errors decide.

A site is one rounding of a run: that of a projection's input, if activations are quantised, or that
of new keys and values, if the cache has another type than the layer. Its quotients are in steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attn_export.attention import Attention
from attn_export.attention.quantised_activations import DynamicInt8PerBlock, QuantisedActivations
from attn_export.attention.quantised_cache import CacheRounding, Quotients
from attn_export.cases.draw import seed_of
from attn_export.measures import EPS_FLOAT32
from attn_export.quantiser import MIDDLE, RANGES
from attn_export.spec import AttentionSpec

SAFETY, LEAST = 5.0, 8.0
"""The factor of a margin on the largest error of runs with random rounding, and its least value, in
units of float32's eps times the quotient: a quotient by a scale, or a product with its inverse,
rounds up to three times."""

FLOAT_SAFETY, FLOAT_LEAST = 3.5, 1.0
"""The same for a cache in floating point: nothing is divided by a scale, and near a tie either
neighbour is accepted."""

_SATURATE_FROM = 0.2
"""The margin from which on values are moved into saturation, since no value between two ties
would be far enough from both."""

Numbers = Sequence[Tensor]
"""A number for each quotient, by part: `[B, Hkv, L, n]` of a cache, `[B, L, N]` of a projection."""


@dataclasses.dataclass(frozen=True)
class Site:
    """One rounding of a run, with the values that it rounds: an input, or keys and values."""

    rounding: QuantisedActivations | CacheRounding
    values: tuple[Tensor, ...]

    @functools.cached_property
    def parts(self) -> list[Quotients]:
        """The quotients of the values, see `Numbers`."""
        return self.rounding.quotients(*self.values)

    @property
    def rounded(self) -> tuple[Tensor, ...]:
        """The integers of an input, or keys and values in the type of the cache."""
        if isinstance(self.rounding, QuantisedActivations):
            return (self.rounding.integers(*self.values),)
        return self.rounding.forward(*self.values)

    def margins(self, noisy: Sequence[Site], heads: int) -> Numbers:
        """Return the distances from ties that errors do not exceed, one for each head of a token.

        `noisy`: The same site in runs with random rounding.
        """
        runs = zip(*(site.parts for site in noisy), strict=True)
        margins = []
        for part, others in zip(self.parts, runs, strict=True):
            x = part.values * part.units
            largest = torch.stack([y.values * y.units - x for y in others]).abs().amax(0)
            safety, least = (FLOAT_SAFETY, FLOAT_LEAST) if part.is_float else (SAFETY, LEAST)
            margin = safety * largest + least * EPS_FLOAT32 * x.abs()
            by_head = margin.unflatten(-1, (heads, -1)) if margin.dim() == 3 else margin
            by_head = by_head.amax(-1, keepdim=True).expand_as(by_head)
            margins.append(by_head.reshape(x.shape) / part.units)
        return margins

    def near(self, margins: Numbers) -> Numbers:
        """Return masks of the quotients that lie within their margin of a tie."""
        return [
            ((part.values - _ties(part)).abs() < margin) & part.values.isfinite()
            for part, margin in zip(self.parts, margins, strict=True)
        ]

    def tokens_near(self, margins: Numbers) -> Tensor:
        """Return a mask of the tokens with a quotient near a tie, `[B, L]`."""
        masks = (x.any(-1) for x in self.near(margins))
        return functools.reduce(torch.logical_or, (x.any(1) if x.dim() == 3 else x for x in masks))

    def shifts(self, margins: Numbers) -> list[Tensor]:
        """Return the signed distance that each quotient must move, 0 if it is off ties."""
        shifts = []
        for part, margin, near in zip(self.parts, margins, self.near(margins), strict=True):
            x, tie = part.values, _ties(part)
            beside = tie + torch.where(x >= tie, 2 * margin, -2 * margin)
            ends = torch.where(x < 0, part.low + 0.5 - 2 * margin, part.high - 0.5 + 2 * margin)
            target = torch.where(margin < _SATURATE_FROM, beside, ends)
            # A cache in floating point has no ends: its smallest values stay where they are.
            shifts.append(torch.where(near & target.isfinite(), target - x, 0.0))
        return shifts


def _ties(part: Quotients) -> Tensor:
    """Return the nearest tie of each quotient; beyond the last ones, values saturate."""
    return (part.values.floor() + 0.5).clamp(part.low + 0.5, part.high - 0.5)


def _roundings(module: Attention) -> list[QuantisedActivations | CacheRounding]:
    found = (module.activations, module.kv_scales)
    return [x for x in found if isinstance(x, (QuantisedActivations, CacheRounding))]


def sites_of(module: Attention, run: Callable[[], object]) -> list[Site]:
    """Return the sites of a run of a module, in order; the last one of projections is `out`'s."""
    sites: list[Site] = []

    def record(rounding: Any, values: tuple[Tensor, ...]) -> None:
        sites.append(Site(rounding, values))

    with contextlib.ExitStack() as hooks:
        for rounding in _roundings(module):
            hooks.enter_context(rounding.register_forward_pre_hook(record))
        run()
    return sites


@contextlib.contextmanager
def settled(sites: Sequence[Site], *modules: Attention) -> Iterator[None]:
    """Let modules round to the numbers of these sites inside this block.

    Scales of activations stay their own. Runs stacked along the batch axis get the same numbers.
    """

    def hook(rounding: nn.Module, own: Sequence[Site]) -> RemovableHandle:
        # Random rounding would change quotients near ties, so they are not computed in the runs.
        following = itertools.cycle([site.rounded for site in own])

        def replace(_: nn.Module, args: tuple[Tensor, ...], rounded: Any) -> Any:
            numbers = next(following)
            if isinstance(rounding, QuantisedActivations):
                return _fit(numbers[0], rounded) * rounding.scales(args[0])
            return tuple(_fit(x, y) for x, y in zip(numbers, rounded, strict=True))

        return rounding.register_forward_hook(replace)

    kinds = (QuantisedActivations, CacheRounding)
    by_kind = {kind: [x for x in sites if isinstance(x.rounding, kind)] for kind in kinds}
    found = [(x, kind) for module in modules for x in _roundings(module) for kind in kinds]
    with contextlib.ExitStack() as hooks:
        for x, kind in found:
            if isinstance(x, kind) and by_kind[kind]:
                hooks.enter_context(hook(x, by_kind[kind]))
        yield


def _fit(x: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the type of another, repeated along the batch axis to its shape."""
    repeats = [len(like) // max(len(x), 1), *[1] * (x.dim() - 1)]
    return x.to(like.dtype).repeat(repeats) if x.shape != like.shape else x.to(like.dtype)


# -- values of a float16 cache that stay near a tie ---------------------------------------------


def draw_sides(site: Site, margins: Numbers, runs: range) -> Site:
    """Return a site of a float16 cache whose values near a tie may have crossed it, in each run.

    In run 0 all of them have; in later runs each has with probability 0.5. Runs are stacked along
    the batch axis.
    """
    randoms = [torch.Generator().manual_seed(seed_of("float16", number)) for number in runs]
    values = []
    for x, part, near in zip(site.values, site.parts, site.near(margins), strict=True):
        tie = _ties(part)
        other = (tie + torch.where(part.values < tie, 0.25, -0.25)) * part.units
        drawn = [torch.rand(near.shape, generator=random) < 0.5 for random in randoms]
        crosses = [mask if number else near for number, mask in zip(runs, drawn, strict=True)]
        values.append(torch.cat([torch.where(near & mask, other, x) for mask in crosses]))
    return Site(site.rounding, tuple(values))


def overflows(site: Site) -> bool:
    """Return whether finite values of a site become infinite."""
    both = zip(site.values, site.rounded, strict=True)
    return any(bool((x.isfinite() & ~y.isfinite()).any()) for x, y in both)


# -- rounding errors of kernels that subtract the zero points of weights after the product -------


@contextlib.contextmanager
def subtracting_zero_points(module: nn.Module) -> Iterator[None]:
    """Let products with 4-bit weights round as in kernels that subtract zero points afterwards.

    Such a kernel multiplies by unsigned integers, and subtracts the sum of each block of inputs
    times the block's zero point, both in float32. If the result is much smaller than these two
    numbers, their rounding errors are most of its error. While this context is open, the second
    number is added to each product and subtracted again, so that both steps round at random.

    `module`: A float64 copy of a module. Nothing changes unless its inputs are rounded by block:
    only kernels for these subtract zero points afterwards.
    """
    with contextlib.ExitStack() as hooks:
        if isinstance(module, Attention) and isinstance(module.activations, DynamicInt8PerBlock):
            for x in (layer for layer in module.modules() if isinstance(layer, nn.Linear)):
                hooks.enter_context(x.register_forward_hook(_offset_hook(x, module.spec)))
        yield


def _offset_hook(layer: nn.Linear, spec: AttentionSpec) -> Callable[..., Tensor]:
    """Return a hook of a linear layer that adds and subtracts the product with zero points."""
    blocks = layer.weight.detach().unflatten(-1, (-1, spec.block_size))  # [N, blocks, block]
    # The zero points times the scales.
    if spec.scheme == "symmetric":
        zeros = blocks.abs().amax(-1) * (MIDDLE / RANGES["int4"][1])
    else:
        zeros = -blocks.amin(-1).clamp(max=0)
    offset = zeros.double().T

    def hook(_: nn.Module, inputs: tuple[Tensor], out: Tensor) -> Tensor:
        sums = inputs[0].unflatten(-1, (-1, spec.block_size)).sum(-1)  # [B, L, blocks]
        rounded: Tensor = out + sums @ offset - sums @ offset
        return rounded

    return hook
