"""Reference for added keys (`add_bias_kv`, `add_zero_attn`) in plain numpy.

Legend: see `numpy_attention`; n added keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Pair = tuple[np.ndarray, np.ndarray]


def added_pairs(at: Mapping[str, Any]) -> list[Pair]:
    """Return the keys and values, `[B, Hkv, 1, D]` and `[B, Hkv, 1, Dv]`, in their order."""
    spec, w = at["spec"], at["parameters"]
    key, value = at["k"][:, :, :1], at["v"][:, :, :1]  # where there is a query, there is a key
    pairs = []
    if spec.add_bias_kv:
        learned = (w[f"added_keys.{name}"][:, None] for name in ("bias_k", "bias_v"))
        k, v = (
            np.broadcast_to(one, like.shape)
            for one, like in zip(learned, (key, value), strict=True)
        )
        pairs.append((k, v))
    if spec.add_zero_attn:
        pairs.append((np.zeros_like(key), np.zeros_like(value)))
    return pairs


def with_added(at: Mapping[str, Any]) -> Pair:
    """Return all keys and all values."""
    pairs = [(at["k"], at["v"]), *at["added_pairs"]]
    k, v = (np.concatenate(arrays, axis=2) for arrays in zip(*pairs, strict=True))
    return k, v


def widened(array: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Concatenate `[B, H, L, S]` and the columns of added keys, `[B, H, L, n]`."""
    return np.concatenate([array, columns.astype(array.dtype)], axis=-1)
