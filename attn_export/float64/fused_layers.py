"""Norms, activations, products and rotary embedding of ONNX Runtime in float64, as documented.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. The parameters of a
function are the inputs and the attributes of an operator, by their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from attn_export.float64.attention_steps import join_heads, softmax, split_heads
from attn_export.float64.fused_attention import rotated
from attn_export.tensorfile import Array

erf = np.vectorize(math.erf, otypes=[np.float64])

# -- norms ---------------------------------------------------------------------------------------


def _normalised(
    x: Array, epsilon: float, *, axis: int = -1, centred: bool = False
) -> tuple[Array, Array]:
    """Return x over its root mean square from an axis on, and the inverse of the root."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    differences = x - x.mean(axes, keepdims=True) if centred else x
    inverse = 1 / np.sqrt((differences**2).mean(axes, keepdims=True) + epsilon)
    return differences * inverse, inverse


def rms_norm(
    x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5
) -> tuple[Array, Array]:
    """Return x over its root mean square, scaled, and the inverse of the root."""
    normalised, inverse = _normalised(x, epsilon, axis=axis)
    return normalised * scale, inverse


def skip_rms_norm(
    x: Array, skip: Array, gamma: Array, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array | None, ...]:
    """Return the RMS norm of a sum, two statistics that only training has, and the sum."""
    total = x + skip if bias is None else x + skip + bias
    return _normalised(total, epsilon)[0] * gamma, None, None, total


def skip_layer_norm(
    x: Array, skip: Array, gamma: Array, beta: Array | None = None, bias: Array | None = None,
    *, epsilon: float = 1e-12,
) -> tuple[Array | None, ...]:  # fmt: skip
    """Return the layer norm of a sum, two statistics that only training has, and the sum."""
    total = x + skip if bias is None else x + skip + bias
    scaled = _normalised(total, epsilon, centred=True)[0] * gamma
    return scaled if beta is None else scaled + beta, None, None, total


def embed_layer_norm(
    ids: Array, segments: Array | None, words: Array, positions: Array, kinds: Array | None,
    gamma: Array, beta: Array, mask: Array | None = None, position_ids: Array | None = None,
    *, epsilon: float = 1e-12,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Return the layer norm of summed embeddings, the number of tokens that are seen, and the sum.

    Positions are those of the slots, whatever the mask hides.
    """
    at = np.arange(ids.shape[1]) if position_ids is None else position_ids
    total = words[ids] + positions[at]
    if kinds is not None:
        total = total + kinds[np.zeros_like(ids) if segments is None else segments]
    seen = np.zeros(len(ids)) if mask is None else (mask != 0).sum(1)
    scaled = _normalised(total, epsilon, centred=True)[0] * gamma + beta
    return scaled, seen.astype(np.int32), total


# -- activations ---------------------------------------------------------------------------------


def gelu(x: Array, *, approximate: str = "none") -> tuple[Array]:
    """Return x times the normal distribution up to x, or its approximation by tanh."""
    if approximate == "tanh":
        return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
    return (0.5 * x * (1 + erf(x / math.sqrt(2))),)


def bias_gelu(x: Array, bias: Array) -> tuple[Array]:
    """Return the exact GELU of a sum."""
    return gelu(x + bias)


def fast_gelu(x: Array, bias: Array | None = None) -> tuple[Array]:
    """Return the approximation of GELU by tanh."""
    return gelu(x if bias is None else x + bias, approximate="tanh")


def swish(x: Array, *, alpha: float = 1.0) -> tuple[Array]:
    """Return x times the logistic function of alpha times x."""
    return (x / (1 + np.exp(-alpha * x)),)


def quick_gelu(x: Array, *, alpha: float = 1.702) -> tuple[Array]:
    """Return `swish` with the alpha that is near GELU."""
    return swish(x, alpha=alpha)


# -- products, rotary embedding and experts ------------------------------------------------------


def fused_matmul(
    a: Array, b: Array, *, alpha: float = 1.0, transA: int = 0, transB: int = 0,
    transBatchA: int = 0, transBatchB: int = 0,
) -> tuple[Array]:  # fmt: skip
    """Return alpha times a product, whose operands may be transposed before."""

    def turned(x: Array, last: int, batch: int) -> Array:
        x = np.moveaxis(x, 0, -2) if batch else x
        return np.swapaxes(x, -1, -2) if last and x.ndim > 1 else x

    return (alpha * (turned(a, transA, transBatchA) @ turned(b, transB, transBatchB)),)


def rotary_embedding(
    x: Array, position_ids: Array, cos_cache: Array, sin_cache: Array,
    *, num_heads: int = 0, rotary_embedding_dim: int = 0, interleaved: int = 0,
) -> tuple[Array]:  # fmt: skip
    """Return x `[B, L, H·D]` or `[B, H, L, D]` rotated; one position is that of the first token."""
    width = rotary_embedding_dim or 2 * cos_cache.shape[-1]
    heads = split_heads(x, num_heads or x.shape[-1] // width)
    positions = position_ids
    if positions.ndim == 1:
        positions = np.tile(position_ids + np.arange(heads.shape[2]), (len(x), 1))
    tables = (table[:, : width // 2] for table in (cos_cache, sin_cache))
    turned = rotated(heads, positions, *tables, interleaved=bool(interleaved))
    return (join_heads(turned) if x.ndim == 3 else turned,)


def mixture_of_experts(
    x: Array, router_probs: Array, weights_1: Array, bias_1: Array | None, weights_2: Array,
    bias_2: Array | None,
    *, k: int = 1, normalize_routing_weights: int = 0, activation_type: str = "relu",
    activation_alpha: float = 1.0, activation_beta: float = 0.0, swiglu_fusion: int = 0,
    swiglu_limit: float = np.inf,
) -> tuple[Array]:  # fmt: skip
    """Return the sum of the k likeliest experts' outputs, weighted by their shares.

    `router_probs`: The logits of the shares, `[tokens, experts]`. Weights are `[experts, outputs,
    inputs]`; with "swiglu", every other output of the first ones is a gate.
    """
    if activation_type not in _ACTIVATIONS and (activation_type, swiglu_fusion) != ("swiglu", 1):
        raise NotImplementedError(f"MoE with the activation {activation_type} as it is here")
    shares = softmax(router_probs, np.ones((1, 1), bool))
    dropped = np.argsort(-shares, axis=-1, kind="stable")[:, k:]
    used = shares.copy()
    np.put_along_axis(used, dropped, 0.0, axis=-1)
    if normalize_routing_weights:
        used /= used.sum(axis=-1, keepdims=True)
    tokens = x.reshape(-1, x.shape[-1])
    output = np.zeros_like(tokens)
    for e, (first, second) in enumerate(zip(weights_1, weights_2, strict=True)):
        hidden = tokens @ first.T if bias_1 is None else tokens @ first.T + bias_1[e]
        if activation_type == "swiglu":
            gates = np.minimum(hidden[:, 0::2], swiglu_limit)
            linear = np.clip(hidden[:, 1::2], -swiglu_limit, swiglu_limit)
            hidden = swish(gates, alpha=activation_alpha)[0] * (linear + activation_beta)
        else:
            hidden = _ACTIVATIONS[activation_type](hidden)
        given = hidden @ second.T if bias_2 is None else hidden @ second.T + bias_2[e]
        output += used[:, [e]] * given
    return (output.reshape(x.shape),)


_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: swish(x)[0],
}
"""The activations without a parameter. "gelu" is not among them: the documentation does not say
which one it is."""
