"""Known faults of single query heads of an `Attention` node."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Final

import numpy as np

from attn_export.explain.faults.attention import ANY, IN_ATTENTION, StepValues
from attn_export.explain.faults.fault import Fault
from attn_export.explain.faults.softmax import IN_SOFTMAX
from attn_export.float64.attention_steps import StepChange
from attn_export.tensorfile import Array


def _in_head(head: int, change: StepChange) -> StepChange:
    """Return a change that is made in one query head: of a step with an axis of heads, or of none.

    Keys and values have heads of their own, in which it cannot be made.
    """

    def changed(value: Any, at: StepValues) -> Array:
        H = at["queries"].shape[1]
        if head >= H:
            raise IndexError(head)
        wrong, right = (np.asarray(x) for x in (change(value, at), value))
        heads = np.arange(H) == head
        if right.ndim != 1 and (right.ndim < 4 or right.shape[1] in (1, H)):
            heads = heads.reshape(H, 1, 1)
        return np.where(heads, wrong, right)

    return changed


def _swap_heads(a: int, b: int) -> StepChange:
    def change(attended: Array, _: StepValues) -> Array:
        order = np.arange(attended.shape[1])
        order[[a, b]] = b, a
        return attended[:, order]

    return change


_MOST_HEADS = 32
"""The number of query heads, from the first on, of which every pair is tried."""

_SINGLE_HEADS = 8
"""The number of query heads, from the first on, in each of which alone faults are tried."""

IN_SINGLE_HEADS: Final = (
    *(Fault(ANY, "swapped heads", f"the results of query heads {a} and {b} are swapped",
              {"attended": _swap_heads(a, b)})
      for a, b in itertools.combinations(range(_MOST_HEADS), 2)),
    *(dataclasses.replace(
        row, effect=f"in query head {head} alone, {row.effect}",
        changes={step: _in_head(head, change) for step, change in row.changes.items()})
      for head in range(_SINGLE_HEADS) for row in (*IN_ATTENTION, *IN_SOFTMAX)),
)  # fmt: skip
"""Faults of single heads. A head beyond those of the node raises IndexError: it is impossible."""
