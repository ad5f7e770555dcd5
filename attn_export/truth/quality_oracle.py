"""Distances of a quantised module from the module before, in float64."""

from __future__ import annotations

from collections.abc import Sequence

from attn_export.bundle.quality_vectors import logit_distance, output_distances
from attn_export.quality import Budget, Quality
from attn_export.results import Arrays, Golden
from attn_export.tensorfile import is_floating


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
    logits = logit_distance(pairs, budgets)
    return Quality(output_distances(pairs), tuple(budgets), logits), stored


def _as_stored(outputs: Arrays, expected: Arrays) -> Arrays:
    """Return outputs of the unquantised module in the types of the expected outputs."""
    # Expected outputs that are not floating, such as a cache of integers, stay as they are.
    return {
        name: outputs[name].astype(t.dtype) if is_floating(t.dtype) else t
        for name, t in expected.items()
    }
