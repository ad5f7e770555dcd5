"""`LinearAttention` in float64, by the formula of the standard, token by token.

https://onnx.ai/onnx/operators/onnx__LinearAttention.html. Legend: B batch, H query heads, Hkv
key/value heads, r = H / Hkv, L tokens, D width of a key, Dv width of a value, C decays of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from attn_export.dialect_names import MICROSOFT
from attn_export.float64.attention_steps import StepChange, Steps
from attn_export.float64.contrib_operators import make_operator
from attn_export.tensorfile import Array


def _linear_attention(
    query: Array, key: Array, value: Array, past_state: Array | None = None,
    decay: Array | None = None, beta: Array | None = None,
    *, q_num_heads: int, kv_num_heads: int, scale: float = 0.0, update_rule: str = "gated_delta",
    chunk_size: int = 64, changes: Mapping[str, StepChange] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the output `[B, L, H·Dv]` and the state `[B, Hkv, D, Dv]` after the last token.

    `query`: `[B, L, H·D]`. `key`: `[B, L, Hkv·D]`. `value`: `[B, L, Hkv·Dv]`. `past_state`:
    `[B, Hkv, D, Dv]`. `decay`: logarithms, `[B, L, Hkv·C]`. `beta`: `[B, L, Hkv or 1]`.

    These steps can be changed: ``queries`` `[B, L, H, D]`, ``keys`` and ``values`` with heads;
    ``kv_head`` of each query head; ``scale``; ``past``; ``kept``, the share of the state that each
    token keeps `[B, L, Hkv, C]`; ``beta``; ``decays``, ``finds`` and ``reads``, the moments of a
    token; ``chunk``, the tokens after which ``restart`` makes a new state of one;
    ``attended`` `[B, L, H, Dv]`; ``present``.
    """
    steps = Steps(changes or {}, {"chunk_size": chunk_size, "rule": update_rule})
    q = steps.set("queries", _with_heads(query, q_num_heads))
    k = steps.set("keys", _with_heads(key, kv_num_heads))
    v = steps.set("values", _with_heads(value, kv_num_heads))
    steps.set("kv_head", np.arange(q_num_heads) // (q_num_heads // kv_num_heads))
    steps.set("scale", scale or q.shape[-1] ** -0.5)
    zeros = np.zeros((len(q), kv_num_heads, k.shape[-1], v.shape[-1]))
    steps.set("past", zeros if past_state is None else past_state)
    gated, delta = "gated" in update_rule, "delta" in update_rule
    if gated != (decay is not None) or delta != (beta is not None):
        raise ValueError(f"{update_rule} with other gates than it has")
    kept = np.ones((*k.shape[:3], 1)) if decay is None else _with_heads(decay, kv_num_heads)
    steps.set("log_kept", kept)
    steps.set("kept", kept if decay is None else np.exp(steps["log_kept"]))
    steps.set("beta", None if beta is None else beta[..., None])
    for name, moment in (("decays", "first"), ("finds", "decayed"), ("reads", "after")):
        steps.set(name, moment)
    steps.set("chunk", None)
    steps.set("restart", lambda state: state)
    return _over_tokens(steps)


def _over_tokens(steps: Steps) -> tuple[Array, Array]:
    state, attended = steps["past"], []
    for t in range(steps["queries"].shape[1]):
        if steps["chunk"] and t and t % steps["chunk"] == 0:
            state = steps["restart"](state)
        before, kept = state, steps["kept"][:, t, :, :, None]
        if steps["decays"] == "first":
            state = state * kept
        k, new = steps["keys"][:, t], steps["values"][:, t]  # [B, Hkv, D], [B, Hkv, Dv]
        if steps["beta"] is not None:
            found = before if steps["finds"] == "before" else state
            new = steps["beta"][:, t] * (new - np.einsum("bhdv,bhd->bhv", found, k))
        state = state + k[..., None] * new[..., None, :]
        if steps["decays"] == "last":
            state = state * kept
        read = (before if steps["reads"] == "before" else state)[:, steps["kv_head"]]
        attended.append(np.einsum("bhd,bhdv->bhv", steps["queries"][:, t], read))
    scaled = steps["scale"] * np.stack(attended, axis=1)
    output = steps.set("attended", scaled)
    return output.reshape(*output.shape[:2], -1), steps.set("present", state)


def _with_heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1)


OPERATORS: Final = [
    make_operator(domain, "LinearAttention", _linear_attention) for domain in ("", MICROSOFT)
]
"""The operator of ONNX, and that of ONNX Runtime, which means the same."""
