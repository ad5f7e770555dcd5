"""Budgets of a quantised model: defaults, and the measurement that they are for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.errors import UsageError
from attn_export.quality import Budget, Quality
from attn_export.spec.cache_types import BY_BLOCK, FLOAT16

if TYPE_CHECKING:
    from attn_export.export.subject import Subject
    from attn_export.results import Golden

LEAST_SQNR = {"int8": 30.0, "int4": 12.0}
"""The default budget in dB by the narrowest type. docs/low-precision.md has the measured ones."""

LEAST_SQNR_OF_CACHE = {
    "none": math.inf, FLOAT16: 60.0, "int8": 30.0, "int4": 12.0, BY_BLOCK: 16.0,
}  # fmt: skip
"""The same by the type of a cache, or by its scales; the smaller of the two holds."""


def limits_of(subject: Subject, budgets: Sequence[Budget]) -> tuple[Budget, ...]:
    """Return the budgets of a build: as given, or the default where something is quantised.

    Args:
        subject: The subject.
        budgets: As given.

    Raises:
        UsageError: If there are budgets, and nothing is quantised or no weights in float are known.
    """
    spec = subject.spec
    if budgets and not (spec and (spec.quantised_weights or spec.kv_dtype != "none")):
        raise UsageError(
            f"a budget of {budgets[0]} without quantised weights or cache, which it is about; "
            "leave it out, or set weights_dtype or kv_dtype"
        )
    if budgets and not _has_both(subject):
        raise UsageError(
            f"a budget of {budgets[0]}, and the checkpoint holds integers only: there are no "
            "weights in float to compare with; leave it out"
        )
    if budgets or not _has_both(subject):
        return tuple(budgets)
    assert spec is not None
    least = [LEAST_SQNR[dtype] for dtype in spec.quantised_weights.values()]
    of_cache = LEAST_SQNR_OF_CACHE[BY_BLOCK if spec.kv_scale == BY_BLOCK else spec.kv_dtype]
    return (Budget("sqnr", min([*least, of_cache])),)


def write_measured(
    folder: Path, subject: Subject, goldens: Sequence[Golden], budgets: Sequence[Budget]
) -> Quality | None:
    """Measure a quantised subject against what it was before, and write what verifies it.

    Args:
        folder: The folder `golden/`.
        subject: The subject; nothing is done if it is not quantised.
        goldens: All golden vectors.
        budgets: The limits.
    """
    if not _has_both(subject):
        return None
    from attn_export.parity.quality_oracle import measure_quality
    from attn_export.parity.quality_vectors import quality_cases, write_quality

    keeps_integers = subject.spec is not None and subject.spec.kv_dtype != "none"
    cases = [golden.case for golden in goldens]
    numbers = quality_cases(cases, without_past=keeps_integers)
    quality, floats = measure_quality(subject, [goldens[number] for number in numbers], budgets)
    write_quality(folder, numbers, floats, quality)
    return quality


def _has_both(subject: Subject) -> bool:
    """Return whether a subject is quantised, and what it was before is known."""
    module = subject.module
    keeps_integers = getattr(module, "kv_scales", None) is not None
    return keeps_integers or bool(getattr(module, "float_weights", None))
