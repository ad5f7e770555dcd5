"""The table of known faults, and the places of a graph where each may be made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Final

from attn_export.explain.faults.attention import IN_ATTENTION
from attn_export.explain.faults.fault import Fault, Fitted, GraphPlace, Locator, Match
from attn_export.explain.faults.heads import IN_SINGLE_HEADS
from attn_export.explain.faults.inputs import IN_COMPUTED_MASKS, IN_INPUTS, IN_PRODUCTS
from attn_export.explain.faults.rotary import FITTED_IN_ROTARY, IN_ROTARY
from attn_export.explain.faults.softmax import FITTED_IN_SOFTMAX, IN_SOFTMAX
from attn_export.explain.faults.weights import IN_WEIGHTS, MANY_IN_WEIGHTS
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.parts import parts

_OF_PARTS: Final = [import_module(name) for part in parts() for name in part.faults]

KNOWN: Final[tuple[Fault, ...]] = (
    *IN_INPUTS,
    *IN_WEIGHTS,
    *(row for table in _OF_PARTS for row in table.KNOWN),
    *IN_COMPUTED_MASKS,
    *IN_ROTARY,
    *IN_ATTENTION,
    *IN_SOFTMAX,
    *IN_PRODUCTS,
)
"""All known faults. Of two with the same outputs, the first wins: simpler ones come first."""

MANY: Final[tuple[Fault, ...]] = MANY_IN_WEIGHTS
"""Faults with many variants, which are tried if nothing else explains the error well."""

FITTED: Final[tuple[Fitted, ...]] = (
    *FITTED_IN_SOFTMAX,
    *FITTED_IN_ROTARY,
    *(row for table in _OF_PARTS for row in table.FITTED),
)
"""Faults with a factor, which is searched for; tried after the many."""

LAST: Final[tuple[Fault, ...]] = IN_SINGLE_HEADS
"""Faults that are tried last."""


READINGS: Final = {fault.reading: fault.changes for fault in KNOWN if fault.reading}
"""The changed steps of an `Attention` node by the name that results of `probe` have for them."""


def made_in(faults: Iterable[Fault], evaluation: Evaluation, values: Values) -> Iterator[Match]:
    """Yield each fault at each place of a graph where it may be made.

    `values`: Those of one case.
    """
    places: dict[Locator, list[GraphPlace]] = {}
    for fault in faults:
        if fault.at not in places:
            places[fault.at] = list(fault.at(evaluation, values))
        yield from (Match(fault, place) for place in places[fault.at])
