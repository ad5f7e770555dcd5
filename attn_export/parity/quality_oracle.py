"""Distances of a quantised module from the module as it was before that, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised import read_cache, unquantised
from attn_export.attention.quantised_activations import QuantisedActivations
from attn_export.export.subject import Subject
from attn_export.export.trees import to_numpy, to_torch
from attn_export.parity import quality_splits
from attn_export.parity.oracle import Oracle
from attn_export.parity.quality_vectors import distance, heads, of_logits, of_outputs
from attn_export.quality import ATTENDED, Budget, Distance, Quality, Split, is_finite
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
        yield quality_splits.of_weight(name, module, before, measure)
    if module.kv_scales is not None:
        if module.float_weights:
            yield of(CACHE, _run(subject, unquantised(module, keep_cache=True), given[0])[0]), None
        yield from quality_splits.of_cache(module, before, measure)
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
