"""Inputs of cases that are moved until what a layer rounds is off ties, see `near_ties`.

Without quantised activations new keys and values change smoothly with the query, which is moved
along their gradient. With them a small move changes nothing: an element of the token, chosen at
random, is moved by one quantisation step, until no key or value of the token is near a tie. The
same is tried for the input of the output projection.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from attn_export.attention import Attention
from attn_export.attention.quantised_activations import QuantisedActivations
from attn_export.cases.draw import generator
from attn_export.measures import EPS_FLOAT32
from attn_export.parts.low_precision.near_ties import TieFinder, shows_other_faults
from attn_export.parts.low_precision.rounding_sites import (
    LEAST,
    Site,
    draw_sides,
    overflows,
    settled,
)
from attn_export.results import Arrays, Case, Golden
from attn_export.truth.allowed import build_golden

if TYPE_CHECKING:
    from attn_export.truth.oracle import Oracle

MOST_MOVES, MOST_STEPS = 50, 200
"""The most attempts to move an input array off its own ties, and the most steps of a query."""

MOST_ATTEMPTS, FEW_ATTEMPTS = 32, 4
"""The most attempts to move tokens off ties of the output projection, and the most of `LARGE`
modules, since each runs the module. Cases of more than `LONGEST` queries have one."""

LARGE, LONGEST = 4_000_000, 256

_OTHER_TOKEN_EVERY = 4
"""Every 4th attempt changes another token than the one with a value near a tie."""

_ROUNDED = ("query", "key", "value")
"""The inputs that are quantised directly."""


def move_off_ties(case: Case, finder: TieFinder) -> Case | None:
    """Return a case whose integers are the same in every correct implementation.

    Returns:
        The case itself if no value is near a tie; None if its inputs cannot be moved away.
    """
    if isinstance(finder.module.activations, QuantisedActivations):
        return _with_fewest_ties(case, finder, finder.module.activations)
    moved, is_certain = _move_along_gradients(case, finder)
    return moved if is_certain or finder.is_float16 else None


def _move_along_gradients(case: Case, finder: TieFinder) -> tuple[Case, bool]:
    """Move the query until new keys and values are off ties; return whether all of them are."""
    query = case.inputs["query"]
    _, margins = finder.cache_and_margins(case)
    for _ in range(MOST_STEPS):
        wide = torch.from_numpy(query.astype(np.float64)).requires_grad_()
        with torch.enable_grad():
            site = finder.cache(case, wide)
            parts = site.parts
            with torch.no_grad():
                shifts = site.shifts(margins)
            if not any(shift.any() for shift in shifts):
                break
            # All values of a token move at once; shifts count as differences of cached values.
            both = list(zip(parts, shifts, strict=True))
            total = [(part.values * shift * part.units**2).nansum() for part, shift in both]
            slope = finder.gradient(torch.stack(total).sum(), wide)
        sizes = [(shift * part.units).square().sum((1, 3)) for part, shift in both]
        size = torch.stack(sizes).sum(0)[..., None]  # [B, L, 1]
        step = size * slope / slope.square().sum(-1, keepdim=True).clamp_min(1e-300)
        moved = wide.detach() + torch.where(step.isfinite(), step, 0.0)
        query = moved.numpy().astype(query.dtype)
    else:
        return _with_query(case, query), False
    return (case if query is case.inputs["query"] else _with_query(case, query)), True


def _with_query(case: Case, query: np.ndarray) -> Case:
    return dataclasses.replace(case, inputs={**case.inputs, "query": query})


def _with_fewest_ties(case: Case, finder: TieFinder, rounding: QuantisedActivations) -> Case | None:
    """Return the case with the fewest values near a tie of those that were tried.

    Its inputs, new keys and values are off ties. It is None if that is impossible, or if too many
    values of the last projection's input stay near a tie in every attempt.
    """
    random = generator("ties", case.name)
    best, fewest, margins = None, np.inf, None
    weights = sum(parameter.numel() for parameter in finder.module.parameters())
    attempts = MOST_ATTEMPTS if weights < LARGE else FEW_ATTEMPTS
    for attempt in range(attempts if case.inputs["query"].shape[1] <= LONGEST else 1):
        moved = _with_certain_cache(case, finder, rounding, random)
        if moved is None:
            break
        # Inputs that differ by a step of one element have about the same errors.
        ties = finder.projection(case := moved, margins)
        if margins is not None and ties.near.sum() < fewest:
            ties = finder.projection(case)
        margins, near = ties.margins, ties.near.any(-1)
        count = int(ties.near.sum())
        if count < fewest and (shows_other_faults(case) or not ties.too_many):
            best, fewest = case, count
        if not count:
            break
        case = _step_tokens(case, near, rounding, random, others=attempt % _OTHER_TOKEN_EVERY == 1)
    return best


def _with_certain_cache(
    case: Case, finder: TieFinder, rounding: QuantisedActivations, random: np.random.Generator
) -> Case | None:
    """Return a case without inputs, new keys or values near a tie; None if that is impossible."""
    for _ in range(MOST_STEPS):
        moved = _move_inputs(case, rounding)
        if moved is None or finder.module.kv_scales is None:
            return moved
        site, margins = finder.cache_and_margins(case := moved)
        near = site.tokens_near(margins)
        if not near.any():
            return case
        case = _step_tokens(case, near, rounding, random)
    return None


def _step_tokens(
    case: Case, near: Tensor, rounding: QuantisedActivations, random: np.random.Generator, *,
    others: bool = False,
) -> Case:  # fmt: skip
    """Return a case in which an element of each token `[B, L]` moves by a step towards 0.

    `others`: Whether elements of the first of them and of tokens before it are exchanged, too: in
    a cache of few bits a step of an input changes nothing.
    """
    query = case.inputs["query"].copy()
    scales = rounding.scales(torch.from_numpy(query)).expand(query.shape)
    for batch, token in near.nonzero().tolist():
        if others:
            token = int(random.integers(token + 1))
            query[batch, token] = np.roll(query[batch, token], random.integers(query.shape[2]))
        element = (batch, token, int(random.integers(query.shape[-1])))
        query[element] -= np.copysign(float(scales[element]), query[element])
    return _with_query(case, query)


def _move_inputs(case: Case, rounding: QuantisedActivations) -> Case | None:
    """Return a case without inputs near a tie, which may be `case` itself; None if impossible."""
    inputs = dict(case.inputs)
    for name in set(_ROUNDED) & set(inputs):
        moved = _move_array(inputs[name], rounding)
        if moved is None:
            return None
        inputs[name] = moved
    if all(inputs[name] is case.inputs[name] for name in inputs):
        return case
    return dataclasses.replace(case, inputs=inputs)


def _move_array(array: np.ndarray, rounding: QuantisedActivations) -> np.ndarray | None:
    """Return an input with its elements moved away from ties; None if that is impossible."""
    for _ in range(MOST_MOVES):
        site = Site(rounding, (x := torch.from_numpy(array.astype(np.float64)),))
        (part,) = site.parts
        scale = torch.as_tensor(part.steps)
        # An infinite scale of one block affects no other block.
        if not bool(scale.isfinite().any()):
            return None
        (shift,) = site.shifts([LEAST * EPS_FLOAT32 * part.values.abs()])
        if not shift.any():
            return array
        moved = torch.where(shift != 0, (part.values + shift) * scale, x)
        array = moved.numpy().astype(array.dtype)
    return None


# -- golden outputs of layers of which values stay near a tie -----------------------------------


def golden(oracle: Oracle, finder: TieFinder, case: Case, eager: Arrays, truth: Arrays) -> Golden:
    """Return the golden of quantised activations, or of a float16 cache.

    All runs with activations round to the same integers. Values of a cache near a tie round either
    way in its runs.
    """
    modules = [m for m in (oracle.precise, oracle.subject.module) if isinstance(m, Attention)]
    if finder.rounds_activations:
        ties = finder.projection(case)
        with settled(ties.sites, *modules):
            rounded, forced = oracle.noisy_runs(case, eager), oracle.eager(case.inputs)
        found = build_golden(case, forced, truth, rounded, in_float32=False)
        return ties.widen_allowed_error(dataclasses.replace(found, eager=eager))
    site, margins = finder.cache_and_margins(case)
    with settled([site], *modules[1:]):
        forced = oracle.eager(case.inputs)

    def drawn(runs: range) -> AbstractContextManager[None]:
        return settled([draw_sides(site, margins, runs)], finder.module)

    found = build_golden(
        case, forced, truth, oracle.noisy_runs(case, eager, settled=drawn), in_float32=False,
        exactly=("present_key", "present_value"),
    )  # fmt: skip
    unusable = dict(found.unusable)
    if overflows(site):
        unusable["output"] = "no evidence: new keys or values are too large for float16"
    near = int(site.tokens_near(margins).sum())
    return dataclasses.replace(found, eager=eager, unusable=unusable, rows_near_ties=near)
