"""What only a cache that is written in place has: rows of other lengths, and a rest behind them."""

from __future__ import annotations

import numpy as np

from attn_export.cases.draw import Arrays

LOUD = 1e3
"""How many times what a row holds the rest behind it is; float16 has room for its scores."""

FAR_APART = 24
"""How many keys the longest row of the case with very different rows holds."""


def keys_of_rows(inputs: Arrays, *, in_place: bool) -> np.ndarray:
    """How many keys each row of the batch has, its new ones included: `[B]`."""
    B, L = inputs["query"].shape[:2]
    if in_place:
        return np.asarray(inputs["past_length"] + L)
    return np.full(B, inputs["attn_mask"].shape[-1])


def loud_rest(inputs: Arrays) -> None:
    """Rows of 0, 1, … keys, and behind those what one who looks there cannot miss."""
    lengths = inputs["past_length"]
    lengths[...] = np.arange(len(lengths))
    for name in ("past_key", "past_value"):
        rest = np.arange(inputs[name].shape[2]) >= lengths[:, None]  # [B, S]
        inputs[name][np.broadcast_to(rest[:, None], inputs[name].shape[:3])] *= LOUD


def empty_and_full(inputs: Arrays) -> None:
    """Rows that hold nothing, and a last one that is full when the new keys are written."""
    inputs["past_length"][...] = 0
    inputs["past_length"][-1] = inputs["past_key"].shape[2] - inputs["query"].shape[1]
