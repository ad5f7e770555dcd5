"""Known faults, and which of them reproduce the outputs of a runtime, or of a wrong graph."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from attn_export.explain.comparison import Evidence
from attn_export.explain.explanation import OutOfTime
from attn_export.explain.faults.attention import IN_ATTENTION, MANY_IN_ATTENTION
from attn_export.explain.faults.fault import Fault, GraphFault, GraphPlace, Locator, made_at
from attn_export.explain.faults.inputs import IN_COMPUTED_MASKS, IN_INPUTS, IN_PRODUCTS
from attn_export.explain.faults.rotary import IN_ROTARY
from attn_export.explain.faults.softmax import IN_SOFTMAX
from attn_export.explain.faults.weights import IN_WEIGHTS, MANY_IN_WEIGHTS
from attn_export.explain.row_conditions import where_made
from attn_export.explain.search import SURE, Search, Tried, least
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.optional_parts import hooks
from attn_export.tensorfile import Array

KNOWN: Final[tuple[Fault, ...]] = (
    *IN_INPUTS,
    *IN_WEIGHTS,
    *(row for table in hooks("KNOWN") for row in table),
    *IN_COMPUTED_MASKS,
    *IN_ROTARY,
    *IN_ATTENTION,
    *IN_SOFTMAX,
    *IN_PRODUCTS,
)
"""All known faults. Of two with the same outputs, the first wins: simpler ones come first."""

MANY: Final[tuple[Fault, ...]] = (*MANY_IN_WEIGHTS, *MANY_IN_ATTENTION)
"""Faults with many variants, which are tried if nothing else explains the error well."""

READINGS: Final = {fault.reading: fault.changes for fault in KNOWN if fault.reading}
"""The changed steps of an `Attention` node by the name that results of `probe` have for them."""


def made_in(
    faults: Iterable[Fault], evaluation: Evaluation, values: Values
) -> Iterator[GraphFault]:  # fmt: skip
    """Yield each fault at each place of a graph where it may be made.

    `values`: Those of one case.
    """
    places: dict[Locator, list[GraphPlace]] = {}
    for fault in faults:
        if fault.at not in places:
            places[fault.at] = list(fault.at(evaluation, values))
        yield from (made_at(place, fault) for place in places[fault.at])


_CONVINCING = 0.02
"""If a fault leaves a smaller share of the error unexplained, no further ones are tried."""

Match = Tried[GraphFault]


def matches(
    evaluation: Evaluation, evidence: Sequence[Evidence], out_of_time: OutOfTime = lambda _: False,
    *, thorough: bool = True,
) -> list[Match]:  # fmt: skip
    """Return the faults that explain the actual outputs of all cases, the best first."""

    def outputs(fault: GraphFault, case: Evidence) -> dict[str, Array]:
        return evaluation.outputs_of(fault.values(evaluation, case.values))

    values = evidence[0].values
    elements = sum(getattr(value, "size", 0) for value in values.values())  # 0 of sequences
    cost = len(values) * 1e-5 + elements * 2e-9
    search = Search(outputs, evidence, cost, out_of_time)
    where = functools.partial(where_made, evaluation, evidence)
    tried: list[Match] = []

    def steps() -> Iterator[list[Match]]:
        for table in (KNOWN, MANY):
            yield list(search.each(made_in(table, evaluation, values)))
        yield search.sought(tried)
        yield list(search.each(part for one in tried for part in one.fault.parts()))

    found: list[Match] = []
    for step in steps():
        tried += step
        found += search.confirmed(step, where)
        if least(found) <= _CONVINCING or not thorough:
            break
    return sorted(found, key=_order)


def _order(match: Match) -> tuple[bool, bool, float]:
    # Rounded, so that noise does not decide between two faults that fit equally well.
    is_weak = match.is_fit and match.unexplained > SURE
    return bool(match.only), is_weak, round(match.unexplained, 3)
