"""Quotients that a cache rounds, their distances from rounding ties, and queries moved off ties."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised import new_keys_and_values
from attn_export.attention.quantised_activations import DynamicInt8PerBlock
from attn_export.attention.quantised_cache import MIDDLE, Pair, Quotients
from attn_export.cases.draw import seed_of
from attn_export.export.trees import to_torch
from attn_export.measures import EPS_FLOAT32
from attn_export.results import Case
from attn_export.spec import AttentionSpec
from attn_export.truth.float64_mode import widened_arrays, widening_of
from attn_export.truth.rounding import RandomRounding

RUNS = 2
"""The number of runs with random rounding that measure the error of each quotient."""

SAFETY = 5.0
"""The factor on the largest error of these runs, in the margin: a distance from a tie at which
rounding errors do not change the integer."""

LEAST = 8.0
"""The term that the margin has besides, in units of float32's eps times the quotient: a quotient by
a scale, or a product with its inverse, rounds up to three times."""

FLOAT_CACHE_SAFETY = (3.5, 1.0)
"""The values of `SAFETY` and `LEAST` for a cache in floating point: nothing is divided by a scale,
and near a tie either neighbour is accepted."""

SAMPLES, LEAST_RUNS, MOST_RUNS = 48, 3, 8
"""The number of errors per token to sample for a cache in floating point, and the least and the
largest number of runs that sample them."""

SATURATE_FROM = 0.2
"""The margin from which on values are moved into saturation, since no value between two ties
would be far enough from both."""

MOST_STEPS = 200
"""The largest number of steps away from ties."""

Objective = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""A function that chooses, for each token, the weighted sum of its values that a step changes.

It takes the shift that each value needs, `[B, L, N]`, and `CacheQuotients.units`. It returns the
weights of the values in the sum, `[B, L, N]`, and the change that the sum needs, `[B, L, 1]`."""


def distance_from_tie(quotients: Tensor) -> Tensor:
    """Return the distance of each number from the nearest tie, of the shape of `quotients`."""
    return (quotients - quotients.floor() - 0.5).abs()


def move_along_gradients(case: Case, module: Attention, objective: Objective) -> tuple[Case, bool]:
    """Move the query of a case until its new keys and values are far enough from ties.

    `module`: A float64 copy of an `Attention` without quantised activations.

    Returns:
        The case, and whether all its new keys and values are far enough from ties.
    """
    quotients = CacheQuotients(module, case)
    query = case.inputs["query"]
    margin, limits = compute_margin(quotients, query), quotients.limits
    moved, off_ties = query, False
    for _ in range(MOST_STEPS):
        wide = torch.from_numpy(moved.astype(np.float64)).requires_grad_()
        with torch.enable_grad():
            values = quotients(wide)  # [B, L, N]
            shift = shift_from_ties(values.detach(), margin, *limits)
            off_ties = not shift.any()
            if off_ties:
                break
            weights, size = objective(shift, quotients.units)
            slope = quotients.gradient((values * weights).nansum(), wide)
        step = size * slope / slope.square().sum(-1, keepdim=True).clamp_min(1e-300)
        moved = (wide.detach() + torch.where(step.isfinite(), step, 0.0)).numpy()
        moved = moved.astype(query.dtype)
    if moved is not query:
        case = dataclasses.replace(case, inputs={**case.inputs, "query": moved})
    return case, off_ties


class CacheQuotients:
    """Function from a query to the numbers that a cache rounds its new keys and values from.

    For a cache of integers they are quotients by scales; for a cache in floating point, by the
    spacing of its type. N is the number of quotients of a token: those of its keys, then those of
    its values. All attributes and the other methods are of the last call, so call it first.

    `module`: A float64 copy of an `Attention` whose cache has another type than the layer.

    Attributes:
        new_pair: The keys `[B, Hkv, L, D]` and values `[B, Hkv, L, Dv]`, before rounding.
    """

    new_pair: Pair

    def __init__(self, module: Attention, case: Case) -> None:
        assert module.kv_scales is not None
        self._module, self._scales = module, module.kv_scales
        self._inputs = to_torch(widened_arrays(case.inputs))
        self._parts: list[Quotients] = []
        self._widening = widening_of(module)

    def gradient(self, total: Tensor, query: Tensor) -> Tensor:
        """Return the gradient of a sum of quotients with respect to the query, `[B, L, E]`.

        `total`: The sum, `[]`.
        `query`: The query of the last call, `[B, L, E]`.
        """
        with self._widening or contextlib.nullcontext():
            (gradient,) = torch.autograd.grad(total, query)
        return gradient

    @property
    def limits(self) -> tuple[Tensor, Tensor]:
        """The least and the largest integer of each quotient, `[N]`."""
        ends = torch.tensor([(part.low, part.high) for part in self._parts])
        low, high = ends.repeat_interleave(torch.tensor(self._widths), dim=0).unbind(-1)
        return low, high

    @property
    def units(self) -> Tensor | None:
        """The spacing of a floating cache type at each value, `[B, L, N]`; None for integers."""
        units = [part.units for part in self._parts if part.units is not None]
        return torch.cat([x.transpose(1, 2).flatten(2) for x in units], -1) if units else None

    @property
    def runs(self) -> int:
        """The number of runs with random rounding for a cache in floating point."""
        return min(max(LEAST_RUNS, SAMPLES // min(self._widths)), MOST_RUNS)

    @property
    def _widths(self) -> list[int]:
        """The number of quotients of a token in each part."""
        return [part.values[0, :, 0].numel() for part in self._parts]

    def largest_of_heads(self, x: Tensor) -> Tensor:
        """Return the largest element of the head of each, `[B, L, N]` as `x`.

        For a cache in floating point the largest is taken over all heads, of keys and of values.
        """
        Hkv = self._module.spec.num_kv_heads if self.units is None else 1
        heads = [part.unflatten(-1, (Hkv, -1)) for part in x.split(self._widths, -1)]
        largest = [each.amax(-1, keepdim=True).expand_as(each).flatten(2) for each in heads]
        return torch.cat(largest, -1)

    def __call__(self, query: Tensor, seed: int | None = None) -> Tensor:
        """Return the quotients of a query, float64 `[B, L, N]`.

        `query`: The query, float64 `[B, L, E]`.
        """
        mode: AbstractContextManager[Any] = self._widening or contextlib.nullcontext()
        zero_points: AbstractContextManager[None] = contextlib.nullcontext()
        if seed is not None:
            zero_points = subtracting_zero_points(self._module)
            mode = RandomRounding(EPS_FLOAT32, EPS_FLOAT32, seed, widening=self._widening)
        with zero_points, mode:
            self.new_pair = new_keys_and_values(self._module, {**self._inputs, "query": query})
        self._parts = self._scales.quotients(*self.new_pair)
        return torch.cat([part.values.transpose(1, 2).flatten(2) for part in self._parts], dim=-1)


def compute_margin(quotients: CacheQuotients, query: np.ndarray) -> Tensor:
    """Return the distance from ties that is enough for each quotient, `[B, L, N]`.

    `query`: The query, `[B, L, E]`.
    """
    wide = torch.from_numpy(query.astype(np.float64))

    def run(seed: int | None = None) -> Tensor:
        """Return quotients for a cache of integers, keys and values for one in floating point."""
        values = quotients(wide, seed)
        return values if quotients.units is None else values * quotients.units

    with torch.no_grad():
        exact, units = run(), quotients.units
        largest = torch.zeros_like(exact)
        for number in range(RUNS if units is None else quotients.runs):
            noisy = run(seed_of("ties", number))
            largest = torch.maximum(largest, (noisy - exact).abs())
        safety, least = (SAFETY, LEAST) if units is None else FLOAT_CACHE_SAFETY
        margin = quotients.largest_of_heads(safety * largest + least * EPS_FLOAT32 * exact.abs())
    return margin if units is None else margin / units


def shift_from_ties(values: Tensor, margin: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the distance that each value must move; 0 if it is far enough from every tie.

    `values`: Quotients, `[B, L, N]`.
    `margin`: The distance from ties that is enough, `[B, L, N]`.
    `low`: The least integer of each, `[N]`.
    `high`: The largest integer of each, `[N]`.

    Returns:
        Signed distances, `[B, L, N]`.
    """
    tie = (values.floor() + 0.5).clamp(low + 0.5, high - 0.5)  # beyond them, values saturate
    near = (values - tie).abs() < margin
    beside = tie + torch.where(values >= tie, 2 * margin, -2 * margin)
    ends = torch.where(values < 0, low + 0.5 - 2 * margin, high - 0.5 + 2 * margin)
    target = torch.where(margin < SATURATE_FROM, beside, ends)
    # A cache in floating point has no ends: values too small to be off ties stay where they are.
    movable = near & values.isfinite() & target.isfinite()
    return torch.where(movable, target - values, 0.0)


# -- rounding errors of kernels that subtract the zero points of weights after the product -------

LARGEST_INT4 = 7
"""The largest 4-bit weight; as an unsigned integer it is larger by `MIDDLE`, the zero point."""


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
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    hook = _offset_hook(layer, module.spec)
                    hooks.enter_context(layer.register_forward_hook(hook))
        yield


def _offset_hook(layer: nn.Linear, spec: AttentionSpec) -> Callable[..., Tensor]:
    """Return a hook of a linear layer that adds and subtracts the product with zero points."""
    blocks = layer.weight.detach().unflatten(-1, (-1, spec.block_size))  # [N, blocks, block]
    # The zero points times the scales.
    if spec.scheme == "symmetric":
        zeros = blocks.abs().amax(-1) * (MIDDLE / LARGEST_INT4)
    else:
        zeros = -blocks.amin(-1).clamp(max=0)
    offset = zeros.double().T

    def hook(_: nn.Module, inputs: tuple[Tensor], out: Tensor) -> Tensor:
        sums = inputs[0].unflatten(-1, (-1, spec.block_size)).sum(-1)  # [B, L, blocks]
        rounded: Tensor = out + sums @ offset - sums @ offset
        return rounded

    return hook
