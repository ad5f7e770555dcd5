"""Sizes of attention, and the minimal computation and memory traffic that it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attn_export.bench.feeds import Feed
from attn_export.bench.measurements import Work
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import numpy_dtype

FLOAT32 = 4
"""The size of a float32 in bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dims:
    """Sizes of an attention layer in float32, or of attention without projections.

    Attributes:
        batch: B.
        query_len: L, the number of new tokens.
        key_len: S, the number of keys, the past included. If it is larger than L, there is a cache.
        num_heads: H.
        num_kv_heads: Hkv.
        head_dim: D.
        embed_dim: E of the layer; 0 for attention without projections.
        causal: Whether query i attends to keys up to P + i only.
    """

    batch: int = 1
    query_len: int
    key_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embed_dim: int = 0
    causal: bool = False

    @property
    def past_len(self) -> int:
        """P, the number of tokens in the cache before the run."""
        return self.key_len - self.query_len

    @property
    def work(self) -> Work:
        """The work of one run: the products of each query-key pair, and the projections."""
        B, L, S = self.batch, self.query_len, self.key_len
        pairs = L * self.past_len + L * (L + 1) / 2 if self.causal else L * S
        weights = self.embed_dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        flops = 4 * B * self.num_heads * self.head_dim * pairs + 2 * B * L * weights
        cache = 2 * B * self.num_kv_heads * S * self.head_dim
        return Work(flops, FLOAT32 * (cache + weights), B * L)

    @property
    def score_bytes(self) -> int:
        """The size of all scores [B, H, L, S] in bytes, for graphs that store them."""
        return FLOAT32 * self.batch * self.num_heads * self.query_len * self.key_len

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a graph's axes by name."""
        return {
            "batch": self.batch, "query_len": self.query_len, "past_len": self.past_len,
            "total_len": self.key_len, "capacity": self.key_len,
        }  # fmt: skip

    def token_inputs(self) -> dict[str, Feed]:
        """Return the inputs of new tokens: the query, and without projections key and value too."""
        B, L, D = self.batch, self.query_len, self.head_dim
        if self.embed_dim:
            return {"query": Feed((B, L, self.embed_dim))}
        heads = {"query": self.num_heads, "key": self.num_kv_heads, "value": self.num_kv_heads}
        if self.past_len:
            return {name: Feed((B, H, L, D)) for name, H in heads.items()}
        return {name: Feed((B, L, H * D)) for name, H in heads.items()}

    def cache(self, length: int) -> Feed:
        """Return the feed of a cache [B, Hkv, length, D] of keys or of values."""
        return Feed((self.batch, self.num_kv_heads, length, self.head_dim))

    def inputs(self, *, in_place: bool) -> dict[str, Feed]:
        """Return all inputs of a graph by name.

        Args:
            in_place: Whether the cache has a fixed capacity S and new tokens are written into it.
        """
        if not self.past_len:
            return self.token_inputs()
        past = self.cache(self.key_len if in_place else self.past_len)
        feeds = {**self.token_inputs(), "past_key": past, "past_value": past}
        if in_place:
            feeds["past_length"] = Feed((self.batch,), "int64", self.past_len)
        return feeds

    def outputs(self) -> dict[str, Feed]:
        """Return all outputs of a graph by name."""
        query = self.token_inputs()["query"]
        if not self.past_len:
            return {"output": query}
        present = self.cache(self.key_len)
        return {"output": query, "present_key": present, "present_value": present}


# -- minimal computation and memory traffic of the layer of a spec ------------------------------


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
