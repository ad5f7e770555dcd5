"""Rounding ties of quantised inputs and of caches: moves of inputs, and values that stay near ties.

Near a tie, floating-point error alone decides between two integers, and both are right. So inputs
are moved until the integers of quantised inputs, and the new ones of a quantised cache, are the
same in every correct implementation. Those of a cache are compared exactly. `activation_ties` is
for the input of the output projection, `ties` for the order of equal values.

Without quantised activations new keys and values change smoothly with the query, which is moved
along their gradient. With them a small move changes nothing: an element of the token, chosen at
random, is moved by one quantisation step, until no key or value of the token is near a tie.

A float32 value near the middle of two float16 numbers may become either of them in a cache in
float16. Queries are moved until no large value is near a tie. The rounding error of small values
may be as large as the spacing of float16, so they are near a tie wherever they are. The runs with
random rounding choose a neighbour at random, so that the allowed error covers these choices and no
more.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised_activations import QuantisedActivations
from attn_export.attention.quantised_cache import Pair
from attn_export.cases.draw import generator, seed_of
from attn_export.measures import EPS_FLOAT32
from attn_export.results import Case
from attn_export.spec.low_precision import FLOAT16
from attn_export.truth.cache_quotients import (
    LEAST,
    MOST_STEPS,
    CacheQuotients,
    compute_margin,
    distance_from_tie,
    move_along_gradients,
    shift_from_ties,
)

MOVES, MARGINS = 50, 4
"""The most attempts to move an input array, and the most attempts with a margin computed anew."""

ROUNDED = ("query", "key", "value")
"""The inputs that are quantised directly."""


def move_off_ties(case: Case, module: nn.Module) -> Case | None:
    """Return a case whose integers are the same in every correct implementation.

    `module`: A float64 copy of an `Attention` with quantised activations, a cache of another type,
    or both.

    Returns:
        The case itself if no value is near a tie; None if its inputs cannot be moved away.
    """
    assert isinstance(module, Attention)
    if not isinstance(module.activations, QuantisedActivations):
        if module.spec.kv_dtype == FLOAT16:
            return move_along_gradients(case, module, _weigh_all)[0]
        moved, off_ties = move_along_gradients(case, module, _weigh_worst)
        return moved if off_ties else None
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

    `query`: `[B, L, E]`.
    `scales`: The scale of each element, `[B, L, E]`, or one for all, `[]`.
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
    for _ in range(MOST_STEPS):
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
    """Return weights that select the value of each token with the largest shift, and its shift."""
    # One value of every token moves at once, since tokens do not depend on each other.
    worst = shift.abs().argmax(-1, keepdim=True)
    return torch.zeros_like(shift).scatter(-1, worst, 1.0), shift.gather(-1, worst)


def _weigh_all(shift: Tensor, units: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights that move all values of a token at once, and the change that their sum needs.

    This takes few steps if few of many channels are near ties.
    """
    assert units is not None  # by them, shifts count as differences of cached values
    return shift * units.square(), (shift * units).square().sum(-1, keepdim=True)


def _move_inputs(case: Case, rounding: QuantisedActivations) -> Case | None:
    """Return a case without inputs near a tie, which may be `case` itself; None if impossible."""
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


# -- values of a float16 cache that stay near a tie ---------------------------------------------


@dataclasses.dataclass(frozen=True)
class Float16Values:
    """New keys and values of a case, rounded to float16 and held in float64.

    Attributes:
        nearest: The nearest float16 numbers, which are the truth: keys `[B, Hkv, L, D]` and values
            `[B, Hkv, L, Dv]`.
        other: The float16 neighbour on the other side of each value, of the same shapes.
        near: Masks of the values so near a tie that either neighbour is correct.
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

        `number`: The number of the run. In run 0 all values near a tie take the other neighbour; in
        later runs each takes it with probability 0.5.
        """
        random = torch.Generator().manual_seed(seed_of("float16", number))
        pair: list[Tensor] = []
        for nearest, other, near in zip(self.nearest, self.other, self.near, strict=True):
            takes_other = torch.rand(near.shape, generator=random) < 0.5 if number else near
            pair.append(torch.where(near & takes_other, other, nearest))
        return pair[0], pair[1]


@torch.no_grad()
def round_to_float16(module: Attention, case: Case) -> Float16Values:
    """Return the new keys and values of a case, with both neighbours of values near a tie.

    `module`: A float64 copy of an `Attention` with a cache in float16.
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

    `pair`: Keys `[B, Hkv, L, D]` and values `[B, Hkv, L, Dv]`: float16 numbers, in any floating
    type.
    """
    rounding = module.kv_scales
    assert rounding is not None

    def replace(_: object, __: object, rounded: Pair) -> Pair:
        return pair[0].to(rounded[0].dtype), pair[1].to(rounded[1].dtype)

    with rounding.register_forward_hook(replace):
        yield
