"""Distances of a quantised module from the module with its weights as they were, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.quantised import unquantised
from attn_export.export.subject import Subject
from attn_export.export.tensors import to_numpy
from attn_export.parity.oracle import Oracle
from attn_export.parity.quality_vectors import distance, heads, of_outputs
from attn_export.quality import ATTENDED, Budget, Distance, Quality, is_finite
from attn_export.results import Arrays, Golden
from attn_export.tensorfile import is_floating


def measure_quality(
    subject: Subject, goldens: Sequence[Golden], budgets: Sequence[Budget]
) -> tuple[Quality, Sequence[Arrays]]:
    """Measure a quantised subject against its unquantised module.

    Args:
        subject: The subject; its module has quantised weights.
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
    wide, attended_before = _run(subject, before, given)
    _, attended = _run(subject, module, given)
    floats = [{name: a.astype(kinds[name]) for name, a in outputs.items()} for outputs in wide]
    pairs = {
        name: [(f[name], g.expected[name]) for f, g in zip(floats, goldens, strict=True)]
        for name, kind in kinds.items()
        if is_floating(kind)
    }
    outputs, by_head = of_outputs(pairs)
    before_out = heads(ATTENDED, list(zip(attended_before, attended, strict=True)))
    found = Quality(
        tuple(outputs), tuple(d for d in (*before_out, *by_head) if is_finite(d)),
        tuple(_of_weights(subject, module, before, given, wide)), tuple(budgets),
    )  # fmt: skip
    return found, floats


def _of_weights(
    subject: Subject, module: Attention, before: Attention, given: Sequence[Arrays],
    wide: Sequence[Arrays],
) -> list[Distance]:  # fmt: skip
    """Return the distance of the first output with each weight alone quantised."""
    first, found = subject.outputs[0], []
    for name in module.float_weights:
        with torch.no_grad():
            before.get_parameter(name).copy_(module.get_parameter(name))
            outputs, _ = _run(subject, before, given)
            before.get_parameter(name).copy_(module.float_weights[name])
        pairs = ((f[first], q[first]) for f, q in zip(wide, outputs, strict=True))
        found.append(distance(name, pairs))
    return [each for each in found if is_finite(each)]


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
