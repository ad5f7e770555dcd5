"""Faults of linear attention: changes of steps of `numpy_linear`, each with where it is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy_linear import Array, Change, read

from attn_export.spec import AttentionSpec

Applies = Callable[[AttentionSpec], bool]
Faults = dict[str, tuple[Applies, Mapping[str, Change]]]


def always(_: AttentionSpec) -> bool:
    return True


def gated(spec: AttentionSpec) -> bool:
    return "gated" in spec.update_rule


def delta(spec: AttentionSpec) -> bool:
    return "delta" in spec.update_rule


def both(spec: AttentionSpec) -> bool:
    return spec.update_rule == "gated_delta"


def scaled(spec: AttentionSpec) -> bool:
    return spec.softmax_scale != 1


def with_state(spec: AttentionSpec) -> bool:
    return spec.has_state


def square(spec: AttentionSpec) -> bool:
    return spec.head_dim == spec.v_head_dim


def square_state(spec: AttentionSpec) -> bool:
    return square(spec) and spec.has_state


def several_kv_heads(spec: AttentionSpec) -> bool:
    return spec.num_kv_heads > 1


def shares_some(spec: AttentionSpec) -> bool:
    return spec.q_per_kv > 1 and spec.num_kv_heads > 1


def rates_of_heads(spec: AttentionSpec) -> bool:
    return delta(spec) and not spec.shared_beta and spec.num_kv_heads > 1


def by_channel(spec: AttentionSpec) -> bool:
    return gated(spec) and spec.decay == "channel"


def convolves(spec: AttentionSpec) -> bool:
    return spec.conv_width > 0


def keeps_conv(spec: AttentionSpec) -> bool:
    return convolves(spec) and spec.has_state


def to(function: Callable[[Any], Any]) -> Change:
    return lambda value, _: function(value)


def first(axis: int) -> Change:
    """Use the first slice along an axis for all."""
    return to(lambda x: np.broadcast_to(np.take(x, [0], axis), x.shape).copy())


def roll(by: int, axis: int) -> Change:
    return to(lambda x: np.roll(x, by, axis))


def normalised(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def turned(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def token(rule: Callable[[Mapping[str, Any], int], tuple[Array, Array]]) -> dict[str, Change]:
    """Return the fault in which another function computes each token."""
    return {"token": lambda *_: rule}


def parts(s: Mapping[str, Any], t: int) -> tuple[Array, Array, Array, Array, Array]:
    """Return state, kept share, key, value and rate of a token."""
    kept, rate = s["decay"][:, t][..., None], s["beta"][:, t][..., None]
    return s["state"], kept, s["k"][:, t], s["v"][:, t], rate


def found(s: Mapping[str, Any], k: Array, state: Array) -> Array:
    return np.einsum("bhd,bhdv->bhv", k, state) if s["delta"] else np.float32(0)


def decayed_last(s: Mapping[str, Any], t: int) -> tuple[Array, Array]:
    state, kept, k, v, rate = parts(s, t)
    state = (state + s["outer"](k, rate * (v - found(s, k, state)))) * kept
    return read(s, t, state), state


def read_first(s: Mapping[str, Any], t: int) -> tuple[Array, Array]:
    state, kept, k, v, rate = parts(s, t)
    before = state * kept
    return read(s, t, before), before + s["outer"](k, rate * (v - found(s, k, before)))


def read_before_decay(s: Mapping[str, Any], t: int) -> tuple[Array, Array]:
    state, kept, k, v, rate = parts(s, t)
    before = state * kept
    return read(s, t, state), before + s["outer"](k, rate * (v - found(s, k, before)))


def found_before_decay(s: Mapping[str, Any], t: int) -> tuple[Array, Array]:
    state, kept, k, v, rate = parts(s, t)
    state = state * kept + s["outer"](k, rate * (v - found(s, k, state)))
    return read(s, t, state), state


def writing(new: Callable[[Array, Array, Array], Array]) -> dict[str, Change]:
    """Return the fault in which `new(value, found, rate)` is what a token writes."""

    def rule(s: Mapping[str, Any], t: int) -> tuple[Array, Array]:
        state, kept, k, v, rate = parts(s, t)
        state = state * kept
        state = state + s["outer"](k, new(v, found(s, k, state), rate))
        return read(s, t, state), state

    return token(rule)


def of_state(change: Callable[[Array, int, Array], Array]) -> dict[str, Change]:
    """Return the fault in which `change(state, token, past)` is read and kept."""

    def changed(state: Array, s: Mapping[str, Any]) -> Array:
        return change(state, s.get("t", -1) + 1, s["past"]).astype(state.dtype)

    return {"state": changed}


def rounded(dtype: Any) -> Callable[..., Array]:
    return lambda state, *_: state.astype(dtype).astype(np.float32)


def at_chunks(size: int, change: Callable[[Array, Array], Array]) -> dict[str, Change]:
    return of_state(lambda x, t, past: change(x, past) if t and t % size == 0 else x)


def not_moved(merged: Array, s: Mapping[str, Any]) -> Array:
    return np.swapaxes(s["attended"], 1, 2).reshape(merged.shape)


def interleaved(merged: Array, s: Mapping[str, Any]) -> Array:
    return np.swapaxes(s["attended"], 2, 3).reshape(merged.shape)


def tiled(heads: Array, s: Mapping[str, Any]) -> Array:
    return np.arange(len(heads)) % s["k"].shape[2]


def swap_first(axis: int) -> Change:
    def swapped(x: Array, _: object) -> Array:
        order = np.arange(x.shape[axis])
        order[:2] = order[1::-1]
        return np.take(x, order, axis)

    return swapped


FAULTS: Faults = {
    # scale and heads
    "scale missing": (scaled, {"scale": to(lambda _: 1.0)}),
    "scale twice": (scaled, {"scale": to(np.square)}),
    "scale of wider head": (always, {"scale": to(lambda scale: scale * 0.96)}),
    "scale of all heads": (always, {"scale": lambda x, s: x * s["q"].shape[2] ** -0.5}),
    "heads tiled": (shares_some, {"kv_head": tiled}),
    "kv head 0 for all": (several_kv_heads, {"kv_head": to(np.zeros_like)}),
    "kv heads reversed": (several_kv_heads, {"kv_head": to(lambda x: x[::-1])}),
    "heads swapped": (always, {"attended": swap_first(2)}),
    "heads not moved": (always, {"merged": not_moved}),
    "heads interleaved": (always, {"merged": interleaved}),
    "keys and values swapped": (square, {"outer": lambda f, _: lambda k, new: f(new, k)}),
    "queries reversed": (always, {"q": to(lambda x: x[:, ::-1])}),
    "queries of the token before": (always, {"q": roll(1, 1)}),
    "keys of the token before": (always, {"k": roll(1, 1)}),
    "values of the next token": (always, {"v": roll(-1, 1)}),
    "last channel dropped": (always, {"k": lambda x, _: x * (np.arange(x.shape[-1]) > 0)}),
    # the order within a token
    "read before the update": (always, token(read_first)),
    "decay after the update": (gated, token(decayed_last)),
    "read before the decay": (gated, token(read_before_decay)),
    "found before the decay": (both, token(found_before_decay)),
    # the state
    "past ignored": (with_state, {"past": to(np.zeros_like)}),
    "past of batch row 0": (with_state, {"past": first(0)}),
    "past transposed": (square_state, {"past": to(turned)}),
    "past of heads in reverse": (
        lambda spec: spec.has_state and spec.num_kv_heads > 1,
        {"past": to(lambda x: x[:, ::-1])},
    ),
    "present transposed": (square_state, {"present": to(turned)}),
    "present is the past": (with_state, {"present": lambda _, s: s["past"]}),
    "present of batch row 0": (with_state, {"present": first(0)}),
    "state in bfloat16": (always, of_state(rounded(ml_dtypes.bfloat16))),
    "state in float16": (always, of_state(lambda x, *_: x.clip(-6e4, 6e4).astype(np.float16))),
    "state clipped": (with_state, of_state(lambda x, *_: x.clip(-100, 100))),
    # chunks
    "new state at chunks of 16": (always, at_chunks(16, lambda x, _: x * 0)),
    "new state at chunks of 32": (always, at_chunks(32, lambda x, _: x * 0)),
    "new state at chunks of 64": (always, at_chunks(64, lambda x, _: x * 0)),
    "past again at chunks of 64": (with_state, at_chunks(64, lambda _, past: past)),
    "past twice at chunks of 64": (with_state, at_chunks(64, lambda x, past: x + past)),
    "no decay at chunks of 64": (
        gated,
        {"decay": lambda x, _: np.where(_starts(x, 64), np.float32(1), x)},
    ),
    "no rate at chunks of 64": (
        delta, {"beta": lambda x, _: np.where(_starts(x, 64), np.float32(0), x)},
    ),
    # decays
    "decay dropped": (gated, {"decay": to(np.ones_like)}),
    "decay not exponentiated": (gated, {"decay": lambda _, s: -s["log_decay"]}),
    "decay is 1 + g": (gated, {"decay": lambda _, s: 1 + s["log_decay"]}),
    "decay is exp(-g)": (gated, {"decay": lambda _, s: np.exp(-s["log_decay"].clip(-50))}),
    "decay of base 2": (gated, {"decay": lambda _, s: np.exp2(s["log_decay"])}),
    "decay twice": (gated, {"decay": to(np.square)}),
    "decay of the token before": (gated, {"decay": roll(1, 1)}),
    "decay of the next token": (gated, {"decay": roll(-1, 1)}),
    "decay of head 0": (
        lambda spec: gated(spec) and spec.num_kv_heads > 1, {"decay": first(2)},
    ),
    "decay of batch row 0": (gated, {"decay": first(0)}),
    "decay at least 0.01": (gated, {"decay": to(lambda x: np.maximum(x, np.float32(0.01)))}),
    "decay in bfloat16": (
        gated, {"decay": lambda x, _: x.astype(ml_dtypes.bfloat16).astype(np.float32)},
    ),
    "decay of channel 0": (by_channel, {"decay": first(3)}),
    "decay of values": (lambda s: by_channel(s) and square(s), {
        "token": lambda *_: decayed_values,
    }),
    "bias of steps dropped": (gated, {"dt_bias": to(np.zeros_like)}),
    # deltas and rates
    "rate dropped": (delta, {"beta": to(np.ones_like)}),
    "rate twice": (delta, {"beta": to(np.square)}),
    "rate not a sigmoid": (delta, {"beta": lambda x, s: np.broadcast_to(s["rate"], x.shape)}),
    "rate doubled": (delta, {"beta": to(lambda x: 2 * x)}),
    "rate of the token before": (delta, {"beta": roll(1, 1)}),
    "rate of head 0": (rates_of_heads, {"beta": first(2)}),
    "rate of batch row 0": (delta, {"beta": first(0)}),
    "rate of values alone": (delta, writing(lambda v, found, rate: rate * v - found)),
    "rate of what is found alone": (delta, writing(lambda v, found, rate: v - rate * found)),
    "delta dropped": (delta, writing(lambda v, _, rate: rate * v)),
    "delta added": (delta, writing(lambda v, found, rate: rate * (v + found))),
    "keys not normalised": (delta, {"k": lambda _, s: s["k_raw"]}),
    "queries not normalised": (delta, {"q": lambda _, s: s["q_raw"]}),
    "queries normalised": (
        lambda spec: not delta(spec), {"q": to(normalised)},
    ),
    "keys normalised": (
        lambda spec: not delta(spec), {"k": to(normalised)},
    ),
    "keys scaled, too": (scaled, {"k": lambda x, s: x * np.float32(s["q"].shape[-1] ** -0.25)}),
    # the convolution
    "kernel reversed": (convolves, {"kernel": to(lambda x: x[:, ::-1])}),
    "kernel of channel 0": (convolves, {"kernel": first(0)}),
    "activation dropped": (convolves, {"silu": lambda _, s: s["sums"]}),
    "activation twice": (convolves, {"silu": to(lambda x: x / (1 + np.exp(-x)))}),
    "convolution sees the next token": (convolves, {"sums": roll(-1, 1)}),
    "past_conv ignored": (keeps_conv, {"past_conv": to(np.zeros_like)}),
    "past_conv reversed": (keeps_conv, {"past_conv": to(lambda x: x[..., ::-1])}),
    "present_conv after the convolution": (
        keeps_conv, {"present_conv": lambda x, s: s["silu"][:, -1:].swapaxes(1, 2) + 0 * x},
    ),
    "present_conv is past_conv": (keeps_conv, {"present_conv": lambda _, s: s["past_conv"]}),
    "present_conv reversed": (keeps_conv, {"present_conv": to(lambda x: x[..., ::-1])}),
    # batch
    "batch reversed": (always, {"attended": to(lambda x: x[::-1])}),
    "keys of batch row 0": (always, {"k": first(0)}),
}  # fmt: skip


def _starts(x: Array, size: int) -> Array:
    """Return which tokens `[L, 1…]` of `[B, L, …]` start a chunk, but the first."""
    t = np.arange(x.shape[1])
    return ((t > 0) & (t % size == 0)).reshape(-1, *[1] * (x.ndim - 2))


def decayed_values(s: Mapping[str, Any], t: int) -> tuple[Array, Array]:
    state, kept, k, v, rate = parts(s, t)
    state = state * turned(kept)
    state = state + s["outer"](k, rate * (v - found(s, k, state)))
    return read(s, t, state), state


CAUSES = {
    "scale missing": "scale", "scale twice": "scale", "scale of wider head": "scale",
    "heads tiled": "tiled heads", "kv head 0 for all": "one state for all heads",
    "kv heads reversed": "states reversed", "heads not moved": "heads not moved",
    "heads interleaved": "heads interleaved", "queries of the token before": "token before",
    "keys of the token before": "token before", "values of the next token": "token before",
    "read before the update": "read before the update",
    "read before the decay": "read before the update",
    "decay after the update": "decay after the update",
    "found before the decay": "found before the decay", "past ignored": "past dropped",
    "past of batch row 0": "past of one batch row", "past transposed": "state transposed",
    "present transposed": "state transposed", "present is the past": "state not updated",
    "state in bfloat16": "state precision", "new state at chunks of 16": "chunk boundary",
    "new state at chunks of 64": "chunk boundary", "past again at chunks of 64": "chunk boundary",
    "past twice at chunks of 64": "chunk boundary", "no decay at chunks of 64": "chunk boundary",
    "no rate at chunks of 64": "chunk boundary", "decay dropped": "decay dropped",
    "decay not exponentiated": "gate in log space", "decay is 1 + g": "gate in log space",
    "decay of base 2": "gate in log space", "decay twice": "decay twice",
    "decay of the token before": "decay of another token",
    "decay of the next token": "decay of another token", "decay of head 0": "decay of one head",
    "decay of channel 0": "decay of one channel", "rate dropped": "rate dropped",
    "rate twice": "rate twice", "rate doubled": "rate",
    "rate of the token before": "rate of another token", "rate of head 0": "rate of one head",
    "rate of values alone": "rate of one term",
    "rate of what is found alone": "rate of one term", "delta dropped": "delta dropped",
    "delta added": "delta added", "keys not normalised": "not normalised",
    "queries not normalised": "not normalised", "queries normalised": "normalised",
    "keys normalised": "normalised", "kernel reversed": "kernel reversed",
    "kernel of channel 0": "kernel of one channel", "present_conv reversed": "state reversed",
    "present_conv is past_conv": "state not updated",
}  # fmt: skip
"""The kind of the known fault that `explain` names, by fault."""
