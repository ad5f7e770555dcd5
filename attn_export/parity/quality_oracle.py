"""Distances of a quantised module from the module as it was before that, in float64.

The distance of a tensor is split into what rounding costs and what clipping does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.block_scales import BlockScales
from attn_export.attention.float16_cache import Float16Cache
from attn_export.attention.quantised import read_cache, unquantised
from attn_export.attention.quantised_activations import QuantisedActivations
from attn_export.attention.quantised_cache import CacheScales, Pair
from attn_export.export.subject import Subject
from attn_export.export.trees import to_numpy, to_torch
from attn_export.parity.oracle import Oracle
from attn_export.parity.quality_vectors import distance, heads, of_logits, of_outputs
from attn_export.quality import ATTENDED, Budget, Distance, Quality, Split, is_finite
from attn_export.quantiser import QuantisedWeight
from attn_export.results import Arrays, Golden
from attn_export.tensorfile import is_floating

CACHE, ACTIVATIONS = "cache", "activations"
"""The parts that are no weights."""


def measure_quality(
    subject: Subject, goldens: Sequence[Golden], budgets: Sequence[Budget]
) -> tuple[Quality, Sequence[Arrays]]:
    """Measure a quantised subject against its unquantised module.

    Args:
        subject: The subject; its module has quantised weights or a cache of integers.
        goldens: The cases, with inputs and the truth of the quantised module.
        budgets: The limits.

    Returns:
        The distances, and the outputs of the unquantised module in each case.
    """
    module = subject.module
    assert isinstance(module, Attention)
    before = unquantised(module)
    given = [golden.case.inputs for golden in goldens]
    kinds = {name: array.dtype for name, array in goldens[0].expected.items()}
    of_floats = [to_numpy(read_cache(module, to_torch(inputs))) for inputs in given]
    wide, attended_before = _run(subject, before, of_floats)
    _, attended = _run(subject, module, given)
    floats = [
        {
            name: a.astype(kinds[name]) if is_floating(kinds[name]) else golden.expected[name]
            for name, a in outputs.items()
        }
        for outputs, golden in zip(wide, goldens, strict=True)
    ]
    pairs = {
        name: [(f[name], g.expected[name]) for f, g in zip(floats, goldens, strict=True)]
        for name, kind in kinds.items()
        if is_floating(kind)
    }
    outputs, by_head = of_outputs(pairs)
    before_out = heads(ATTENDED, list(zip(attended_before, attended, strict=True)))
    parts = list(_of_parts(subject, module, before, (given, of_floats), wide))
    found = Quality(
        tuple(outputs), tuple(d for d in (*before_out, *by_head) if is_finite(d)),
        tuple(part for part, _ in parts if is_finite(part)), tuple(budgets),
        of_logits(pairs, budgets), tuple(each for _, each in parts if each is not None),
    )  # fmt: skip
    return found, floats


def _of_parts(
    subject: Subject, module: Attention, before: Attention,
    given: tuple[Sequence[Arrays], Sequence[Arrays]], wide: Sequence[Arrays],
) -> Iterator[tuple[Distance, Split | None]]:  # fmt: skip
    """Yield the distance of the first output with each part alone quantised, and its split.

    Args:
        subject: The subject.
        module: Its module.
        before: The module before it was quantised.
        given: The inputs of `module`, and those of `before`.
        wide: The outputs of `before`.
    """
    first = subject.outputs[0]

    def of(part: str, outputs: Sequence[Arrays]) -> Distance:
        return distance(part, ((f[first], q[first]) for f, q in zip(wide, outputs, strict=True)))

    def measure(part: str, changed: Attention) -> Distance:
        return of(part, _run(subject, changed, given[1])[0])

    for name in module.float_weights:
        yield split_of_weight(name, module, before, measure)
    if module.kv_scales is not None:
        if module.float_weights:
            yield of(CACHE, _run(subject, unquantised(module, keep_cache=True), given[0])[0]), None
        yield from splits_of_cache(module, before, measure)
    if isinstance(module.activations, QuantisedActivations):
        before.activations = module.activations
        found = measure(ACTIVATIONS, before)
        yield found, Split(ACTIVATIONS, found.sqnr if is_finite(found) else None, None, 0.0)


def _run(
    subject: Subject, module: Attention, given: Sequence[Arrays]
) -> tuple[Sequence[Arrays], list[np.ndarray]]:
    """Return the float64 outputs of a module, and its heads before `out_proj`: `[B, H, L, Dv]`."""
    oracle, seen = Oracle(subject, module=module), list[Tensor]()

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].detach())

    hook = oracle.precise.get_submodule("out_proj").register_forward_pre_hook(note)
    outputs = [oracle.truth(inputs) for inputs in given]
    hook.remove()
    H = module.spec.num_heads
    joined = (to_numpy({"x": tensor})["x"] for tensor in seen)  # [B, L, H * Dv]
    return outputs, [x.reshape(*x.shape[:2], H, -1).swapaxes(1, 2) for x in joined]


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


def splits_of_cache(module: Attention, before: Attention, measure: Measure) -> Iterator[Measured]:
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


def split_of_weight(name: str, module: Attention, before: Attention, measure: Measure) -> Measured:
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
