"""Distances of a quantised module from the unquantised module, in float64.

The distance that each quantised tensor causes is split into those of rounding and of clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised import read_cache, unquantise
from attn_export.attention.quantised_activations import QuantisedActivations
from attn_export.attention.quantised_cache import CacheRounding, Pair
from attn_export.bundle.quality_vectors import (
    distance,
    head_distances,
    logit_distance,
    output_distances,
)
from attn_export.export.subject import Subject
from attn_export.export.trees import to_numpy, to_torch
from attn_export.quality import ATTENDED, Budget, Quality, is_finite
from attn_export.results import Arrays, Golden
from attn_export.schema import Distance, Split
from attn_export.tensorfile import is_floating
from attn_export.truth.oracle import Oracle

CACHE, ACTIVATIONS = "cache", "activations"
"""Names of the quantised parts that are no weights."""


def measure_quality(
    subject: Subject, goldens: Sequence[Golden], budgets: Sequence[Budget]
) -> tuple[Quality, Sequence[Arrays]]:
    """Measure a quantised subject against its unquantised module.

    Returns:
        The distances, and the outputs of the unquantised module in each case.
    """
    module = subject.module
    assert isinstance(module, Attention)
    unquantised = unquantise(module)
    inputs = [golden.case.inputs for golden in goldens]
    float_inputs = [to_numpy(read_cache(module, to_torch(arrays))) for arrays in inputs]
    float_outputs, float_heads = _run(subject, unquantised, float_inputs)
    _, heads = _run(subject, module, inputs)
    stored_outputs = [
        _as_stored(outputs, golden.expected)
        for outputs, golden in zip(float_outputs, goldens, strict=True)
    ]
    pairs = {
        name: [(f[name], g.expected[name]) for f, g in zip(stored_outputs, goldens, strict=True)]
        for name, array in goldens[0].expected.items()
        if is_floating(array.dtype)
    }
    outputs, by_head = output_distances(pairs)
    attended = head_distances(ATTENDED, list(zip(float_heads, heads, strict=True)))
    parts = list(
        _part_distances(subject, module, unquantised, (inputs, float_inputs), float_outputs)
    )
    quality = Quality(
        outputs=tuple(outputs),
        heads=tuple(each for each in (*attended, *by_head) if is_finite(each)),
        weights=tuple(apart for apart, _ in parts if is_finite(apart)),
        budgets=tuple(budgets),
        of_logits=logit_distance(pairs, budgets),
        splits=tuple(each for _, each in parts if each is not None),
    )
    return quality, stored_outputs


def _as_stored(outputs: Arrays, expected: Arrays) -> Arrays:
    """Return outputs of the unquantised module in the types of the expected outputs."""
    # Expected outputs that are not floating, such as a cache of integers, stay as they are.
    return {
        name: outputs[name].astype(t.dtype) if is_floating(t.dtype) else t
        for name, t in expected.items()
    }


def _part_distances(
    subject: Subject, module: Attention, unquantised: Attention,
    inputs: tuple[Sequence[Arrays], Sequence[Arrays]], float_outputs: Sequence[Arrays],
) -> Iterator[tuple[Distance, Split | None]]:  # fmt: skip
    """Yield the distance of the first output if one part alone is quantised, and its split.

    `inputs` are those of `module`, then those of `unquantised`, whose past is in floating point.
    `float_outputs` are the outputs of `unquantised`.
    """
    first = subject.outputs[0]

    def distance_of(part: str, outputs: Sequence[Arrays]) -> Distance:
        return distance(
            part, ((f[first], q[first]) for f, q in zip(float_outputs, outputs, strict=True))
        )

    def measure(part: str, changed: Attention) -> Distance:
        return distance_of(part, _run(subject, changed, inputs[1])[0])

    for name in module.float_weights:
        yield _split_of_weight(name, module, unquantised, measure)
    if module.kv_scales is not None:
        # If the cache alone is quantised, its distance is that of the output. Without
        # `float_weights` it is alone: beside stored integers a spec has no quantised activations.
        if module.float_weights:
            only_cache = unquantise(module, keep_cache=True)
            yield distance_of(CACHE, _run(subject, only_cache, inputs[0])[0]), None
        yield from _splits_of_cache(module, unquantised, measure)
    if isinstance(module.activations, QuantisedActivations):
        original, unquantised.activations = unquantised.activations, module.activations
        apart = measure(ACTIVATIONS, unquantised)
        unquantised.activations = original
        yield apart, Split(ACTIVATIONS, apart.sqnr if is_finite(apart) else None, None, 0.0)


def _run(
    subject: Subject, module: Attention, cases: Sequence[Arrays]
) -> tuple[Sequence[Arrays], list[np.ndarray]]:
    """Return the float64 outputs of a module, and its heads before `out_proj`: `[B, H, L, Dv]`."""
    oracle, joined = Oracle(subject, module=module), list[Tensor]()

    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        joined.append(inputs[0].detach())

    with oracle.precise.get_submodule("out_proj").register_forward_pre_hook(record):
        outputs = [oracle.truth(inputs) for inputs in cases]
    H = module.spec.num_heads
    arrays = (to_numpy({"x": tensor})["x"] for tensor in joined)  # [B, L, H * Dv]
    return outputs, [x.reshape(*x.shape[:2], H, -1).swapaxes(1, 2) for x in arrays]


CACHED = ("cached keys", "cached values")
"""Names of the parts of a cache."""

ALL, ROUNDING, CLIPPED = "all", "rounding", "clipped"
"""Errors of a tensor: all errors, the part of each up to half a step, and the part beyond."""

_BEYOND_HALF = 1 + 1e-6
"""The error from which on a value counts as clipped, in half steps. It is a little more than 1,
since errors are computed in float32."""

Measure = Callable[[str, Attention], Distance]
"""A function of the name of a part and of a module, which returns the module's distance."""


class _PartlyRounded(nn.Module):
    """Replacement for a quantised cache, with errors of one kind in one part: keys or values.

    Attributes:
        error: The kind of errors: `ALL`, `ROUNDING` or `CLIPPED`.
        record: Receives the number of clipped values, and the number of all values.
    """

    def __init__(
        self, scales: CacheRounding, part: int, error: str,
        record: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self.scales, self.part, self.error, self.record = scales, part, error, record

    def change_basis(self, x: Tensor) -> Tensor:
        """Return queries or keys as the cache takes them."""
        return self.scales.change_basis(x)

    def forward(self, key: Tensor, value: Tensor) -> Pair:
        """Return new keys and values with the errors, in floating point."""
        pair = [key, value]
        x = pair[self.part]
        stored: Pair = self.scales(key, value)
        rounded = self.scales.read(stored[0], stored[1], key.dtype)[self.part]
        errors = split(rounded - x, self.scales.quotients_of(x, self.part)[0].steps)
        self.record(int(errors[CLIPPED].count_nonzero()), x.numel())
        pair[self.part] = x + errors[self.error]
        return pair[0], pair[1]

    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:  # noqa: ARG002
        """Return keys and values as they are."""
        return key, value


def split(error: Tensor, step: Tensor | float) -> dict[str, Tensor]:
    """Return errors, and their parts by rounding and by clipping, by `ALL`, `ROUNDING`, `CLIPPED`.

    `error`: The errors, of any shape.
    """
    half = torch.as_tensor(step, dtype=error.dtype) / 2
    within = torch.where(error.abs() <= half * _BEYOND_HALF, error, error.clamp(-half, half))
    return {ALL: error, ROUNDING: within, CLIPPED: error - within}


def _splits_of_cache(
    module: Attention, unquantised: Attention, measure: Measure
) -> Iterator[tuple[Distance, Split]]:
    """Yield the distance of the first output with quantised keys only, then with values only.

    `unquantised` is changed while it runs, and then restored.
    """
    scales = module.kv_scales
    assert scales is not None
    counts: list[tuple[int, int]] = []

    def measure_error(part: int, error: str) -> Distance:
        unquantised.kv_scales = _PartlyRounded(  # type: ignore[assignment]
            scales, part, error, lambda *count: counts.append(count)
        )
        measured = measure(CACHED[part], unquantised)
        unquantised.kv_scales = None
        return measured

    for number, part in enumerate(CACHED):
        counts.clear()
        distances = {ALL: measure_error(number, ALL)}
        clipped, count = (sum(each) for each in zip(*counts, strict=True))
        distances[ROUNDING] = distances[ALL]
        if clipped:
            distances |= {error: measure_error(number, error) for error in (ROUNDING, CLIPPED)}
        yield distances[ALL], _split_of(part, distances, clipped / max(count, 1))


def _split_of_weight(
    name: str, module: Attention, unquantised: Attention, measure: Measure
) -> tuple[Distance, Split]:
    """Return the distance of the first output with one weight alone quantised.

    `unquantised` is changed while it runs, and then restored.
    """
    weight, original = unquantised.get_parameter(name), module.float_weights[name].double()
    difference = module.get_parameter(name).detach().double() - original
    integers = module.integers[name]
    scales = np.repeat(integers.scales, integers.block, axis=0).T.copy()  # [out, in]
    errors = split(difference, torch.from_numpy(scales))
    clipped = int(errors[CLIPPED].count_nonzero())
    distances = {}
    for error in (ALL, ROUNDING, CLIPPED) if clipped else (ALL,):
        with torch.no_grad():
            weight.copy_(original + errors[error])
            distances[error] = measure(name, unquantised)
            weight.copy_(original)
    share = clipped / difference.numel()
    return distances[ALL], _split_of(name, {ROUNDING: distances[ALL], **distances}, share)


def _split_of(part: str, distances: Mapping[str, Distance], share: float) -> Split:
    sqnr = {error: d.sqnr for error, d in distances.items() if is_finite(d)}
    return Split(part, sqnr.get(ROUNDING), sqnr.get(CLIPPED), round(share, 9))
