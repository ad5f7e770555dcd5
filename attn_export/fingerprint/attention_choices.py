"""Attention in float64, with every choice that runtimes make differently as an argument."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attn_export.tensorfile import Array

KvHead = Callable[[int], int]
"""The K/V head of a query head."""


def scores(query: Array, key: Array, kv_head: KvHead | None = None) -> Array:
    """Return `query [B, H, L, D]` · `key [B, Hkv, S, D]` / √D: `[B, H, L, S]`.

    Source: https://onnx.ai/onnx/operators/onnx__Attention.html, and
    `torch.nn.functional.scaled_dot_product_attention`, which agree on it.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, Hkv, S, D]`.
        kv_head: As for `shared`.
    """
    q, k = query.astype(np.float64), shared(key, query.shape[1], kv_head)
    return np.asarray(q @ k.swapaxes(-1, -2) / np.sqrt(query.shape[-1]))


def weigh(
    found: Array, value: Array, seen: Array | None = None, kv_head: KvHead | None = None
) -> Array:
    """Compute softmax of scores `[B, H, L, S]`, times `value [B, Hkv, S, Dv]`: `[B, H, L, Dv]`.

    Args:
        found: The scores; -inf hides a key.
        value: With heads that query heads share.
        seen: Bool, broadcasts to the scores: which keys a query sees. Default: all.
        kv_head: As for `shared`.

    Returns:
        The attention; 0 in rows that see no key.
    """
    if seen is not None:
        found = np.where(seen, found, -np.inf)
    best = np.max(found, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(found - np.where(np.isfinite(best), best, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.asarray(weights @ shared(value, found.shape[1], kv_head))


def attend(query: Array, key: Array, value: Array, seen: Array | None = None) -> Array:
    """Compute plain attention: `weigh` of `scores`, heads shared in blocks.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, Dv]`.
        seen: Bool, broadcasts to the scores: the keys that a query sees. Default: all.
    """
    return weigh(scores(query, key), value, seen)


def shared(x: Array, heads: int, kv_head: KvHead | None = None) -> Array:
    """Return keys or values in float64, one for each query head.

    Args:
        x: `[B, Hkv, S, D]`.
        heads: H.
        kv_head: The one of a query head. Default: in blocks, h // (H // Hkv).
    """
    q_per_kv = heads // x.shape[1]
    chosen = [kv_head(h) if kv_head else h // q_per_kv for h in range(heads)]
    return x.astype(np.float64)[:, chosen]


def up_to(last: Array, keys: int) -> Array:
    """Return the keys that are seen up to the last key of each query.

    Args:
        last: The last key of each query, `[.., L]`.
        keys: S.

    Returns:
        Bool `[.., L, S]`.
    """
    return np.asarray(np.arange(keys) <= last[..., None])
