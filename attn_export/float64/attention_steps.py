"""Reference implementation of attention in float64, whose steps can be replaced one by one.

It follows the ONNX specification of `Attention` (opsets 23 to 25) and no runtime's code, so its
result is what a graph means. Replacing a step makes a known fault.

Legend: B batch, H query heads, Hkv key/value heads, L query length, S key length (past
included), P past length, D head width, Dv value head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.tensorfile import Array

StepChange = Callable[[Any, Mapping[str, Any]], Any]
"""Function from the right value of a step, and all earlier steps by name, to another value."""

AFTER_SOFTMAX, AFTER_MASK, AFTER_SOFTCAP = 3, 2, 1
"""Values of `qk_matmul_output_mode`: the scores after a step. 0 stands for the scaled products."""


class Steps(dict[str, Any]):
    """Values of the steps computed so far, by name; `set` applies the changes."""

    def __init__(
        self, changes: Mapping[str, StepChange], given: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(given or {})
        self._changes = changes

    def set(self, name: str, value: Any) -> Any:
        """Keep and return the value of a step, which a change may replace."""
        if name in self._changes:
            value = self._changes[name](value, self)
        self[name] = value
        return value


def attention(
    inputs: Sequence[Array | None],
    attributes: Mapping[str, Any],
    changes: Mapping[str, StepChange] | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Compute output, present key, present value and scores of the node.

    `inputs`: In the order of the operator, of which the last may be left out: queries,
    `[B, H, L, D]` or `[B, L, H·D]`; keys, `[B, Hkv, S - P, D]` or `[B, S - P, Hkv·D]`; values; a
    mask, bool or float, which broadcasts to `[B, H, L, S]`; keys of the past, `[B, Hkv, P, D]`, and
    values; `nonpad_kv_seqlen`, `[B]`, the number of keys of each batch element.
    `attributes`: Those of the node that are set; and those of other operators: ``sink``, scores
    `[H, 1, 1]` of a further key; ``offset``, positions of query 0, `[B, 1, 1, 1]`.

    These steps can be changed: ``past``, a pair of past keys and values; ``queries``, ``keys`` and
    ``values`` with heads, and the past included; ``kv_head``, the K/V head of each query head,
    `[H]`; ``scale``; ``products``, the scaled products of queries and keys; ``softcap``;
    ``capped``, the products after it; ``offset``, the position of query 0; ``causal``, the keys
    that the causal rule allows; ``mask_visible`` and ``mask_bias``, the keys that the mask allows
    and what it adds; ``visible``, the keys that both allow; ``hidden``, the score of a hidden key;
    ``scores`` before softmax; ``sink``; ``weights`` after it; ``attended``, `[B, H, L, Dv]`.

    Returns:
        Output in the layout of the queries, present key `[B, Hkv, S, D]`, present value
        `[B, Hkv, S, Dv]`, and the scores that `qk_matmul_output_mode` selects, `[B, H, L, S]`.
    """
    steps = Steps(changes or {})
    heads, kv_heads = (attributes.get(name, 1) for name in ("q_num_heads", "kv_num_heads"))
    query, key, value, mask, past_key, past_value, lengths = (*inputs, *[None] * 4)[:7]
    assert query is not None
    assert key is not None
    assert value is not None
    q, k, v = split_heads(query, heads), *(split_heads(x, kv_heads) for x in (key, value))
    past = steps.set("past", (past_key, past_value))
    keys = steps.set("keys", k if past[0] is None else np.concatenate([past[0], k], axis=2))
    values = steps.set("values", v if past[1] is None else np.concatenate([past[1], v], axis=2))
    q = steps.set("queries", q)
    capped = _scores(steps, q, keys, attributes)
    P = 0 if past[0] is None else past[0].shape[2]
    _visible(steps, attributes, mask, lengths, capped.shape, P)
    biased = capped + steps["mask_bias"]
    scores = steps.set("scores", np.where(steps["visible"], biased, steps["hidden"]))
    sink = steps.set("sink", attributes.get("sink"))
    weights = steps.set("weights", softmax(scores, steps["visible"], sink))
    attended = steps.set("attended", weights @ values[:, steps["kv_head"]])
    modes = {AFTER_SOFTMAX: weights, AFTER_MASK: scores, AFTER_SOFTCAP: capped}
    fourth_output = modes.get(attributes.get("qk_matmul_output_mode", 0), steps["products"])
    output = join_heads(attended) if query.ndim == 3 else attended
    return output, keys, values, fourth_output


def softmax(scores: Array, visible: Array, sink: Array | None = None) -> Array:
    """Return the softmax over the last axis; 0 for queries without visible keys.

    `scores`: Float64 `[B, H, L, S]`. `sink`: Scores `[H, 1, 1]` of a further key without a value.
    """
    fully_masked = ~np.broadcast_to(visible, scores.shape).any(axis=-1, keepdims=True)
    if not scores.size:
        return np.zeros_like(scores)
    sink = np.array(-np.inf) if sink is None else sink
    largest = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    exponentials = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    with np.errstate(invalid="ignore"):  # 0 / 0 for a query without a visible key
        weights = exponentials / (exponentials.sum(axis=-1, keepdims=True) + np.exp(sink - largest))
    return np.where(fully_masked, 0.0, weights)


def _scores(steps: Steps, q: Array, keys: Array, attributes: Mapping[str, Any]) -> Array:
    """Compute the scores with scale and softcap, `[B, H, L, S]`."""
    H, Hkv = q.shape[1], keys.shape[1]
    # Query head h uses K/V head h // (H / Hkv).
    kv_head = steps.set("kv_head", np.arange(H) // max(H // Hkv, 1))
    scale = steps.set("scale", attributes.get("scale") or q.shape[-1] ** -0.5)
    products = steps.set("products", (q @ np.swapaxes(keys[:, kv_head], -1, -2)) * scale)
    softcap = steps.set("softcap", attributes.get("softcap") or 0.0)
    capped = softcap * np.tanh(products / softcap) if softcap else products
    return np.asarray(steps.set("capped", capped))


def _visible(
    steps: Steps,
    attributes: Mapping[str, Any],
    mask: Array | None,
    lengths: Array | None,
    shape: tuple[int, ...],
    P: int,
) -> None:
    """Set the steps from `offset` to `hidden`: the visible keys, and the bias of a float mask."""
    B, _, L, S = shape
    ends = None if lengths is None else lengths.reshape(B, 1, 1, 1)
    last = P if ends is None else ends - L
    offset = steps.set("offset", attributes.get("offset", last))
    i, j = np.arange(L)[:, None], np.arange(S)
    causal = j <= i + offset if attributes.get("is_causal") else np.ones((L, S), bool)
    causal = steps.set("causal", causal)
    causal = causal & _window(attributes, i + offset - j)
    if ends is not None:
        causal = causal & (j < ends)
    allowed_by_mask, bias = _mask_parts(mask, S)
    allowed_by_mask = steps.set("mask_visible", allowed_by_mask)
    steps.set("mask_bias", bias)
    steps.set("visible", causal & allowed_by_mask)
    steps.set("hidden", -np.inf)


def _window(attributes: Mapping[str, Any], behind: Array) -> Array:
    """Return which keys, `behind` positions before their query, the window of opset 25 shows."""
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    within = np.ones_like(behind, bool)
    if left >= 0:
        within &= behind <= left
    if right >= 0:
        within &= -behind <= right
    return within


def _mask_parts(mask: Array | None, S: int) -> tuple[Array, Array]:
    """Return the keys that the mask allows, bool, and its bias; a short one hides later keys."""
    if mask is None:
        return np.ones((1, 1), bool), np.zeros((1, 1))
    if mask.dtype == np.bool_:
        return _pad_keys(mask, S), np.zeros((1, 1))
    hidden = np.isneginf(mask)
    return _pad_keys(~hidden, S), _pad_keys(np.where(hidden, 0.0, mask), S)


def _pad_keys(mask: Array, S: int) -> Array:
    """Pad the last axis of a mask with False or 0 up to S keys."""
    padding = max(S - mask.shape[-1], 0)
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, padding)])


def split_heads(x: Array, heads: int) -> Array:
    """Return `[B, L, H·D]` as `[B, H, L, D]`; arrays of four axes stay as they are."""
    if x.ndim == 4:
        return x
    B, L, width = x.shape
    return np.swapaxes(x.reshape(B, L, heads, width // heads), 1, 2)


def join_heads(x: Array) -> Array:
    """Reshape `[B, H, L, D]` to `[B, L, H·D]`."""
    B, H, L, D = x.shape
    return np.swapaxes(x, 1, 2).reshape(B, L, H * D)
