"""Attention the slow way: float64, one query, one head and one key at a time.

Shares no code with the package: it reads the weights and the spec's fields, and nothing that
the package derives from them but the sizes.

Legend: b of B batch, h of H query heads, g of Hkv key/value heads, i of L queries, j of S keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import product

import numpy as np
import published
import torch
from numpy.typing import NDArray

from attn_export.attention import Attention
from attn_export.spec import AttentionSpec

Array = NDArray[np.float64]
Inputs = dict[str, torch.Tensor]


def slow_attention(module: Attention, inputs: Inputs) -> dict[str, Array]:
    """Return the expected outputs by name, and the `attn_weights` in any case."""
    spec = module.spec
    query = inputs["query"].double().numpy()
    q = _project(module, "q_proj", query, spec.num_heads)
    k = _project(module, "k_proj", _or_query(inputs, "key"), spec.num_kv_heads)
    v = _project(module, "v_proj", _or_query(inputs, "value"), spec.num_kv_heads)
    q, k = _normed(module, "q_norm", q), _normed(module, "k_norm", k)
    held = _held(inputs)
    if spec.rotary != "none":
        places = held[:, None] + np.arange(q.shape[2])
        if spec.position_ids:
            places = inputs["position_ids"].numpy()
        q, k = (published.rotated(x, spec, places) for x in (q, k))
    k, v = _after_past(inputs, "past_key", k), _after_past(inputs, "past_value", v)
    all_keys = _with_added(module, k, v)
    attended, weights = _attend(module, q, *all_keys, inputs.get("attn_mask"), held)
    joined = np.concatenate([attended[:, h] for h in range(spec.num_heads)], axis=-1)
    outputs = {"output": _linear(module, "out_proj", joined), "attn_weights": weights}
    if spec.cache != "none":
        outputs |= {"present_key": k, "present_value": v}
    return outputs


def _held(inputs: Inputs) -> NDArray[np.int64]:
    """Return the number of past keys of each row of the batch: `[B]`."""
    if "past_length" in inputs:
        return inputs["past_length"].numpy()
    past = inputs["past_key"].shape[2] if "past_key" in inputs else 0
    return np.full(inputs["query"].shape[0], past)


def _after_past(inputs: Inputs, name: str, new: Array) -> Array:
    """Return old and new keys or values; for a buffer, write one new key after another."""
    if name not in inputs:
        return new
    past = inputs[name].double().numpy()
    if "past_length" not in inputs:
        return np.concatenate([past, new], axis=2)
    buffer = past.copy()
    for b, i in product(range(new.shape[0]), range(new.shape[2])):
        buffer[b, :, int(inputs["past_length"][b]) + i] = new[b, :, i]
    return buffer


def _attend(
    module: Attention, q: Array, k: Array, v: Array, mask: torch.Tensor | None,
    held: NDArray[np.int64],
) -> tuple[Array, Array]:  # fmt: skip
    spec = module.spec
    B, H, L, D = q.shape
    Hkv, Dv = k.shape[1], v.shape[3]
    more = int(spec.add_bias_kv) + int(spec.add_zero_attn)
    S = k.shape[2] - more
    scale = D**-0.5 if spec.scale is None else spec.scale
    added = _added(mask, (B, H, L, S))
    by_position = _added_by_position(module)
    attended, weights = np.zeros((B, H, L, Dv)), np.zeros((B, H, L, S + more))
    for b, h, i in product(range(B), range(H), range(L)):
        g = h // (H // Hkv)
        scores = {}
        for j in range(S if spec.cross else held[b] + L):
            offset = j - (held[b] + i)
            if added[b, h, i, j] == -math.inf or (spec.causal and offset > 0):
                continue
            if not published.window_shows(offset, spec.window_left, spec.window_right):
                continue
            score = scale * _dot(q[b, h, i], k[b, g, j])
            if spec.softcap is not None:
                score = spec.softcap * math.tanh(score / spec.softcap)
            scores[j] = score + max(added[b, h, i, j], -1e30) + by_position(h, offset)
        for j in range(S, S + more):  # keys of no token, which nothing hides
            score = scale * _dot(q[b, h, i], k[b, g, j])
            cap = spec.softcap
            scores[j] = score if cap is None else cap * math.tanh(score / cap)
        sink = float(module.state_dict()["sinks"][h]) if spec.sinks else -math.inf
        highest = max([*scores.values(), sink]) if scores else 0.0
        total = sum(math.exp(score - highest) for score in [*scores.values(), sink])
        for j, score in scores.items():
            weights[b, h, i, j] = math.exp(score - highest) / total
            attended[b, h, i] += weights[b, h, i, j] * v[b, g, j]
    return attended, weights


def _with_added(module: Attention, k: Array, v: Array) -> tuple[Array, Array]:
    """Append the learned keys and values and those of 0."""
    state = {key: tensor.double().numpy() for key, tensor in module.state_dict().items()}
    B = k.shape[0]
    if module.spec.add_bias_kv:
        one = [state[f"added_keys.{name}"][None, :, None] for name in ("bias_k", "bias_v")]
        k, v = (
            np.concatenate([x, x_1.repeat(B, 0)], 2) for x, x_1 in zip((k, v), one, strict=True)
        )
    if module.spec.add_zero_attn:
        k, v = (np.concatenate([x, np.zeros_like(x[:, :, :1])], axis=2) for x in (k, v))
    return k, v


def _added_by_position(module: Attention) -> Callable[[int, int], float]:
    """Return the bias of ALiBi and relative positions for a head and an offset of key and query."""
    spec = module.spec
    slopes = published.alibi_slopes(spec.num_heads) if spec.alibi else [0.0] * spec.num_heads
    learned = module.state_dict().get("score_bias.relative_attention_bias.weight")

    @functools.cache
    def added(h: int, offset: int) -> float:
        bias = -slopes[h] * abs(offset)
        if learned is not None:
            bucket = published.t5_bucket(
                offset, spec.relative_buckets, spec.relative_max_distance,
                both_sides=not spec.causal,
            )  # fmt: skip
            bias += float(learned[bucket, h])
        return bias

    return added


def _normed(module: Attention, name: str, x: Array) -> Array:
    """Divide every head by its root mean square, or by its standard deviation around 0."""
    if module.spec.qk_norm == "none":
        return x
    state = {key: tensor.double().numpy() for key, tensor in module.state_dict().items()}
    if module.spec.qk_norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + module.spec.norm_eps)
    return x * state[f"{name}.weight"] + state.get(f"{name}.bias", np.zeros(1))


def _added(mask: torch.Tensor | None, shape: tuple[int, ...]) -> Array:
    """Return the mask as additive scores."""
    if mask is None:
        return np.zeros(shape)
    values = mask.numpy()
    if mask.dtype == torch.bool:
        values = np.where(values, 0.0, -math.inf)
    return np.broadcast_to(values.astype(np.float64), shape)


def _dot(x: Array, y: Array) -> float:
    return math.fsum(a * b for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _or_query(inputs: Inputs, name: str) -> Array:
    return inputs[name if name in inputs else "query"].double().numpy()


def _project(module: Attention, name: str, x: Array, heads: int) -> Array:
    """Project and split heads: [B, len, width] -> [B, heads, len, width of a head]."""
    wide = _linear(module, name, x)
    width = wide.shape[-1] // heads
    return np.stack([wide[..., h * width : (h + 1) * width] for h in range(heads)], axis=1)


def _linear(module: Attention, name: str, x: Array) -> Array:
    state = {key: tensor.double().numpy() for key, tensor in module.state_dict().items()}
    if module.spec.packed_qkv and name != "out_proj":
        D, Dv = module.spec.head_dim, module.spec.v_head_dim
        q, k = module.spec.num_heads * D, module.spec.num_kv_heads * D
        v = module.spec.num_kv_heads * Dv
        rows = {"q_proj": (0, q), "k_proj": (q, q + k), "v_proj": (q + k, q + k + v)}[name]
        parts = {key.split(".")[1]: x for key, x in state.items() if key.startswith("qkv_proj.")}
        state = {f"{name}.{part}": x[slice(*rows)] for part, x in parts.items()}
    bias = state.get(f"{name}.bias", np.zeros(1))
    return np.einsum("bie,oe->bio", x, state[f"{name}.weight"]) + bias


# -- inputs ----------------------------------------------------------------------------------


def draw_inputs(
    spec: AttentionSpec, B: int, L: int, P: int = 0, key_len: int = 5, seed: int = 0
) -> Inputs:
    """Draw seeded float64 inputs of a spec; a mask forbids about a third of its possible keys.

    A buffer holds up to P + L keys, and each of its rows holds 0 to P.
    """
    random = torch.Generator().manual_seed(seed)
    sizes: dict[str, int] = {
        "batch": B, "query_len": L, "past_len": P, "total_len": P + L, "key_len": key_len,
        "capacity": P + L,
    }  # fmt: skip
    inputs = {}
    for name, axes in spec.input_shapes().items():
        shape = [axis if isinstance(axis, int) else sizes[axis] for axis in axes]
        if name == "position_ids":
            inputs[name] = torch.randint(0, 20, shape, generator=random)
            continue
        if name == "past_length":
            inputs[name] = torch.randint(0, P + 1, shape, generator=random)
            continue
        inputs[name] = torch.randn(shape, generator=random, dtype=torch.float64)
        if name == "attn_mask":
            allowed = torch.rand(shape, generator=random) > 0.35
            is_bool = spec.attn_mask.startswith("bool")
            inputs[name] = allowed if is_bool else inputs[name].masked_fill(~allowed, -torch.inf)
    return inputs


def make_module(
    spec: AttentionSpec, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Attention:
    """Return a seeded module in evaluation mode."""
    torch.manual_seed(seed)
    return Attention(spec).to(dtype).eval()


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Return the inputs with the floating ones in another type."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }


def outputs_of(module: Attention, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the module's outputs, by the names of its spec."""
    with torch.no_grad():
        returned = module(**inputs)
    names = module.spec.output_shapes()
    tensors = returned if isinstance(returned, tuple) else (returned,)
    return dict(zip(names, tensors, strict=True))
