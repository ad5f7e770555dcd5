"""Errors of one quantised tensor: those of rounding, and those of values out of range."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.block_scales import BlockScales
from attn_export.attention.float16_cache import Float16Cache
from attn_export.attention.quantised_cache import CacheScales, Pair
from attn_export.quality import Distance, Split, is_finite
from attn_export.quantiser import QuantisedWeight

CACHED = ("cached keys", "cached values")
"""The parts of a cache."""

ALL, ROUNDING, CLIPPED = "all", "rounding", "clipped"
"""The errors of a tensor: all, those up to half a step, and what lies beyond."""

BEYOND_HALF = 1 + 1e-6
"""The least error of a clipped value, in halves of a step: others are computed in float32."""

Measure = Callable[[str, Attention], Distance]
Measured = tuple[Distance, Split]
Errors = dict[str, Tensor]


class PartlyRounded(nn.Module):
    """Keys and values with some errors of those that a cache of integers has.

    Args:
        scales: Of the cache.
        part: The number of the part that has errors: 0 for keys, 1 for values.
        kind: One of `ALL`, `ROUNDING` and `CLIPPED`.
        note: Receives the number of values that were clipped, and of all.
    """

    def __init__(
        self, scales: CacheScales | BlockScales | Float16Cache, part: int, kind: str,
        note: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self.scales, self.part, self.kind, self.note = scales, part, kind, note

    def mixed(self, x: Tensor) -> Tensor:
        """Return queries or keys as the cache takes them."""
        return self.scales.mixed(x)

    def forward(self, key: Tensor, value: Tensor) -> Pair:
        """Return new keys `[B, Hkv, L, D]` and values with the errors.

        Args:
            key: `[B, Hkv, L, D]`.
            value: `[B, Hkv, L, Dv]`.
        """
        pair = [key, value]
        x = pair[self.part]
        rows: Pair = self.scales(key, value)
        meant = self.scales.read(rows[0], rows[1], key.dtype)[self.part]
        errors = split(meant - x, self.scales.step_sizes(key, value)[self.part])
        self.note(int(errors[CLIPPED].count_nonzero()), x.numel())
        pair[self.part] = x + errors[self.kind]
        return pair[0], pair[1]

    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:  # noqa: ARG002
        """Return keys and values as they are.

        Args:
            key: `[B, Hkv, S, D]`.
            value: `[B, Hkv, S, Dv]`.
            dtype: The type that they have.
        """
        return key, value


def split(error: Tensor, step: Tensor) -> Errors:
    """Return errors by their kind.

    Args:
        error: The errors.
        step: The difference that one integer more makes; it spreads over the errors.
    """
    half = step.to(error.dtype) / 2
    within = torch.where(error.abs() <= half * BEYOND_HALF, error, error.clamp(-half, half))
    return {ALL: error, ROUNDING: within, CLIPPED: error - within}


def of_cache(module: Attention, before: Attention, measure: Measure) -> Iterator[Measured]:
    """Yield the distance of the first output with keys, and with values, alone as integers.

    Args:
        module: The quantised module.
        before: The module before it was quantised; it is left as it is.
        measure: Returns the distance of a module, given the name of a part.
    """
    scales = module.kv_scales
    assert scales is not None
    counts: list[tuple[int, int]] = []

    def measured(part: int, kind: str) -> Distance:
        before.kv_scales = PartlyRounded(  # type: ignore[assignment]
            scales, part, kind, lambda *count: counts.append(count)
        )
        found = measure(CACHED[part], before)
        before.kv_scales = None
        return found

    for number, part in enumerate(CACHED):
        counts.clear()
        found = {ALL: measured(number, ALL)}
        clipped, count = (sum(each) for each in zip(*counts, strict=True))
        found[ROUNDING] = found[ALL]
        if clipped:
            found |= {kind: measured(number, kind) for kind in (ROUNDING, CLIPPED)}
        yield found[ALL], _split_of(part, found, clipped / max(count, 1))


def of_weight(name: str, module: Attention, before: Attention, measure: Measure) -> Measured:
    """Return the distance of the first output with one weight alone quantised.

    Args:
        name: The weight.
        module: The quantised module.
        before: The module before it was quantised; it is left as it is.
        measure: Returns the distance of a module, given the name of a part.
    """
    weight, was = before.get_parameter(name), module.float_weights[name].double()
    error = module.get_parameter(name).detach().double() - was
    errors = split(error, _steps(module.integers[name]))
    clipped = int(errors[CLIPPED].count_nonzero())
    found = {}
    for kind in (ALL, ROUNDING, CLIPPED) if clipped else (ALL,):
        with torch.no_grad():
            weight.copy_(was + errors[kind])
            found[kind] = measure(name, before)
            weight.copy_(was)
    return found[ALL], _split_of(name, {ROUNDING: found[ALL], **found}, clipped / error.numel())


def _steps(held: QuantisedWeight) -> Tensor:
    """Return the scale of each weight, `[out, in]`."""
    return torch.from_numpy(np.repeat(held.scales, held.block, axis=0).T.copy()).double()


def _split_of(part: str, found: Mapping[str, Distance], share: float) -> Split:
    sqnr = {kind: each.sqnr for kind, each in found.items() if is_finite(each)}
    return Split(part, sqnr.get(ROUNDING), sqnr.get(CLIPPED), round(share, 9))
