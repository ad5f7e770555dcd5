"""ONNX Runtime's own attention operators in float64, by the definitions of their documentation.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. The parameters of a
function are the inputs and the attributes of an operator, by their names.

Legend: B batch, H query heads, Hkv key/value heads, L new tokens, P past tokens, S all keys or
tokens of a cache, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attn_export.float64.attention_steps import (
    StepChange,
    Steps,
    attention,
    join_heads,
    split_heads,
)
from attn_export.float64.integer_steps import from_cache, to_cache
from attn_export.tensorfile import Array

_Changes = Mapping[str, StepChange]


def rotated(x: Array, positions: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    """Return heads `[B, H, L, D]` rotated by the angles of positions `[B, L]`.

    `cos` and `sin`, `[positions, R / 2]`: Those of the first R channels; others stay as they are.
    """
    if (positions < 0).any():
        raise IndexError("a position before 0")
    width = 2 * cos.shape[-1]
    cosines, sines = cos[positions][:, None], sin[positions][:, None]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = np.split(turned, 2, axis=-1)
    pairs = np.stack([first * cosines - second * sines, second * cosines + first * sines], -1)
    if not interleaved:
        pairs = np.swapaxes(pairs, -1, -2)
    return np.concatenate([pairs.reshape(turned.shape), rest], axis=-1)


# -- GroupQueryAttention -------------------------------------------------------------------------


def group_query_attention(
    query: Array, key: Array | None, value: Array | None, past_key: Array | None,
    past_value: Array | None, seqlens_k: Array, total_sequence_length: Array,
    cos_cache: Array | None, sin_cache: Array | None, position_ids: Array | None,
    attention_bias: Array | None, head_sink: Array | None, k_scale: Array | None,
    v_scale: Array | None,
    *, num_heads: int, kv_num_heads: int, scale: float = 0.0, softcap: float = 0.0,
    causal: int = 1, do_rotary: int = 0, rotary_interleaved: int = 0, smooth_softmax: int = 0,
    local_window_size: int = -1, sliding_window_cache: int = 0, kv_cache_bit_width: int = 8,
    changes: _Changes,
) -> tuple[Array, ...]:  # fmt: skip
    """Return attention over `seqlens_k[b] + 1` keys, the new ones included, and the cache.

    In a prompt, where `total_sequence_length` is L, no keys are past. Each query is rotated by its
    own position: a step ``positions`` before those of `attention`, `[B, L]`.
    """
    q, k, v = _three(query, key, value, num_heads, kv_num_heads)
    L, capacity = q.shape[2], 0 if past_key is None else past_key.shape[2]
    total = int(np.asarray(total_sequence_length).reshape(()))
    counts = seqlens_k.astype(np.int64).reshape(-1) + 1
    # The keys of a prompt begin at 0; later keys follow those in the cache.
    past = np.zeros_like(counts) if total == L else counts - L
    if (past < 0).any():
        raise ValueError(f"seqlens_k counts fewer keys than the {L} new ones")
    if do_rotary:
        assert cos_cache is not None
        assert sin_cache is not None
        positions = past[:, None] + np.arange(L) if position_ids is None else position_ids
        positions = Steps(changes).set("positions", positions)
        q, k = (
            rotated(x, positions, cos_cache, sin_cache, interleaved=bool(rotary_interleaved))
            for x in (q, k)
        )
    start = past
    if sliding_window_cache:
        start = _resident(past, capacity, local_window_size)
        total = int(start.max()) + L
    scales = None if k_scale is None or v_scale is None else (k_scale, v_scale)
    cached = _cached((k, v), (past_key, past_value), start, total, scales, kv_cache_bit_width or 8)
    (keys, values), read = cached
    sink = np.zeros(1) if head_sink is None and smooth_softmax else head_sink
    known = {
        "is_causal": causal, "scale": scale, "softcap": softcap,
        "offset": start.reshape(-1, 1, 1, 1),
        "sink": None if sink is None else sink.reshape(-1, 1, 1),
        "left_window_size": local_window_size - 1 if local_window_size > 0 else -1,
    }  # fmt: skip
    bias = _in_cache(attention_bias, past - start, keys.shape[2])
    ends = start + np.minimum(counts - past, L)
    output = attention((q, *read, bias, None, None, ends), known, changes)[0]
    if sliding_window_cache:
        kept = _resident(ends + past - start, capacity, local_window_size)
        keys, values = (_last(x, ends, kept, capacity) for x in (keys, values))
    return join_heads(output), keys, values


def _three(
    query: Array, key: Array | None, value: Array | None, H: int, Hkv: int
) -> tuple[Array, Array, Array]:
    """Return queries, keys and values with heads, which `query` may have one after another."""
    if key is not None and value is not None:
        return split_heads(query, H), split_heads(key, Hkv), split_heads(value, Hkv)
    heads = split_heads(query, H + 2 * Hkv)
    return heads[:, :H], heads[:, H : H + Hkv], heads[:, H + Hkv :]


def _cached(
    new: tuple[Array, Array], past: tuple[Array | None, Array | None], start: Array, total: int,
    scales: tuple[Array, Array] | None, bits: int,
) -> tuple[list[Array], list[Array]]:  # fmt: skip
    """Return the keys and values of the cache with new ones, as stored and as read."""
    if bits not in (4, 8):
        raise NotImplementedError(f"{bits} bits of GroupQueryAttention")
    if scales is None:
        stored = [_write_cache(*each, start, total) for each in zip(past, new, strict=True)]
        return stored, stored
    written = [to_cache(*each, bits, Steps({})) for each in zip(new, scales, strict=True)]
    stored = [_write_cache(*each, start, total) for each in zip(past, written, strict=True)]
    return stored, [from_cache(*each, bits, Steps({})) for each in zip(stored, scales, strict=True)]


def _write_cache(past: Array | None, new: Array, start: Array, total: int) -> Array:
    """Return the past, at least `total` long, with new tokens of element b from `start[b]` on.

    What lies behind them stays in a cache that is long enough, and is 0 in one that grows.
    """
    B, Hkv, L, D = new.shape
    capacity = 0 if past is None else past.shape[2]
    present = np.zeros((B, Hkv, max(capacity, total), D), new.dtype)
    for element, position in enumerate(start):
        if past is not None:
            kept = capacity if capacity >= total else position
            present[element, :, :kept] = past[element, :, :kept]
        present[element, :, position : position + L] = new[element]
    return present


def _resident(tokens: Array, capacity: int, window: int) -> Array:
    """Return how many of the last of `tokens` a cache in windows keeps, which drops many at once.

    It keeps all of at most `capacity` tokens, and always the last `window` ones.
    """
    dropped = capacity - window + 1
    if window <= 0 or dropped <= 0:
        raise ValueError(f"a cache of {capacity} tokens cannot hold a window of {window}")
    times = np.maximum(-(-(tokens - capacity) // dropped), 0)
    return np.asarray(tokens - dropped * times)


def _last(cache: Array, end: Array, count: Array, capacity: int) -> Array:
    """Return the last `count[b]` tokens before `end[b]`, and zeros up to the capacity."""
    B, Hkv, _, D = cache.shape
    kept = np.zeros((B, Hkv, capacity, D), cache.dtype)
    for element, (last, number) in enumerate(zip(end, count, strict=True)):
        kept[element, :, :number] = cache[element, :, last - number : last]
    return kept


def _in_cache(bias: Array | None, dropped: Array, S: int) -> Array | None:
    """Return a bias, whose columns are tokens, with the S columns of a cache without the first."""
    if bias is None or not dropped.any():
        return bias
    columns: Array = np.minimum(dropped[:, None] + np.arange(S), bias.shape[-1] - 1)
    return np.asarray(np.take_along_axis(bias, columns[:, None, None], axis=-1))


# -- MultiHeadAttention, and Attention of com.microsoft -------------------------------------------


def multi_head_attention(
    query: Array, key: Array | None, value: Array | None, bias: Array | None,
    key_padding_mask: Array | None, attention_bias: Array | None, past_key: Array | None,
    past_value: Array | None,
    *, num_heads: int, scale: float = 0.0, unidirectional: int = 0,
    mask_filter_value: float = -10000.0, changes: _Changes,
) -> tuple[Array, ...]:  # fmt: skip
    """Return attention, present keys and present values; keys of four axes have their bias."""
    if key is None or value is None or max(query.ndim, key.ndim) > 4:
        raise NotImplementedError("MultiHeadAttention of packed queries, keys and values")
    parts = [query, key, value]
    if bias is not None:
        ends = np.cumsum([query.shape[-1], query.shape[-1]])
        biases = np.split(bias, ends)
        parts = [x + b if x.ndim == 3 else x for x, b in zip(parts, biases, strict=True)]
    S = split_heads(key, num_heads).shape[2] + (0 if past_key is None else past_key.shape[2])
    mask = _masked(attention_bias, key_padding_mask, mask_filter_value, len(query), S)
    known = {"is_causal": unidirectional, "scale": scale} | dict.fromkeys(
        ("q_num_heads", "kv_num_heads"), num_heads
    )
    return attention((*parts, mask, past_key, past_value), known, changes)[:3]


def packed_attention(
    x: Array, weights: Array, bias: Array | None, mask_index: Array | None, past: Array | None,
    attention_bias: Array | None,
    *, num_heads: int, qkv_hidden_sizes: Sequence[int] = (), scale: float = 0.0,
    unidirectional: int = 0, mask_filter_value: float = -10000.0, changes: _Changes,
) -> tuple[Array, ...]:  # fmt: skip
    """Return attention of x, projected by weights of queries, keys and values, and the cache."""
    projected = x @ weights if bias is None else x @ weights + bias
    sizes = qkv_hidden_sizes or [projected.shape[-1] // 3] * 3
    query, key, value = np.split(projected, np.cumsum(sizes)[:2], axis=-1)
    past_key, past_value = (None, None) if past is None else past
    output, keys, values = multi_head_attention(
        query, key, value, None, mask_index, attention_bias, past_key, past_value,
        num_heads=num_heads, scale=scale, unidirectional=unidirectional,
        mask_filter_value=mask_filter_value, changes=changes,
    )  # fmt: skip
    return (output,) if past is None else (output, np.stack([keys, values]))


def _masked(bias: Array | None, padding: Array | None, low: float, B: int, S: int) -> Array | None:
    """Return what is added to the scores: a bias, and `low` for padding."""
    if padding is None:
        return bias
    if padding.shape == (B,):
        seen = (np.arange(S) < padding[:, None])[:, None]
    elif padding.shape == (2 * B,):  # the ends, and then the starts
        seen = (np.arange(S) < padding[:B, None]) & (np.arange(S) >= padding[B:, None])
        seen = seen[:, None]
    elif padding.ndim in (2, 3) and padding.shape[-1] == S:
        seen = padding.reshape(B, -1, S) != 0
    else:
        raise NotImplementedError(f"padding of {padding.shape}")
    hidden = np.where(seen, 0.0, low)[:, None]
    return hidden if bias is None else bias + hidden
