"""Inputs moved so far from rounding ties that integers of inputs and of the cache are certain.

Near a tie, floating-point error alone decides between two integers, and both are right. So inputs
are moved until the integers of quantised inputs, and the new ones of a quantised cache, are the
same in every correct implementation. Those of a cache are compared exactly. `activation_ties` is
for the input of the output projection.

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
    CacheQuotients,
    compute_margin,
    distance_from_tie,
    move_along_gradients,
    shift_from_ties,
)
from attn_export.parity.draw import generator
from attn_export.parity.measures import EPS_FLOAT32
from attn_export.results import Case

MOVES, MARGINS = 50, 4
"""The most attempts to move an input array, and the most attempts with a margin computed anew."""

ROUNDED = ("query", "key", "value")
"""The inputs that are quantised directly."""


def move_off_ties(case: Case, module: nn.Module) -> Case | None:
    """Return a case whose integers are the same in every correct implementation.

    These are the integers of quantised inputs (`ROUNDED`), and the new ones of a quantised cache.

    Args:
        case: The case; its inputs may be moved by a little.
        module: A float64 copy of an `Attention` with quantised activations, a quantised cache, or
            both.

    Returns:
        The case itself if no value is near a tie; None if its inputs cannot be moved away.
    """
    assert isinstance(module, Attention)
    if not isinstance(module.activations, QuantisedActivations):
        moved, certain = move_along_gradients(case, module, _weigh_worst)
        return moved if certain else None
    if module.kv_scales is None:
        return _move_inputs(case, module.activations)
    return _move_by_steps(case, module)


def activation_rounding(module: Attention) -> QuantisedActivations:
    """Return the module that rounds the inputs of projections."""
    assert isinstance(module.activations, QuantisedActivations)
    return module.activations


def step_towards_zero(
    query: np.ndarray, token: tuple[int, int], scales: Tensor, random: np.random.Generator
) -> None:
    """Move an element of a token by one step of its scale towards 0, in place.

    Args:
        query: `[B, L, E]`.
        token: The index of the token: batch element and position.
        scales: The scale of each element, `[B, L, E]`, or one for all, `[]`.
        random: Chooses the element.
    """
    element = (*token, int(random.integers(query.shape[-1])))
    scale = float(scales.expand(query.shape)[element])
    query[element] -= np.copysign(scale, query[element])


def _move_by_steps(case: Case, module: Attention) -> Case | None:
    """Return a case without values near a tie, neither in its activations nor in its new cache."""
    random = generator("steps", case.name)
    for _ in range(MARGINS):  # a moved case may have other errors, hence another margin
        moved = _try_steps(case, module, random)
        if moved is None or moved is case:
            return moved
        case = moved
    return None


def _try_steps(case: Case, module: Attention, random: np.random.Generator) -> Case | None:
    """Return a case moved by quantisation steps; the margin of its first inputs is used for all."""
    margin, rounding = None, activation_rounding(module)
    for _ in range(ROUNDS):
        moved = _move_inputs(case, rounding)
        if moved is None:
            return None
        case, query = moved, moved.inputs["query"].copy()
        quotients = CacheQuotients(module, case)
        margin = compute_margin(quotients, query) if margin is None else margin
        with torch.no_grad():
            values = quotients(torch.from_numpy(query.astype(np.float64)))
        near = shift_from_ties(values, margin, *quotients.limits).ne(0).any(-1)  # [B, L]
        if not near.any():
            return case
        scales = rounding.scales(torch.from_numpy(query))
        for batch, token in near.nonzero().tolist():
            step_towards_zero(query, (batch, token), scales, random)
        case = dataclasses.replace(case, inputs={**case.inputs, "query": query})
    return None


def _weigh_worst(shift: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights that select the value of each token with the largest shift, and its shift.

    One value of every token moves at once, since tokens do not depend on each other.
    """
    worst = shift.abs().argmax(-1, keepdim=True)
    return torch.zeros_like(shift).scatter(-1, worst, 1.0), shift.gather(-1, worst)


def _move_inputs(case: Case, rounding: QuantisedActivations) -> Case | None:
    """Return a case without inputs near a tie.

    It is the same object if no input is near a tie, and None if inputs cannot be moved away.
    """
    inputs = dict(case.inputs)
    for name in set(ROUNDED) & set(inputs):
        moved = _move_array(inputs[name], rounding)
        if moved is None:
            return None
        inputs[name] = moved
    if all(inputs[name] is case.inputs[name] for name in inputs):
        return case
    return dataclasses.replace(case, inputs=inputs)


def _move_array(array: np.ndarray, rounding: QuantisedActivations) -> np.ndarray | None:
    """Return an input with its elements moved away from ties; None if that is impossible."""
    for _ in range(MOVES):
        x = torch.from_numpy(array.astype(np.float64))
        scale = rounding.scales(x)
        quotients = x / scale
        margin = LEAST * EPS_FLOAT32 * quotients.abs()
        near = distance_from_tie(quotients) < margin
        # An infinite scale of one block affects no other block.
        if not bool(scale.isfinite().any()):
            return None
        if not near.any():
            return array
        tie = quotients.floor() + 0.5
        beside = tie + torch.where(quotients >= tie, 2 * margin, -2 * margin)
        array = torch.where(near, beside * scale, x).numpy().astype(array.dtype)
    return None
