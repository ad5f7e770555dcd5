"""Inputs of which no key or value lies near a tie between two integers of a quantised cache.

Rounding to an integer is a step: values that differ by rounding alone become integers that differ
by one where a tie lies between them, and either is right. Queries are moved away from such ties, so
that each integer is certain, and is compared exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.cache_scales import new_rows
from attn_export.export.tensors import to_torch
from attn_export.parity.draw import seed_of
from attn_export.parity.measures import eps
from attn_export.parity.rounding import RandomRounding
from attn_export.results import Arrays, Case
from attn_export.tensorfile import is_floating

RUNS = 2
"""The number of runs that round at random, for the error of each row."""

SAFETY = 5.0
"""The distance from a tie that is enough, as a multiple of the largest error of these runs."""

LEAST = 8.0
"""The least distance, in units of eps of the largest value of a row: a quotient by a scale, or a
product with its inverse, rounds up to three times."""

WIDEST = 0.2
"""The distance from which on values are moved beyond the last tie: others are too near."""

ROUNDS = 200
"""The largest number of steps away from ties."""


def away_from_ties(case: Case, module: nn.Module) -> Case | None:
    """Return a case whose new keys and values all round to one integer in any right computation.

    Args:
        case: The case; its queries may be moved by a little.
        module: A float64 copy of an `Attention` with a cache of integers.

    Returns:
        The case itself where nothing is near a tie, and None where queries cannot be moved away.
    """
    assert isinstance(module, Attention)
    quotients = _Quotients(module, case)
    query = case.inputs["query"]
    margin, limits = _margin(quotients, query), quotients.limits
    moved = query
    for _ in range(ROUNDS):
        rows = torch.from_numpy(moved.astype(np.float64)).requires_grad_()
        with torch.enable_grad():
            values = quotients(rows)  # [B, L, N]
            missing = _missing(values.detach(), margin, *limits)
            if not missing.any():
                break
            # One value of each token at a time: tokens do not depend on each other.
            worst = missing.abs().argmax(-1, keepdim=True)
            chosen = values.gather(-1, worst)
            (slope,) = torch.autograd.grad(chosen.nansum(), rows)
        square = slope.square().sum(-1, keepdim=True)
        step = missing.gather(-1, worst) * slope / square.clamp_min(1e-300)
        step = torch.where(missing.any(-1, keepdim=True) & step.isfinite(), step, 0.0)
        moved = (rows.detach() + step).numpy().astype(query.dtype)
    else:
        return None
    if moved is query:
        return case
    return dataclasses.replace(case, inputs={**case.inputs, "query": moved})


class _Quotients:
    """New keys and values of a case, divided by their scales: float64 `[B, L, N]`."""

    def __init__(self, module: Attention, case: Case) -> None:
        assert module.kv_scales is not None
        self._module, self._scales = module, module.kv_scales
        self._inputs = to_torch(_wide(case.inputs))

    @property
    def limits(self) -> tuple[int, int]:
        return self._scales.low, self._scales.high

    def largest_of_heads(self, x: Tensor) -> Tensor:
        """Return the largest element of each head, in place of all its elements: `[B, L, N]`."""
        spec = self._module.spec
        widths = [spec.num_kv_heads * width for width in spec.cache_widths]
        heads = (part.unflatten(-1, (spec.num_kv_heads, -1)) for part in x.split(widths, -1))
        return torch.cat([h.amax(-1, keepdim=True).expand_as(h).flatten(2) for h in heads], -1)

    def __call__(self, query: Tensor) -> Tensor:
        scales = (self._scales.k_scale, self._scales.v_scale)
        rows = zip(new_rows(self._module, {**self._inputs, "query": query}), scales, strict=True)
        return torch.cat([(x / scale).transpose(1, 2).flatten(2) for x, scale in rows], dim=-1)


def _margin(quotients: _Quotients, query: np.ndarray) -> Tensor:
    """Return the distance from ties that is enough for each value, `[B, L, N]`."""
    single = eps(np.dtype(np.float32))
    wide = torch.from_numpy(query.astype(np.float64))
    with torch.no_grad():
        exact = quotients(wide)
        largest = torch.zeros_like(exact)
        for number in range(RUNS):
            with RandomRounding(single, single, seed_of("ties", number)):
                noisy = quotients(wide)
            largest = torch.maximum(largest, (noisy - exact).abs())
        found = SAFETY * largest + LEAST * single * exact.abs()
    return quotients.largest_of_heads(found)


def _missing(values: Tensor, margin: Tensor, low: int, high: int) -> Tensor:
    """Return by how much each value has to move, 0 where it is far enough from every tie.

    Args:
        values: Quotients, `[B, L, N]`.
        margin: The distance from ties that is enough, `[B, L, N]`.
        low: The least integer.
        high: The largest integer.
    """
    tie = (values.floor() + 0.5).clamp(low + 0.5, high - 0.5)  # beyond, all is one integer
    near = (values - tie).abs() < margin
    beside = tie + torch.where(values >= tie, 2 * margin, -2 * margin)
    ends = torch.where(values < 0, low + 0.5 - 2 * margin, high - 0.5 + 2 * margin)
    target = torch.where(margin < WIDEST, beside, ends)
    return torch.where(near & values.isfinite(), target - values, 0.0)


def _wide(arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {n: a.astype(np.float64) if is_floating(a.dtype) else a for n, a in arrays.items()}
