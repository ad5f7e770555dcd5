"""A fault that was made in a model, and how well it explains the outputs of a wrong graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from attn_export.parts.whole_models.faults.changed_models import Variant
from attn_export.parts.whole_models.faults.parameters import SCALED

EQUAL = 1e-3
"""A fault that leaves a smaller share of the error unexplained ends the search: others of another
source could only be as good."""


@dataclasses.dataclass(frozen=True)
class TriedFault:
    """A fault that was made in a model.

    Attributes:
        unexplained: The share of the error that it leaves.
        cosine: That of its error and the error to explain.
        ratio: The length of the latter in its direction, in lengths of its error.
        moved: Which outputs it changes.
        is_fit: Whether its number was sought; not that of a round one that explains all.
    """

    variant: Variant
    unexplained: float
    cosine: float
    ratio: float
    moved: Sequence[bool]
    is_fit: bool = False


def order_of(tried: TriedFault) -> float:
    """Return what to sort faults by, the best first."""
    # Noise must not decide between faults that fit alike, nor a fit go before another fault.
    left = round(tried.unexplained, 4) + (EQUAL if tried.is_fit else 0)
    return max(left, EQUAL) if tried.variant.kind == SCALED else left


def said_of(one: TriedFault) -> str:
    """Return what is wrong; a number that was sought is no more than a fit."""
    return f"{one.variant.sentence} (a fit)" if one.is_fit else one.variant.sentence
