"""Match of an output with a reading of its probe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from attn_export.diagnose.attention_steps import Call, Change, attention
from attn_export.diagnose.findings import SOMETHING_ELSE, ProbeFinding
from attn_export.parity.measures import distance
from attn_export.tensorfile import Array, is_floating

CLOSE = 0.1
"""The largest relative error of a row that is still the same reading: 8 bits pass, a key more or
less does not."""

APART = 3 * CLOSE
"""Least difference of any two readings of a probe in some row."""


SLOTS = {
    "q": "query", "k": "key", "v": "value", "mask": "attn_mask", "past_key": "past_key",
    "past_value": "past_value", "cache_length": "lengths",
}  # fmt: skip
"""The inputs of probes by their names in a `Call`."""


def attend(
    inputs: Mapping[str, Array], changes: Mapping[str, Change] | None = None, **attributes: float
) -> Array:
    """Return attention in float64: `[B, H, L, Dv]`.

    Args:
        inputs: By the names of probes: query `[B, H, L, D]`, key `[B, Hkv, S, D]` …
        changes: The steps to compute otherwise, as in `misreadings`.
        attributes: Those of the node.
    """
    given = {
        name: array.astype(np.float64) if is_floating(array.dtype) else array
        for name, array in inputs.items()
    }
    slots: Any = {slot: given.get(name) for slot, name in SLOTS.items()}
    return attention(Call(**slots, attributes=attributes), changes)[0]


@dataclasses.dataclass(frozen=True)
class Readings:
    """Readings as the outputs that they lead to.

    Attributes:
        outputs: By reading; `[.., L, Dv]`, of equal shapes where the reading leaves the shape.
    """

    outputs: Mapping[str, np.ndarray]

    def __call__(self, output: np.ndarray) -> ProbeFinding:
        """Return the nearest reading, if it is close."""
        found = {name: distance(output, wanted).row for name, wanted in self.outputs.items()}
        nearest = min(found, key=lambda name: found[name])
        if found[nearest] <= CLOSE:
            return ProbeFinding(nearest)
        return ProbeFinding(SOMETHING_ELSE, _difference(output, nearest, self.outputs[nearest]))


def _difference(output: np.ndarray, nearest: str, wanted: np.ndarray) -> str:
    if output.shape != wanted.shape:
        return f"its shape is {list(output.shape)}, not {list(wanted.shape)}"
    got, expected = output.astype(np.float64), wanted.astype(np.float64)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    error = np.where(same, 0.0, np.nan_to_num(np.abs(got - expected), nan=np.inf))
    place = np.unravel_index(int(np.argmax(error)), output.shape)
    where = ", ".join(str(int(i)) for i in place)
    return f"at [{where}] {got[place]:.4g}; if {nearest!r}, {expected[place]:.4g}"
