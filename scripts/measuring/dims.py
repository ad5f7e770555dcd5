"""Sizes of attention, and the computation and memory traffic that it needs."""

from __future__ import annotations

import dataclasses

from attn_export.parts.benchmarks.feeds import Feed
from attn_export.parts.benchmarks.measurements import Work

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
