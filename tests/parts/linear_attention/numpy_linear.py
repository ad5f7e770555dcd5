"""Linear attention in plain numpy, of its own, whose steps tests change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attn_export.spec import AttentionSpec

Array = np.ndarray[Any, Any]
Change = Callable[[Any, Mapping[str, Any]], Any]


class _Steps(dict[str, Any]):
    def __init__(self, at: Mapping[str, Change]) -> None:
        super().__init__()
        self._at = at

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, self._at[name](value, self) if name in self._at else value)


def _project(parameters: Mapping[str, Array], name: str, x: Array) -> Array:
    y = x @ parameters[f"{name}.weight"].T
    return y + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else y


def _norm(spec: AttentionSpec, parameters: Mapping[str, Array], name: str, x: Array) -> Array:
    if spec.qk_norm == "none":
        return x
    mean = (x * x).mean(-1, keepdims=True) + x.dtype.type(spec.norm_eps)
    return x / np.sqrt(mean) * parameters[f"{name}_norm.weight"]


def _gates(spec: AttentionSpec, parameters: Mapping[str, Array], s: _Steps) -> None:
    """Set the logarithms of decays `[B, L, Hkv, D]` and the rates `[B, L, Hkv]`."""
    B, L, _ = s["x"].shape
    Hkv, D, dtype = spec.num_kv_heads, spec.head_dim, s["x"].dtype.type
    s["log_decay"] = np.zeros((B, L, Hkv, D), dtype)
    if "gated" in spec.update_rule:
        steps = np.logaddexp(dtype(0), _project(parameters, "a_proj", s["x"]) + s["dt_bias"])
        by_head = steps.reshape(B, L, Hkv, -1) * np.exp(parameters["A_log"])
        s["log_decay"] = -np.broadcast_to(by_head, (B, L, Hkv, D))
    s["decay"] = np.exp(s["log_decay"])
    rates = np.ones((B, L, Hkv), dtype)
    if "delta" in spec.update_rule:
        s["rate"] = _project(parameters, "b_proj", s["x"])
        rates = np.broadcast_to(1 / (1 + np.exp(-s["rate"])), (B, L, Hkv))
    s["beta"] = rates


def _convolved(
    spec: AttentionSpec, parameters: Mapping[str, Array], inputs: Mapping[str, Array], s: _Steps,
    projected: list[Array],
) -> list[Array]:  # fmt: skip
    """Return queries, keys and values after the convolution, if there is one."""
    if not spec.conv_width:
        return projected
    x, k = np.concatenate(projected, -1), spec.conv_width
    zeros = np.zeros((len(x), x.shape[-1], k - 1), x.dtype)
    s["past_conv"] = inputs.get("past_conv", zeros)
    s["kernel"] = parameters["conv"][:, 0]  # [channels, k]
    s["padded"] = np.concatenate([s["past_conv"].swapaxes(1, 2), x], 1)
    s["sums"] = sum(s["padded"][:, i : i + x.shape[1]] * s["kernel"][:, i] for i in range(k))
    s["silu"] = s["sums"] / (1 + np.exp(-s["sums"]))
    s["present_conv"] = s["padded"][:, x.shape[1] :].swapaxes(1, 2)
    return np.split(s["silu"], np.cumsum([y.shape[-1] for y in projected])[:2], -1)


def run(
    spec: AttentionSpec, parameters: Mapping[str, Array], inputs: Mapping[str, Array],
    at: Mapping[str, Change] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Return the outputs of a layer, in the type of its inputs."""
    s = _Steps(at or {})
    s["x"] = inputs["query"]
    B, L, _ = s["x"].shape
    H, Hkv, D, Dv = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    delta, dtype = "delta" in spec.update_rule, s["x"].dtype.type
    projected = [_project(parameters, f"{name}_proj", s["x"]) for name in "qkv"]
    q, k, v = _convolved(spec, parameters, inputs, s, projected)
    for name, x in (("q", q.reshape(B, L, H, D)), ("k", k.reshape(B, L, Hkv, D))):
        s[f"{name}_raw"] = _norm(spec, parameters, name, x)
        square = (s[f"{name}_raw"] ** 2).sum(-1, keepdims=True) + dtype(spec.norm_eps)
        s[name] = s[f"{name}_raw"] / np.sqrt(square) if delta else s[f"{name}_raw"]
    s["v"] = v.reshape(B, L, Hkv, Dv)
    s["dt_bias"] = parameters.get("dt_bias")
    _gates(spec, parameters, s)
    s["scale"] = spec.softmax_scale
    s["kv_head"] = np.arange(H) // (H // Hkv)
    s["delta"] = delta
    s["past"] = inputs.get("past_state", np.zeros((B, Hkv, D, Dv), dtype))
    s["outer"] = lambda k, new: k[..., :, None] * new[..., None, :]
    s["token"] = _token
    rows = []
    s["state"] = s["past"]
    for t in range(L):
        s["t"] = t
        row, s["state"] = s["token"](s, t)
        rows.append(row)
    s["attended"] = (dtype(s["scale"]) * np.stack(rows, 1)).astype(dtype)  # [B, L, H, Dv]
    s["merged"] = s["attended"].reshape(B, L, H * Dv)
    outputs = {"output": _project(parameters, "out_proj", s["merged"])}
    s["present"] = s["state"]
    states = {"present_state": s["present"], "present_conv": s.get("present_conv")}
    return outputs | {n: x for n, x in states.items() if spec.has_state and x is not None}


def _token(s: Mapping[str, Any], t: int) -> tuple[Array, Array]:
    """Return what the queries of a token read, `[B, H, Dv]`, and the state after it."""
    k, new = s["k"][:, t], s["v"][:, t]
    state = s["state"] * s["decay"][:, t][..., None]
    if s["delta"]:
        new = s["beta"][:, t][..., None] * (new - np.einsum("bhd,bhdv->bhv", k, state))
    state = state + s["outer"](k, new)
    return read(s, t, state), state


def read(s: Mapping[str, Any], t: int, state: Array) -> Array:
    return np.einsum("bhd,bhdv->bhv", s["q"][:, t], state[:, s["kv_head"]])
