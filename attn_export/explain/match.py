"""Known faults, and which of them reproduce the outputs of a runtime, or of a wrong graph."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import onnx

from attn_export.explain.comparison import Evidence, Rows
from attn_export.explain.explanation import OutOfTime
from attn_export.explain.faults.attention import IN_ATTENTION, MANY_IN_ATTENTION
from attn_export.explain.faults.fault import Fault, GraphFault, GraphPlace, Locator, made_at
from attn_export.explain.faults.inputs import IN_COMPUTED_MASKS, IN_INPUTS, IN_PRODUCTS
from attn_export.explain.faults.rotary import IN_ROTARY
from attn_export.explain.faults.softmax import IN_SOFTMAX
from attn_export.explain.faults.weights import IN_WEIGHTS, MANY_IN_WEIGHTS
from attn_export.explain.input_roles import axes_of, input_roles
from attn_export.explain.pattern import separating_conditions
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
    where = functools.partial(_where_made, evaluation, evidence)
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


# -- rows that a fault is made in ---------------------------------------------------------------

_HIDDEN = -1e29
"""The number up to which an element of a float mask hides a key."""


def _where_made(evaluation: Evaluation, cases: Sequence[Evidence], rows: Sequence[Rows]) -> str:
    """Describe the rows in which a fault is made.

    Returns:
        The end of a sentence; "" if they have nothing in common that is known, or if too few cases
        tell.
    """
    made, left = (
        [any(part[which].any() for part in case.values()) for case in rows] for which in (0, 1)
    )
    if sum(made) < 2:
        return ""
    units = {output.name: _units(output) for output in evaluation.proto.graph.output}
    found: list[list[str]] = []
    for case, parts in zip(cases, rows, strict=True):
        for name, (made_rows, right_rows) in parts.items():
            if made_rows.any() or right_rows.any():
                described = _conditions(evaluation, case, made_rows.shape, units[name])
                found.append(
                    [
                        text
                        for text, holds in described
                        if not (made_rows & ~holds).any() and not (right_rows & holds).any()
                    ]
                )
    texts = [text for text in found[0] if all(text in others for others in found)]
    if not any(m and r for m, r in zip(made, left, strict=True)):
        made_sizes, left_sizes = (
            [case.sizes for case, flag in zip(cases, flags, strict=True) if flag]
            for flags in (made, left)
        )
        # A range between sizes that pass says little: few cases have sizes of it.
        conditions = separating_conditions(made_sizes, left_sizes)
        texts += [text for text in conditions if not text.startswith("with ")]
    return min(texts, key=lambda text: text.startswith("in the "), default="")


def _units(output: onnx.ValueInfoProto) -> list[str]:
    """Return what the rows of an output are, by its axes but the last."""
    axes = axes_of(output)
    words = {"query_len": "query", "total_len": "key", "capacity": "key", "": "head"}
    other = "query" if len(axes) == 3 else "position"
    return ["batch element", *(words.get(axis, other) for axis in axes[1:-1])][: len(axes) - 1]


def _conditions(
    evaluation: Evaluation, case: Evidence, shape: tuple[int, ...], units: Sequence[str]
) -> Iterator[tuple[str, Array]]:
    """Yield descriptions of rows, and the rows that each describes, `shape`."""
    for text, hides in _hidden_keys(evaluation, case):
        # `[B, L]`; of keys, only what holds for all queries of a batch element is known.
        by_row = hides if units[-1] == "query" else np.asarray(hides.all(axis=1, keepdims=True))
        if by_row.shape[1] in (1, shape[-1]):
            middle = (1,) * (len(shape) - 2)
            yield text, np.broadcast_to(by_row.reshape(len(by_row), *middle, -1), shape)
    for axis, unit in enumerate(units[: len(shape)]):
        size = shape[axis]
        index = np.arange(size).reshape(-1, *(1,) * (len(shape) - axis - 1))
        for text, holds in (
            (f"in the first {unit}", index == 0),
            (f"in every {unit} but the first", index > 0),
            (f"in the last {unit}", index == size - 1),
            (f"in every {unit} but the last", index < size - 1),
            *((f"in {unit} {number}", index == number) for number in range(1, 8)),
        ):
            yield text, np.broadcast_to(holds, shape)


def _hidden_keys(evaluation: Evaluation, case: Evidence) -> Iterator[tuple[str, Array]]:
    """Yield descriptions of the rows whose mask hides certain keys, `[B, L]` or `[B, 1]`."""
    batch = len(next(iter(case.right.values())))
    for name, array, role in input_roles(evaluation, case.values):
        if role == "mask" and array.size and (array.ndim == 4 or array.shape[:-1] == (batch,)):
            shown = array if array.dtype == np.bool_ else array > _HIDDEN
            shown = shown.reshape(len(shown), *(1,) * (4 - shown.ndim), *shown.shape[1:])
            hidden = np.asarray(~shown.any(axis=1))  # [B, L, S]
            yield f"in rows whose {name} hides key 0 (left padding)", hidden[..., 0]
            yield f"in rows whose {name} hides the last key", hidden[..., -1]
            yield f"in rows whose {name} hides no key", np.asarray(~hidden.any(axis=-1))
            yield f"in rows whose {name} hides a key", np.asarray(hidden.any(axis=-1))
            return
