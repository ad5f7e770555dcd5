"""Attention in float64, step by step, so that a known mistake can be made in one of them.

Written from the specification of ONNX (`Attention`, opset 23 to 25), without looking at how a
runtime computes it: it says what a graph means.

Legend: B batch, H query heads, Hkv key/value heads, L query length, S key length (past
included), P past length, D head width, Dv value head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attn_export.tensorfile import Array

Change = Callable[[Any, Mapping[str, Any]], Any]
"""Gets the value of a step, and all steps so far; returns what a mistake makes of it."""

AFTER_SOFTMAX, WITH_MASK, CAPPED = 3, 2, 1
"""`qk_matmul_output_mode`; 0 is the scores as they are."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Inputs of one `Attention` node.

    Attributes:
        q: `[B, H, L, D]`, or `[B, L, H·D]`; `k`, `v`, `past_key`, `past_value` likewise.
        mask: Bool or float, broadcast to `[B, H, L, S]`.
        cache_length: `nonpad_kv_seqlen` `[B]`: the number of keys of each row.
        attributes: The attributes of the node that are set.
    """

    q: Array
    k: Array
    v: Array
    mask: Array | None = None
    past_key: Array | None = None
    past_value: Array | None = None
    cache_length: Array | None = None
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class _Steps(dict[str, Any]):
    """The values so far, by name."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        super().__init__()
        self._changes = changes

    def set(self, name: str, value: Any) -> Any:
        if name in self._changes:
            value = self._changes[name](value, self)
        self[name] = value
        return value


def attention(
    call: Call, changes: Mapping[str, Change] | None = None
) -> tuple[Array, Array, Array, Array]:
    """Return output, present key, present value and scores of the node.

    Steps that can be changed: ``past``, ``queries``, ``keys``, ``values``, ``kv_head``,
    ``scale``, ``products``, ``softcap``, ``capped``, ``offset``, ``causal``, ``given``, ``added``,
    ``visible``, ``hidden``, ``scores``, ``weights``, ``attended``.

    Args:
        call: Inputs and attributes of the node.
        changes: The steps to replace, by name.
    """
    at = _Steps(changes or {})
    flat = call.q.ndim == 3
    heads, kv_heads = call.attributes.get("q_num_heads"), call.attributes.get("kv_num_heads")
    q, k, v = (_split(x, n) for x, n in ((call.q, heads), (call.k, kv_heads), (call.v, kv_heads)))
    past = at.set("past", (call.past_key, call.past_value))
    keys = at.set("keys", k if past[0] is None else np.concatenate([past[0], k], axis=2))
    values = at.set("values", v if past[1] is None else np.concatenate([past[1], v], axis=2))
    q = at.set("queries", q)
    capped = _scores(at, q, keys, call.attributes)
    _visible(at, call, capped.shape, 0 if past[0] is None else past[0].shape[2])
    scores = at.set("scores", np.where(at["visible"], capped + at["added"], at["hidden"]))
    weights = at.set("weights", softmax(scores, at["visible"]))
    attended = at.set("attended", weights @ values[:, at["kv_head"]])
    modes = {AFTER_SOFTMAX: weights, WITH_MASK: scores, CAPPED: capped}
    shown = modes.get(call.attributes.get("qk_matmul_output_mode", 0), at["products"])
    output = np.swapaxes(attended, 1, 2).reshape(*call.q.shape[:2], -1) if flat else attended
    return output, keys, values, shown


def softmax(scores: Array, visible: Array) -> Array:
    """Compute the softmax over the last axis; rows without visible keys are 0.

    Args:
        scores: Float64 `[B, H, L, S]`.
        visible: Bool, broadcasts to the scores: True where a key is visible.
    """
    nothing = ~np.broadcast_to(visible, scores.shape).any(axis=-1, keepdims=True)
    if not scores.size:
        return np.zeros_like(scores)
    largest = scores.max(axis=-1, keepdims=True)
    raised = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    with np.errstate(invalid="ignore"):  # 0 / 0 in a row where nothing is visible
        weights = raised / raised.sum(axis=-1, keepdims=True)
    return np.where(nothing, 0.0, weights)


def _scores(at: _Steps, q: Array, keys: Array, attributes: Mapping[str, Any]) -> Array:
    """Return the scaled and capped scores, `[B, H, L, S]`."""
    H, Hkv = q.shape[1], keys.shape[1]
    # Query head h uses K/V head h // (H / Hkv).
    kv_head = at.set("kv_head", np.arange(H) // max(H // Hkv, 1))
    scale = at.set("scale", attributes.get("scale") or q.shape[-1] ** -0.5)
    products = at.set("products", (q @ np.swapaxes(keys[:, kv_head], -1, -2)) * scale)
    softcap = at.set("softcap", attributes.get("softcap") or 0.0)
    capped: Array = at.set("capped", softcap * np.tanh(products / softcap) if softcap else products)
    return capped


def _visible(at: _Steps, call: Call, shape: tuple[int, ...], P: int) -> None:
    """Set the keys that each query sees, and the mask added to its scores."""
    B, _, L, S = shape
    offset = P if call.cache_length is None else call.cache_length.reshape(B, 1, 1, 1) - L
    offset = at.set("offset", offset)
    i, j = np.arange(L)[:, None], np.arange(S)
    causal = j <= i + offset if call.attributes.get("is_causal") else np.ones((L, S), bool)
    causal = at.set("causal", causal)
    causal = causal & _window(call.attributes, i + offset - j)
    if call.cache_length is not None:
        causal = causal & (j < call.cache_length.reshape(B, 1, 1, 1))
    given = at.set("given", _read(call.mask, S))
    at.set("added", _added(call.mask, S))
    at.set("visible", causal & given)
    at.set("hidden", -np.inf)


def _window(attributes: Mapping[str, Any], behind: Array) -> Array:
    """Return the keys within the window of opset 25 before and after the query's own."""
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    seen = np.ones_like(behind, bool)
    if left >= 0:
        seen &= behind <= left
    if right >= 0:
        seen &= -behind <= right
    return seen


def _read(mask: Array | None, S: int) -> Array:
    if mask is None:
        return np.ones((1, 1), bool)
    seen = mask if mask.dtype == np.bool_ else ~np.isneginf(mask)
    missing = S - mask.shape[-1]  # a shorter mask hides what lies behind it
    return np.pad(seen, [(0, 0)] * (mask.ndim - 1) + [(0, missing)]) if missing > 0 else seen


def _added(mask: Array | None, S: int) -> Array:
    if mask is None or mask.dtype == np.bool_:
        return np.zeros((1, 1))
    finite = np.where(np.isneginf(mask), 0.0, mask)
    missing = S - mask.shape[-1]
    return np.pad(finite, [(0, 0)] * (mask.ndim - 1) + [(0, missing)]) if missing > 0 else finite


def _split(x: Array, heads: int | None) -> Array:
    """Reshape `[B, L, H·D]` to `[B, H, L, D]`; return four axes unchanged."""
    if x.ndim == 4:
        return x
    B, L, width = x.shape
    count = heads or 1
    return np.swapaxes(x.reshape(B, L, count, width // count), 1, 2)
