"""Minimal computation and memory traffic of the layer of a spec."""

from __future__ import annotations

from collections.abc import Mapping

from attn_export.bench.measurements import Work
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import numpy_dtype


def work_of(spec: AttentionSpec, sizes: Mapping[str, int]) -> Work:
    """Return the minimal work of one run of a layer.

    With a sliding window only the number of tokens is set; FLOPs and bytes are 0.

    Args:
        spec: The spec of the layer.
        sizes: The sizes of its dynamic axes, by name.
    """
    B, L, P = sizes["batch"], sizes["query_len"], sizes["past_len"]
    new_keys = sizes["key_len"] if spec.cross else L
    S = P + new_keys
    if spec.window_left is not None or spec.window_right is not None:
        return Work(tokens=B * L)
    H, Hkv, D, Dv, E = (
        spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.embed_dim,
    )  # fmt: skip
    pairs = L * P + L * (L + 1) / 2 if spec.causal else L * S
    if spec.kv_latent_dim:
        return _latent_work(spec, B, L, S, pairs)
    by_query, by_key = E * H * D + H * Dv * E, spec.kdim * Hkv * D + spec.vdim * Hkv * Dv
    flops = 2 * B * (pairs * H * (D + Dv) + L * by_query + new_keys * by_key)
    size = numpy_dtype(spec.dtype).itemsize
    keys = S * (spec.kdim + spec.vdim) if spec.cross else S * Hkv * sum(spec.stored_widths)
    key_size = size
    if spec.has_cache:
        key_size = numpy_dtype(spec.inputs()["past_key"].dtype).itemsize
    return Work(float(flops), float(B * keys * key_size + size * (by_query + by_key)), B * L)


def _latent_work(spec: AttentionSpec, B: int, L: int, S: int, pairs: float) -> Work:
    """Return the work of multi-head latent attention, whose heads share one key of width R + C."""
    H, R, C = spec.num_heads, spec.rotary_dim, spec.kv_latent_dim
    inside = spec.q_latent_dim or spec.embed_dim
    up = H * (spec.head_dim - R + spec.v_head_dim) * C
    weights = (
        spec.embed_dim * (spec.q_latent_dim + C + R) + inside * H * spec.head_dim + up
        + H * spec.v_head_dim * spec.embed_dim
    )  # fmt: skip
    flops = 2 * B * (pairs * H * (R + 2 * C) + L * weights)
    itemsize = numpy_dtype(spec.dtype).itemsize
    return Work(float(flops), float(itemsize * (B * S * (R + C) + weights)), B * L)
