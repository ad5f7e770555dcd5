"""Inputs moved so far from rounding ties that every quantised integer is certain.

Near a tie, floating-point error alone decides between two integers, and both are right. So inputs
are moved until the integers of quantised activations, and the new ones of a quantised cache, are
the same in every correct implementation. Those of a cache are compared exactly.

Without quantised activations new keys and values change smoothly with the query, which is moved
along their gradient. With them a small move changes nothing: an element of the token, chosen at
random, is moved by one quantisation step, until no key or value of the token is near a tie.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised_activations import QuantisedActivations
from attn_export.parity.cache_quotients import (
    LEAST,
    ROUNDS,
    SINGLE,
    CacheQuotients,
    distance,
    margin_of,
    moved_along_gradients,
    shift_from_ties,
)
from attn_export.parity.draw import generator
from attn_export.results import Case

MOVES, MARGINS = 50, 4
"""The most attempts to move an input array, and the most attempts with a margin computed anew."""

ROUNDED = ("query", "key", "value")
"""The inputs that are quantised as they are."""


def away_from_ties(case: Case, module: nn.Module) -> Case | None:
    """Return a case whose integers are the same in any right computation.

    They are those of quantised activations, and the new ones of a cache of integers.

    Args:
        case: The case; its inputs may be moved by a little.
        module: A float64 copy of an `Attention` with quantised activations, a cache of integers, or
            both.

    Returns:
        The case itself where nothing is near a tie, and None where inputs cannot be moved away.
    """
    assert isinstance(module, Attention)
    if not isinstance(module.activations, QuantisedActivations):
        moved, certain = moved_along_gradients(case, module, _the_worst)
        return moved if certain else None
    if module.kv_scales is None:
        return _inputs_away(case, module.activations)
    return _by_quantisation_steps(case, module)


def rounding_in(module: Attention) -> QuantisedActivations:
    """Return the module that rounds the inputs of projections."""
    assert isinstance(module.activations, QuantisedActivations)
    return module.activations


def one_step_less(
    query: np.ndarray, token: tuple[int, int], scales: Tensor, random: np.random.Generator
) -> None:
    """Move an element of a token by one step of its scale towards 0, in place.

    Args:
        query: `[B, L, E]`.
        token: Its row and place.
        scales: The scale of each element, or one for all.
        random: Chooses the element.
    """
    element = (*token, int(random.integers(query.shape[-1])))
    scale = float(scales.expand(query.shape)[element])
    query[element] -= np.copysign(scale, query[element])


def _by_quantisation_steps(case: Case, module: Attention) -> Case | None:
    """Return a case of quantised activations whose inputs and cache are certain."""
    random = generator("steps", case.name)
    for _ in range(MARGINS):  # of a case that was moved, errors may be others
        moved = _stepped(case, module, random)
        if moved is None or moved is case:
            return moved
        case = moved
    return None


def _stepped(case: Case, module: Attention, random: np.random.Generator) -> Case | None:
    """Return a case moved by quantisation steps, with the margin of its first inputs."""
    margin, rounding = None, rounding_in(module)
    for _ in range(ROUNDS):
        settled = _inputs_away(case, rounding)
        if settled is None:
            return None
        case, query = settled, settled.inputs["query"].copy()
        quotients = CacheQuotients(module, case)
        margin = margin_of(quotients, query) if margin is None else margin
        with torch.no_grad():
            values = quotients(torch.from_numpy(query.astype(np.float64)))
        near = shift_from_ties(values, margin, *quotients.limits).ne(0).any(-1)  # [B, L]
        if not near.any():
            return case
        scales = rounding.scales(torch.from_numpy(query))
        for row, token in near.nonzero().tolist():
            one_step_less(query, (row, token), scales, random)
        case = dataclasses.replace(case, inputs={**case.inputs, "query": query})
    return None


def _the_worst(shift: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """Move one value of each token: tokens do not depend on each other."""
    worst = shift.abs().argmax(-1, keepdim=True)
    return torch.zeros_like(shift).scatter(-1, worst, 1.0), shift.gather(-1, worst)


def _inputs_away(case: Case, rounding: QuantisedActivations) -> Case | None:
    """Return a case whose inputs are certain as integers; None where they cannot be.

    It is the same one if they are so already.
    """
    found = dict(case.inputs)
    for name in set(ROUNDED) & set(found):
        moved = _moved(found[name], rounding)
        if moved is None:
            return None
        found[name] = moved
    if all(found[name] is case.inputs[name] for name in found):
        return case
    return dataclasses.replace(case, inputs=found)


def _moved(array: np.ndarray, rounding: QuantisedActivations) -> np.ndarray | None:
    """Return an input with its elements away from ties; None where that cannot be."""
    for _ in range(MOVES):
        x = torch.from_numpy(array.astype(np.float64))
        scale = rounding.scales(x)
        quotients = x / scale
        margin = LEAST * SINGLE * quotients.abs()
        near = distance(quotients) < margin
        if not bool(scale.isfinite().any()):  # scales of tokens alone spoil no others
            return None
        if not near.any():
            return array
        tie = quotients.floor() + 0.5
        beside = tie + torch.where(quotients >= tie, 2 * margin, -2 * margin)
        array = torch.where(near, beside * scale, x).numpy().astype(array.dtype)
    return None
