"""Values near a rounding tie, where floating-point error alone decides, and both sides are right.

So inputs are moved off ties (`off_ties`) until the integers of quantised inputs, and the new ones
of a quantised cache, are the same in every correct implementation. Those of a cache are compared
exactly. If values of the output projection's input stay near a tie, the allowed error grows by the
change of rounding them the other way. Of a cache in float16 only large values can be moved off
ties: runs with random rounding choose a neighbour of the others at random, so that the allowed
error covers these choices and no more. `ties` is for the order of equal values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_export.attention import Attention
from attn_export.attention.quantised import new_keys_and_values
from attn_export.attention.quantised_activations import QuantisedActivations
from attn_export.cases.draw import seed_of
from attn_export.export.trees import to_torch
from attn_export.measures import EPS_FLOAT32, row_norms
from attn_export.parts.low_precision.rounding_sites import (
    Numbers,
    Site,
    settled,
    sites_of,
    subtracting_zero_points,
)
from attn_export.results import Arrays, Case, Golden
from attn_export.rule import beyond_limit
from attn_export.schema import Allowed
from attn_export.spec.low_precision import FLOAT16
from attn_export.truth.float64_mode import widened_arrays, widening_of
from attn_export.truth.rounding import RandomRounding

RUNS, RUNS_OF_FLOAT16 = 2, 4
"""The number of runs with random rounding that measure the error of each quotient."""

_MOST_ADDED = 0.25
"""The largest error that ties may add, as a share of the error of a run that does not round the
input of the output projection. With more, a graph that leaves the rounding out would pass."""

OUTPUT = "output"
"""The name of the output that the output projection computes."""


class TieFinder:
    """Finder of values near a tie in runs of an `Attention` that rounds activations or its cache.

    `module`: A float64 copy of the module.
    `run`: Runs it on inputs, in float64 or with the random rounding of a number.
    """

    def __init__(self, module: Attention, run: Callable[[Arrays, int | None], object]) -> None:
        self.module, self._run, self._widening = module, run, widening_of(module)
        self.is_float16 = module.spec.kv_dtype == FLOAT16
        self.rounds_activations = isinstance(module.activations, QuantisedActivations)
        self.has_goldens = self.is_float16 or self.rounds_activations
        self._runs = RUNS_OF_FLOAT16 if self.is_float16 else RUNS

    def subtract_zero_points(self) -> AbstractContextManager[None]:
        """Let products of the copy round as kernels do that subtract zero points afterwards."""
        return subtracting_zero_points(self.module)

    def sites(self, inputs: Arrays, number: int | None = None) -> list[Site]:
        """Return all sites of a run."""
        return sites_of(self.module, lambda: self._run(inputs, number))

    def margins_of(self, site: Site, run: Callable[[int], Site]) -> Numbers:
        """Return the margins of a site, measured by runs with random rounding."""
        return site.margins([run(n) for n in range(self._runs)], self.module.spec.num_heads)

    def gradient(self, total: Tensor, query: Tensor) -> Tensor:
        """Return the gradient of a sum of quotients with respect to the query, `[B, L, E]`."""
        with self._widening or contextlib.nullcontext():
            (gradient,) = torch.autograd.grad(total, query)
        return gradient

    def cache(self, case: Case, query: Tensor, number: int | None = None) -> Site:
        """Return the site of new keys and values of a case with a float64 query, `[B, L, E]`."""
        inputs = {**to_torch(widened_arrays(case.inputs)), "query": query}
        mode: AbstractContextManager[Any] = self._widening or contextlib.nullcontext()
        zero_points: AbstractContextManager[None] = contextlib.nullcontext()
        if number is not None:
            zero_points = subtracting_zero_points(self.module)
            seed = seed_of("ties", number)
            mode = RandomRounding(EPS_FLOAT32, EPS_FLOAT32, seed, widening=self._widening)
        with zero_points, mode:
            pair = new_keys_and_values(self.module, inputs)
        assert self.module.kv_scales is not None
        return Site(self.module.kv_scales, pair)

    @torch.no_grad()
    def cache_and_margins(self, case: Case) -> tuple[Site, Numbers]:
        """Return the site of new keys and values of a case, and its margins."""
        query = torch.from_numpy(case.inputs["query"].astype(np.float64))
        site = self.cache(case, query)
        return site, self.margins_of(site, lambda number: self.cache(case, query, number))

    def activations(self, case: Case, number: int | None = None) -> list[Site]:
        """Return the sites of the inputs of all projections; that of the last one is last."""
        sites = self.sites(case.inputs, number)
        return [site for site in sites if site.rounding is self.module.activations]

    def projection(self, case: Case, margins: Numbers | None = None) -> _ProjectionTies:
        """Return what the projections of a case round, and the margins of the last.

        `margins`: Those of a case with about the same errors. Default: they are measured.
        """
        sites = self.activations(case)

        def noisy(number: int) -> Site:
            with settled(sites, self.module):
                return self.activations(case, number)[-1]

        margins = self.margins_of(sites[-1], noisy) if margins is None else margins
        return _ProjectionTies(sites, margins, self.module.out_proj.weight.detach().double())


@dataclasses.dataclass(frozen=True)
class _ProjectionTies:
    """What the projections of a run round, and values near a tie in the input of the last.

    Attributes:
        weight: The weight of the output projection, `[E, N]`.
    """

    sites: Sequence[Site]
    margins: Numbers
    weight: Tensor

    @functools.cached_property
    def near(self) -> Tensor:
        """A mask of the values near a tie, `[B, L, N]`."""
        return self.sites[-1].near(self.margins)[0]

    @functools.cached_property
    def _steps(self) -> Tensor:
        """The L2 norm of the change of the output by one step of each value, `[B, L, N]`."""
        (part,) = self.sites[-1].parts
        steps: Tensor = part.steps * self.weight.norm(dim=0)
        return steps.expand_as(part.values)

    @functools.cached_property
    def token_changes(self) -> Tensor:
        """A bound of the change of each token if all values near a tie round the other way."""
        return torch.where(self.near, self._steps, 0.0).sum(-1)  # [B, L]

    @property
    def too_many(self) -> bool:
        """True if ties allow so much error that a graph without rounding would pass."""
        # Errors of rounding are uniform within half a step.
        unrounded = float(self._steps[self._steps.isfinite()].norm()) / 12**0.5
        return float(self.token_changes.norm()) > _MOST_ADDED * unrounded

    def widen_allowed_error(self, golden: Golden) -> Golden:
        """Return the case with its allowed error increased by what values near a tie can change.

        It is unusable if the error is beyond the limit, or too many values are near a tie.
        """
        allowed, expected = golden.allowed[OUTPUT], golden.expected[OUTPUT]
        if not self.near.any():
            return golden
        assert allowed is not None
        t = expected.astype(np.float64)
        largest = float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) or 1.0
        errors, norms = self.token_changes.numpy() / largest, row_norms(t)
        by_row = errors / np.where(norms > 0, norms, np.inf)
        wider = Allowed(
            allowed.whole + float(np.linalg.norm(errors) / (np.linalg.norm(norms) or np.inf)),
            allowed.row + float(by_row.max()),
        )
        reason = beyond_limit(wider.whole, wider.row, expected.dtype)
        if self.too_many and not shows_other_faults(golden.case):
            reason = "no evidence: too many values of the last projection's input lie near a tie"
        unusable = {**golden.unusable, **({OUTPUT: reason} if reason else {})}
        return dataclasses.replace(
            golden, allowed={**golden.allowed, OUTPUT: wider}, unusable=unusable,
            rows_near_ties=int(self.near.any(-1).sum()),
        )  # fmt: skip


def shows_other_faults(case: Case) -> bool:
    """Return whether a case is evidence even if a graph without rounding would pass it."""
    return case.may_overflow or (case.kind == "probe" and not case.contents)
