"""Minimal computation and memory traffic of the layer of a spec."""

from __future__ import annotations

from collections.abc import Mapping

from attn_export.bench.measurements import Work
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import numpy_dtype


def work_of(spec: AttentionSpec, sizes: Mapping[str, int]) -> Work:
    """Return the work of one run; for a window only the tokens are known.

    Args:
        spec: The layer.
        sizes: Of its dynamic axes.
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
    by_query, by_key = E * H * D + H * Dv * E, spec.kdim * Hkv * D + spec.vdim * Hkv * Dv
    flops = 2 * B * (pairs * H * (D + Dv) + L * by_query + new_keys * by_key)
    keys = S * (spec.kdim + spec.vdim) if spec.cross else S * Hkv * (D + Dv)
    numbers = B * keys + by_query + by_key
    return Work(float(flops), float(numpy_dtype(spec.dtype).itemsize * numbers), B * L)
