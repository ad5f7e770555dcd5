"""Contents of a cache that is written in place: rows of other lengths, and unused capacity."""

from __future__ import annotations

import numpy as np

from attn_export.cases.contents import Content, Drawn
from attn_export.cases.draw import Arrays

LOUD = 1e3
"""The factor on what lies behind the keys of a row; float16 has room for its scores."""


def keys_of_rows(inputs: Arrays, *, in_place: bool) -> np.ndarray:
    """Return the number of keys of each row of the batch, with its new ones: `[B]`."""
    B, L = inputs["query"].shape[:2]
    if in_place:
        return np.asarray(inputs["past_length"] + L)
    return np.full(B, inputs["attn_mask"].shape[-1])


def _beyond_length(drawn: Drawn) -> None:
    """Let rows hold 0, 1 or 2 keys of many, and make the unused capacity after them loud."""
    inputs = drawn.inputs
    lengths = inputs["past_length"]
    room = inputs["past_key"].shape[2] - inputs["query"].shape[1]
    lengths[...] = np.arange(len(lengths)) % max(min(room, 3), 1)
    for name in ("past_key", "past_value"):
        rest = np.arange(inputs[name].shape[2]) >= lengths[:, None]  # [B, S]
        inputs[name][np.broadcast_to(rest[:, None], inputs[name].shape[:3])] *= LOUD


def _empty_and_full(drawn: Drawn) -> None:
    """Let rows hold nothing, and the last one be full when the new keys are written."""
    inputs = drawn.inputs
    inputs["past_length"][...] = 0
    inputs["past_length"][-1] = inputs["past_key"].shape[2] - inputs["query"].shape[1]


LENGTHS = (
    Content(
        "beyond_length", "what a row does not hold is never seen", "keys behind the length",
        _beyond_length,
    ),
    Content(
        "empty_and_full", "rows of a batch have lengths of their own",
        "the length of one row for all", _empty_and_full,
    ),
)  # fmt: skip
