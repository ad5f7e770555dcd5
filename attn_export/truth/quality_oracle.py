"""Distances of a quantised module from the unquantised module, in float64.

The distance that each quantised tensor causes is split into those of rounding and of clipping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised import unquantise
from attn_export.bundle.quality_vectors import (
    distance,
    head_distances,
    logit_distance,
    output_distances,
)
from attn_export.export.subject import Subject
from attn_export.export.trees import to_numpy
from attn_export.quality import ATTENDED, Budget, Quality, is_finite
from attn_export.results import Arrays, Golden
from attn_export.schema import Distance, Split
from attn_export.tensorfile import is_floating
from attn_export.truth.oracle import Oracle


def measure_quality(
    subject: Subject, goldens: Sequence[Golden], budgets: Sequence[Budget]
) -> tuple[Quality, Sequence[Arrays]]:
    """Measure a quantised layer of ours, or module of the user, against it before.

    Returns:
        The distances, and the outputs of the unquantised module in each case.
    """
    module = subject.module
    if subject.linears is not None:
        with subject.linears.as_before(module):
            oracle = Oracle(subject)
            floats = [oracle.truth(golden.case.inputs) for golden in goldens]
        return measure_outputs(floats, goldens, budgets)
    assert isinstance(module, Attention)
    unquantised = unquantise(module)
    inputs = [golden.case.inputs for golden in goldens]
    float_outputs, float_heads = _run(subject, unquantised, inputs)
    _, heads = _run(subject, module, inputs)
    of_outputs, stored_outputs = measure_outputs(float_outputs, goldens, budgets)
    attended = head_distances(ATTENDED, list(zip(float_heads, heads, strict=True)))
    parts = list(_weight_distances(subject, module, unquantised, inputs, float_outputs))
    quality = dataclasses.replace(
        of_outputs,
        heads=(*filter(is_finite, attended), *of_outputs.heads),
        weights=tuple(apart for apart, _ in parts if is_finite(apart)),
        splits=tuple(each for _, each in parts),
    )
    return quality, stored_outputs


def measure_outputs(
    floats: Sequence[Arrays], goldens: Sequence[Golden], budgets: Sequence[Budget]
) -> tuple[Quality, list[Arrays]]:
    """Measure outputs of a quantised module against those of the unquantised one.

    Returns:
        The distances, and the latter outputs in the types of the former.
    """
    stored = [_as_stored(f, golden.expected) for f, golden in zip(floats, goldens, strict=True)]
    pairs = {
        name: [(f[name], g.expected[name]) for f, g in zip(stored, goldens, strict=True)]
        for name, array in goldens[0].expected.items()
        if is_floating(array.dtype)
    }
    outputs, heads = output_distances(pairs)
    logits = logit_distance(pairs, budgets)
    return Quality(tuple(outputs), tuple(heads), (), tuple(budgets), of_logits=logits), stored


def _as_stored(outputs: Arrays, expected: Arrays) -> Arrays:
    """Return outputs of the unquantised module in the types of the expected outputs."""
    # Expected outputs that are not floating, such as a cache of integers, stay as they are.
    return {
        name: outputs[name].astype(t.dtype) if is_floating(t.dtype) else t
        for name, t in expected.items()
    }


def _weight_distances(
    subject: Subject, module: Attention, unquantised: Attention, inputs: Sequence[Arrays],
    float_outputs: Sequence[Arrays],
) -> Iterator[tuple[Distance, Split]]:  # fmt: skip
    """Yield the distance of the first output if one weight alone is quantised, and its split."""
    first = subject.outputs[0]

    def measure(part: str, changed: Attention) -> Distance:
        outputs = _run(subject, changed, inputs)[0]
        return distance(
            part, ((f[first], q[first]) for f, q in zip(float_outputs, outputs, strict=True))
        )

    for name in module.float_weights:
        yield _split_of_weight(name, module, unquantised, measure)


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


ALL, ROUNDING, CLIPPED = "all", "rounding", "clipped"
"""Errors of a tensor: all errors, the part of each up to half a step, and the part beyond."""

_BEYOND_HALF = 1 + 1e-6
"""The error from which on a value counts as clipped, in half steps. It is a little more than 1,
since errors are computed in float32."""

Measure = Callable[[str, Attention], Distance]
"""A function of the name of a part and of a module, which returns the module's distance."""


def split(error: Tensor, step: Tensor | float) -> dict[str, Tensor]:
    """Return errors, and their parts by rounding and by clipping, by `ALL`, `ROUNDING`, `CLIPPED`.

    `error`: The errors, of any shape.
    """
    half = torch.as_tensor(step, dtype=error.dtype) / 2
    within = torch.where(error.abs() <= half * _BEYOND_HALF, error, error.clamp(-half, half))
    return {ALL: error, ROUNDING: within, CLIPPED: error - within}


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
