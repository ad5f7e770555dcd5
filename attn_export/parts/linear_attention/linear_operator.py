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
from attn_export.float64.fused_layers import swish
from attn_export.tensorfile import Array


def _linear_attention(
    query: Array, key: Array, value: Array, past_state: Array | None = None,
    decay: Array | None = None, beta: Array | None = None,
    *, q_num_heads: int, kv_num_heads: int, scale: float = 0.0, update_rule: str = "gated_delta",
    chunk_size: int = 0, changes: Mapping[str, StepChange] | None = None,  # noqa: ARG001 (a hint)
) -> tuple[Array, Array]:  # fmt: skip
    """Return the output `[B, L, H·Dv]` and the state `[B, Hkv, D, Dv]` after the last token.

    `query`: `[B, L, H·D]`. `key`: `[B, L, Hkv·D]`. `value`: `[B, L, Hkv·Dv]`. `past_state`:
    `[B, Hkv, D, Dv]`. `decay`: logarithms, `[B, L, Hkv·C]`. `beta`: `[B, L, Hkv or 1]`.

    These steps can be changed: ``queries`` `[B, L, H, D]`, ``keys`` and ``values`` with heads;
    ``kv_head`` of each query head; ``scale``; ``past``; ``log_kept``, and ``kept``, the share of
    the state that a token keeps `[B, L, Hkv, C]`; ``rate``, and ``found_rate`` of what its key
    finds, `[B, L, Hkv or 1, 1]`; ``decays``, ``finds`` and ``reads``, the moments of a token;
    ``starts``, which tokens start a chunk `[L]`, and ``restart``, a function of the state before
    those; ``stored``, a function of the state after each; ``attended`` `[B, L, H, Dv]`;
    ``present``.
    """
    steps = Steps(changes or {})
    q = steps.set("queries", _with_heads(query, q_num_heads))
    k = steps.set("keys", _with_heads(key, kv_num_heads))
    v = steps.set("values", _with_heads(value, kv_num_heads))
    steps.set("kv_head", np.arange(q_num_heads) // (q_num_heads // kv_num_heads))
    steps.set("scale", scale or q.shape[-1] ** -0.5)
    zeros = np.zeros((len(q), kv_num_heads, k.shape[-1], v.shape[-1]))
    steps.set("past", zeros if past_state is None else past_state)
    if ("gated" in update_rule, "delta" in update_rule) != (decay is not None, beta is not None):
        raise ValueError(f"{update_rule} with other gates than it has")
    log_kept = np.zeros((*k.shape[:3], 1)) if decay is None else _with_heads(decay, kv_num_heads)
    steps.set("kept", np.exp(steps.set("log_kept", log_kept)))
    rate = np.ones((1, q.shape[1], 1, 1)) if beta is None else beta[..., None]
    steps.set("rate", rate)
    steps.set("found_rate", 0 * rate if beta is None else rate)
    for name, moment in (("decays", "first"), ("finds", "decayed"), ("reads", "after")):
        steps.set(name, moment)
    steps.set("starts", np.zeros(q.shape[1], bool))
    steps.set("restart", lambda state, _: state)
    steps.set("stored", lambda state: state)
    return _over_tokens(steps)


def _over_tokens(steps: Steps) -> tuple[Array, Array]:
    at, attended = {"after": steps["past"]}, []
    for t in range(steps["queries"].shape[1]):
        kept, k = steps["kept"][:, t, :, :, None], steps["keys"][:, t]  # [B, Hkv, D]
        restarts = t and steps["starts"][t]
        at["before"] = steps["restart"](at["after"], steps["past"]) if restarts else at["after"]
        at["decayed"] = at["before"] * kept if steps["decays"] == "first" else at["before"]
        found = np.einsum("bhdv,bhd->bhv", at[steps["finds"]], k)
        new = steps["rate"][:, t] * steps["values"][:, t] - steps["found_rate"][:, t] * found
        state = at["decayed"] + k[..., None] * new[..., None, :]
        at["after"] = steps["stored"](state * kept if steps["decays"] == "last" else state)
        read = at[steps["reads"]][:, steps["kv_head"]]
        attended.append(np.einsum("bhd,bhdv->bhv", steps["queries"][:, t], read))
    output = steps.set("attended", steps["scale"] * np.stack(attended, axis=1))
    return output.reshape(*output.shape[:2], -1), steps.set("present", at["after"])


def _causal_convolution(
    x: Array, weight: Array, bias: Array | None = None, past_state: Array | None = None,
    *, activation: str = "none", changes: Mapping[str, StepChange] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the convolution of each channel `[B, C, L]`, and its last tokens `[B, C, k - 1]`.

    `weight`: `[C, 1, k]`. `bias`: `[C]`. `past_state`: `[B, C, k - 1]`. These steps can be changed:
    ``weight``, ``past`` and ``present``.
    """
    steps, (B, C, L) = Steps(changes or {}), x.shape
    kernel = steps.set("weight", weight)[:, 0]
    zeros = np.zeros((B, C, kernel.shape[-1] - 1))
    past = steps.set("past", zeros if past_state is None else past_state)
    padded = np.concatenate([past, x], axis=-1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[-1], axis=-1)
    sums = np.einsum("bclk,ck->bcl", windows, kernel) + (0 if bias is None else bias[:, None])
    output = sums if activation == "none" else swish(sums)[0]
    return output, steps.set("present", padded[..., L:])


def _with_heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1)


OPERATORS: Final = [
    make_operator(domain, name, function)
    for domain in ("", MICROSOFT)
    for name, function in (
        ("LinearAttention", _linear_attention),
        ("CausalConvWithState", _causal_convolution),
    )
]
"""The operators of ONNX, and those of ONNX Runtime, which mean the same."""
