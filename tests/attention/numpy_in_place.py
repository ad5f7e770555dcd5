"""Reference for a cache in place, in plain numpy.

Legend: see `numpy_attention`; S is the capacity of the buffers, P differs between batch elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def past_of_rows(at: Any) -> np.ndarray:
    """Return P in the shape for adding it to keys and queries: `[B, 1, 1, 1]`."""
    held: np.ndarray = at.set("past_length", at["inputs"]["past_length"])
    return held[:, None, None, None]


def written(at: Any, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Return copies of the buffers with the new keys and values, row by row."""
    held = at.set("written_after", at["past_length"])  # [B]
    buffers = []
    for name, new in (("past_key", k), ("past_value", v)):
        buffer = at["inputs"][name].copy()
        for row, places in enumerate(held[:, None] + np.arange(new.shape[2])):
            inside = (places >= 0) & (places < buffer.shape[2])
            buffer[row][:, places[inside]] = new[row][:, inside]
        buffers.append(buffer)
    return buffers


def counted(at: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the keys that a row holds after the new ones are written: `[B, 1, 1, S]`."""
    count = at.set("count", at["past_length"] + shape[-2])  # [B]
    return np.arange(shape[-1]) < count[:, None, None, None]
