"""Cases whose inputs are changed until they are evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attn_export.parity.draw import scaled_case, with_other_signs
from attn_export.results import Case, Golden
from attn_export.spec import Shape

QUIETER = 4
"""The number of times that inputs are divided by 4 to make a case usable as evidence."""

SHORT = (1, 2, 3)
"""Numbers of elements that may all be near 0 at once."""


def short_rows(output_shapes: Mapping[str, Shape]) -> bool:
    """Return whether an output has rows so short that all their elements may nearly vanish."""
    return any(shape[-1] in SHORT for shape in output_shapes.values() if shape)


def usable_golden(case: Case, golden_of: Callable[[Case], Golden], *, short_rows: bool) -> Golden:
    """Return a case with its truth, its inputs changed as far as evidence requires.

    Loud inputs of one module overflow in another, or amplify rounding until nothing can fail:
    they are scaled down. Where a row of few elements happens to vanish, other signs help.

    Args:
        case: The case.
        golden_of: Computes the truth of a case.
        short_rows: Whether `short_rows` holds for the outputs.
    """
    golden = golden_of(case)
    for power in range(1, QUIETER + 1):
        if not golden.unusable:
            break
        if short_rows and not case.contents:
            golden = golden_of(with_other_signs(case, power))
        else:
            golden = golden_of(scaled_case(case, 0.25**power))
    return golden
