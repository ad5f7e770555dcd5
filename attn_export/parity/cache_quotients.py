"""Numbers that a cache rounds, their distance from ties, and queries moved until it is enough."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_export.attention import Attention
from attn_export.attention.cache_scales import new_rows
from attn_export.attention.quantised_cache import Pair, Quotients
from attn_export.export.trees import to_torch
from attn_export.parity.draw import seed_of
from attn_export.parity.float64_mode import widened_arrays, widening_of
from attn_export.parity.measures import eps
from attn_export.parity.rounding import RandomRounding
from attn_export.parity.zero_points import subtracting_zero_points
from attn_export.results import Case

RUNS = 2
"""The number of runs that round at random, for the error of each row."""

SAFETY = 5.0
"""The distance from a tie that is enough, as a multiple of the largest error of these runs."""

LEAST = 8.0
"""The least distance, in units of eps of the largest value of a row: a quotient by a scale, or a
product with its inverse, rounds up to three times."""

FLOAT_CACHE_SAFETY = (3.5, 1.0)
"""`SAFETY` and `LEAST` of a cache in floating point: nothing is divided by a scale, and near a tie
either neighbour is accepted."""

SAMPLES, LEAST_RUNS, MOST_RUNS = 48, 3, 8
"""The number of errors per token to sample for a cache in floating point, and the limits of the
number of runs that give them."""

SATURATE_FROM = 0.2
"""The margin from which on values are moved into saturation: no place between two ties is far
enough from both."""

ROUNDS = 200
"""The largest number of steps away from ties."""

SINGLE = eps(np.dtype(np.float32))

Push = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Takes the shifts that values lack, `[B, L, N]`, and their units, and returns the weights of the
sum whose gradient a step follows, `[B, L, N]`, and what that sum lacks, `[B, L, 1]`."""


def distance(quotients: Tensor) -> Tensor:
    """Return the distance of each value from the nearest tie."""
    return (quotients - quotients.floor() - 0.5).abs()


def moved_along_gradients(case: Case, module: Attention, push: Push) -> tuple[Case, bool]:
    """Return a case whose keys and values were moved with its query, and whether all are certain.

    Args:
        case: The case.
        module: A float64 copy of an `Attention` without quantised activations.
        push: Chooses the values that move in a step.
    """
    quotients = CacheQuotients(module, case)
    query = case.inputs["query"]
    margin, limits = margin_of(quotients, query), quotients.limits
    moved, certain = query, False
    for _ in range(ROUNDS):
        rows = torch.from_numpy(moved.astype(np.float64)).requires_grad_()
        with torch.enable_grad():
            values = quotients(rows)  # [B, L, N]
            shift = shift_from_ties(values.detach(), margin, *limits)
            certain = not shift.any()
            if certain:
                break
            weights, size = push(shift, quotients.units)
            slope = quotients.slope((values * weights).nansum(), rows)
        step = size * slope / slope.square().sum(-1, keepdim=True).clamp_min(1e-300)
        moved = (rows.detach() + torch.where(step.isfinite(), step, 0.0)).numpy()
        moved = moved.astype(query.dtype)
    if moved is not query:
        case = dataclasses.replace(case, inputs={**case.inputs, "query": moved})
    return case, certain


class CacheQuotients:
    """The numbers that new keys and values of a case are rounded from: float64 `[B, L, N]`.

    Args:
        module: A float64 copy of an `Attention` whose cache has another type than the layer.
        case: The case.

    Attributes:
        rows: The keys and values of the last call, `[B, Hkv, L, .]`.
    """

    rows: Pair

    def __init__(self, module: Attention, case: Case) -> None:
        assert module.kv_scales is not None
        self._module, self._scales = module, module.kv_scales
        self._inputs = to_torch(widened_arrays(case.inputs))
        self._parts: list[Quotients] = []
        self._widening = widening_of(module)

    def slope(self, total: Tensor, query: Tensor) -> Tensor:
        """Return the gradient of a sum of the numbers of a query, `[B, L, E]`.

        Args:
            total: The sum.
            query: The query of the last call.
        """
        with self._widening or contextlib.nullcontext():
            (found,) = torch.autograd.grad(total, query)
        return found

    @property
    def limits(self) -> tuple[Tensor, Tensor]:
        """The least and the largest integer of each number of the last call, `[N]`."""
        sizes = torch.tensor([part.values[0, :, 0].numel() for part in self._parts])
        ends = torch.tensor([(part.low, part.high) for part in self._parts])
        low, high = ends.repeat_interleave(sizes, dim=0).unbind(-1)
        return low, high

    @property
    def units(self) -> Tensor | None:
        """The spacing of the type at each number, `[B, L, N]`; None for integers, where it is 1."""
        units = [part.units for part in self._parts if part.units is not None]
        return torch.cat([x.transpose(1, 2).flatten(2) for x in units], -1) if units else None

    @property
    def runs(self) -> int:
        """The number of runs that find the largest error of floating point numbers of a token."""
        count = min(part.values[0, :, 0].numel() for part in self._parts)
        return min(max(LEAST_RUNS, SAMPLES // count), MOST_RUNS)

    def largest_of_heads(self, x: Tensor) -> Tensor:
        """Return the largest element of each head, in place of all its elements: `[B, L, N]`.

        Of floating point it is that of all heads of the keys, and of all of the values.
        """
        Hkv = self._module.spec.num_kv_heads if self.units is None else 1
        widths = [part.values[0, :, 0].numel() for part in self._parts]
        heads = (part.unflatten(-1, (Hkv, -1)) for part in x.split(widths, -1))
        return torch.cat([h.amax(-1, keepdim=True).expand_as(h).flatten(2) for h in heads], -1)

    def __call__(self, query: Tensor, seed: int | None = None) -> Tensor:
        """Return the numbers of another query.

        Args:
            query: `[B, L, E]`.
            seed: Of random rounding, if the run rounds so.
        """
        mode: AbstractContextManager[Any] = self._widening or contextlib.nullcontext()
        apart: AbstractContextManager[None] = contextlib.nullcontext()
        if seed is not None:
            apart = subtracting_zero_points(self._module)
            mode = RandomRounding(SINGLE, SINGLE, seed, widening=self._widening)
        with apart, mode:
            self.rows = new_rows(self._module, {**self._inputs, "query": query})
        self._parts = self._scales.quotients(*self.rows)
        return torch.cat([part.values.transpose(1, 2).flatten(2) for part in self._parts], dim=-1)


def margin_of(quotients: CacheQuotients, query: np.ndarray) -> Tensor:
    """Return the distance from ties that is enough for each value, `[B, L, N]`.

    Args:
        quotients: The numbers that are rounded, as a function of the query.
        query: `[B, L, E]`.
    """
    wide = torch.from_numpy(query.astype(np.float64))

    def numbers(seed: int | None = None) -> Tensor:
        found = quotients(wide, seed)
        return found if quotients.units is None else found * quotients.units

    with torch.no_grad():
        exact, units = numbers(), quotients.units
        largest = torch.zeros_like(exact)
        for number in range(RUNS if units is None else quotients.runs):
            noisy = numbers(seed_of("ties", number))
            largest = torch.maximum(largest, (noisy - exact).abs())
        safety, least = (SAFETY, LEAST) if units is None else FLOAT_CACHE_SAFETY
        found = quotients.largest_of_heads(safety * largest + least * SINGLE * exact.abs())
    return found if units is None else found / units


def shift_from_ties(values: Tensor, margin: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return by how much each value has to move, 0 where it is far enough from every tie.

    Args:
        values: Quotients, `[B, L, N]`.
        margin: The distance from ties that is enough, `[B, L, N]`.
        low: The least integer of each, `[N]`.
        high: The largest integer of each, `[N]`.
    """
    tie = (values.floor() + 0.5).clamp(low + 0.5, high - 0.5)  # beyond, all is one integer
    near = (values - tie).abs() < margin
    beside = tie + torch.where(values >= tie, 2 * margin, -2 * margin)
    ends = torch.where(values < 0, low + 0.5 - 2 * margin, high - 0.5 + 2 * margin)
    target = torch.where(margin < SATURATE_FROM, beside, ends)
    # Without ends, numbers so small that all lies near a tie stay where they are.
    movable = near & values.isfinite() & target.isfinite()
    return torch.where(movable, target - values, 0.0)
