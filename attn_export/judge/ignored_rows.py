"""Checks of the rows that are not compared: of batch elements with NaN or Inf, or with padding.

The golden index says which they are, and anybody can write one: the inputs must show it, or some
rows of the element must be compared in each output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from attn_export.results import Case, Golden
from attn_export.tensorfile import is_floating

if TYPE_CHECKING:
    from attn_export.schema import InputSignature, TensorSignature


def compared_elements(golden: Golden) -> Set[int]:
    """Return the ignored batch elements of which rows are compared in each output that has rows."""
    elements = [
        {row // math.prod(array.shape[1:-1]) for row in golden.determined.get(name, ())}
        for name, array in golden.expected.items()
        if array.ndim > 1 and array.size
    ]
    return set(golden.case.ignored_rows).intersection(*elements) if elements else set()


def without_last(golden: Golden, outputs: Mapping[str, TensorSignature]) -> Iterator[str]:
    """Yield outputs of which the last position, which has the most keys, is compared nowhere."""
    for name, array in golden.expected.items():
        if array.ndim < 3 or not array.size or set(range(len(array))) - {*golden.case.ignored_rows}:
            continue
        count, rows = array.shape[-2], golden.determined.get(name, ())
        is_dynamic = any(isinstance(axis, str) for axis in outputs[name].shape[-2:-1])
        if is_dynamic and all((row + 1) % count for row in rows):
            yield f"compares no row at the last position of {name}"


def rows_note(goldens: Sequence[Golden]) -> tuple[str, ...]:
    """Return a note on the rows that are compared, if those of a batch element are not."""
    judged = total = 0
    for golden in goldens:
        for name, array in golden.expected.items():
            count = math.prod(array.shape[:-1]) if array.ndim > 1 else 0
            ignored = len(golden.case.ignored_rows) * math.prod(array.shape[1:-1]) if count else 0
            total += count
            judged += count - ignored + (len(golden.determined.get(name, ())) if count else 0)
    if judged == total:
        return ()
    return (
        f"{judged} of {total} rows are compared: the others hold padding or NaN, or are not "
        "stored, by the bundle's own claim",
    )


def wrongly_ignored(
    case: Case, signatures: Mapping[str, InputSignature], compared: Set[int], batch: str
) -> Iterator[str]:
    """Yield what is wrong with `ignored_rows`: they must be the batch elements with NaN or Inf."""
    rows = set[int]()
    has_batch = any(s.shape[:1] == (batch,) for s in signatures.values())
    for name, array in case.inputs.items():
        is_by_batch = array.ndim and (not has_batch or signatures[name].shape[:1] == (batch,))
        if is_by_batch and not is_finite_array(array) and name != "attn_mask":
            # -Inf belongs to a mask.
            wrong = ~(array.reshape(len(array), -1) < np.inf).all(-1)
            rows |= {int(row) for row in np.flatnonzero(wrong)}
    # Graphs may not tell the batch.
    fine = compared if has_batch else compared | rows
    for row in sorted(rows.symmetric_difference(case.ignored_rows) - fine):
        is_finite = "ignores batch element {}, whose inputs are finite"
        unsaid = "has NaN or Inf in batch element {}, and does not say so"
        yield (unsaid if row in rows else is_finite).format(row)
    if case.ignored_rows and len(rows) == case.sizes.get(batch):
        yield "ignores all batch elements"


def is_finite_array(array: np.ndarray) -> bool:
    """Return whether an array is surely finite: sums of NaN and infinities are not."""
    if not is_floating(array.dtype):
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(array.sum())
