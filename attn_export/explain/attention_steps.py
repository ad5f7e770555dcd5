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
from onnx.reference.op_run import OpRun

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
    ``scale``, ``products``, ``capped``, ``offset``, ``causal``, ``given``, ``added``,
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
    weights = raised / raised.sum(axis=-1, keepdims=True)
    return np.where(nothing, 0.0, weights)


def _scores(at: _Steps, q: Array, keys: Array, attributes: Mapping[str, Any]) -> Array:
    """Return the scaled and capped scores, `[B, H, L, S]`."""
    H, Hkv = q.shape[1], keys.shape[1]
    # Query head h uses K/V head h // (H / Hkv).
    kv_head = at.set("kv_head", np.arange(H) // max(H // Hkv, 1))
    scale = at.set("scale", attributes.get("scale") or q.shape[-1] ** -0.5)
    products = at.set("products", (q @ np.swapaxes(keys[:, kv_head], -1, -2)) * scale)
    softcap = attributes.get("softcap") or 0.0
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


# -- ONNX Runtime's own attention operators in float64, as far as the `ort` dialect uses them ---

# https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. What else they can do
# is refused, so that no graph is reported as wrong for something that is not computed here.
#
# Legend: B batch, H query heads, Hkv key/value heads, L query length, D head width.


MICROSOFT = "com.microsoft"

GQA_INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total", "cos", "sin",
    "position_ids", "bias",
)  # fmt: skip
MHA_INPUTS = ("query", "key", "value", "packed_bias", "padding", "bias")
SAID = frozenset({"num_heads", "kv_num_heads", "scale", "softcap"})


class GroupQueryAttention(OpRun):
    """Causal; row b holds `seqlens_k[b] + 1` keys after the new ones."""

    op_domain = MICROSOFT

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        given = _optional_inputs(GQA_INPUTS, inputs, attributes, {"cos", "sin", "position_ids"})
        H, Hkv = attributes["num_heads"], attributes["kv_num_heads"]
        q, k, v = (_apart(given[name], n) for name, n in zip(GQA_INPUTS[:3], (H, Hkv, Hkv)))  # noqa: B905
        cache_length, L = given["seqlens_k"].astype(np.int64).reshape(-1) + 1, q.shape[2]
        total = int(np.asarray(given["total"]).reshape(()))
        # Keys of a prompt are the first; others follow what the row holds.
        start = np.zeros_like(cache_length) if total == L else cache_length - L
        keys = _written(given.get("past_key"), k, start, total)
        values = _written(given.get("past_value"), v, start, total)
        call = Call(
            q, keys, values, given.get("bias"), cache_length=start + L,
            attributes={**_numbers(attributes), "is_causal": 1},
        )  # fmt: skip
        return _joined(attention(call, self.changes)[0]), keys, values

    changes: Mapping[str, Change] = {}


class MultiHeadAttention(OpRun):
    """Every query sees every key."""

    op_domain = MICROSOFT

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        given = _optional_inputs(MHA_INPUTS, inputs, attributes, {"packed_bias", "padding"})
        q, k, v = (_apart(given[name], attributes["num_heads"]) for name in MHA_INPUTS[:3])
        call = Call(q, k, v, given.get("bias"), attributes=_numbers(attributes))
        return (_joined(attention(call, self.changes)[0]),)

    changes: Mapping[str, Change] = {}


def _optional_inputs(
    names: tuple[str, ...],
    inputs: tuple[Array | None, ...],
    attributes: dict[str, Any],
    refused: set[str],
) -> dict[str, Any]:
    """Return the inputs and attributes by name.

    Raises:
        NotImplementedError: If an input or attribute is used that is not computed here.
    """
    given = {name: array for name, array in zip(names, inputs, strict=False) if array is not None}
    more = [array for array in inputs[len(names) :] if array is not None]
    others = {name for name, value in attributes.items() if name not in SAID and value}
    if refused & given.keys() or more or others:
        used = ", ".join(sorted((refused & given.keys()) | others)) or "a further input"
        raise NotImplementedError(f"{used} of a contrib operator")
    return given


def _numbers(attributes: dict[str, Any]) -> dict[str, float]:
    return {name: attributes[name] for name in ("scale", "softcap") if attributes.get(name)}


def _apart(x: Array, heads: int) -> Array:
    """Reshape `[B, L, H·D]` to `[B, H, L, D]`."""
    B, L, width = x.shape
    return np.swapaxes(x.reshape(B, L, heads, width // heads), 1, 2)


def _joined(x: Array) -> Array:
    """Reshape `[B, H, L, D]` to `[B, L, H·D]`."""
    B, _, L, _ = x.shape
    return np.swapaxes(x, 1, 2).reshape(B, L, -1)


def _written(past: Array | None, new: Array, start: Array, total: int) -> Array:
    """Return the past with the new rows written at `start[b]`: a buffer of its size or `total`."""
    B, Hkv, L, D = new.shape
    cache_length = 0 if past is None else past.shape[2]
    present = np.zeros((B, Hkv, max(cache_length, total), D), new.dtype)
    if past is not None:
        present[:, :, :cache_length] = past
    for row, at in enumerate(start):
        present[row, :, at : at + L] = new[row]
    return present
