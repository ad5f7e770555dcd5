"""Attention that keeps earlier tokens: memories and caches of a fixed capacity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from third_party.projected import Projected, beside, heads, shifted, tokens_of
from third_party.subjects import TOKENS, D, E, H, Table
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Subject

PAST = {0: "batch", 2: "past_len"}
ROOM = {0: "batch", 2: "capacity"}
r = torch.randn


class TransformerXL(nn.Module):
    """A layer of Transformer-XL, sequence first, which keeps a memory of earlier segments."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.r, self.o = nn.Linear(E, 3 * E), nn.Linear(E, E, bias=False), nn.Linear(E, E)
        self.u, self.v = nn.Parameter(torch.randn(H, D)), nn.Parameter(torch.randn(H, D))

    def forward(self, w: Tensor, r: Tensor, mems: Tensor) -> tuple[Tensor, Tensor]:
        cat = torch.cat([mems, w], 0)
        n, b, klen = w.size(0), w.size(1), cat.size(0)
        q, k, v = self.qkv(cat).chunk(3, -1)
        q = q[-n:].view(n, b, H, D)
        k, v, p = k.view(klen, b, H, D), v.view(klen, b, H, D), self.r(r).view(-1, H, D)
        ac = torch.einsum("ibnd,jbnd->bnij", q + self.u, k)
        bd = shifted(torch.einsum("ibnd,jnd->bnij", q + self.v, p), klen)
        hidden = torch.ones(n, klen, dtype=torch.bool).triu(1 + mems.size(0))
        scores = ((ac + bd) / D**0.5).masked_fill(hidden, -torch.inf)
        found = torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1), v)
        return self.o(found.reshape(n, b, E)), cat[n:]


class Positions(nn.Module):
    """A cache of fixed capacity that is written at given positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor, key_cache: Tensor, value_cache: Tensor, cache_position: Tensor):
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        key_cache = key_cache.index_copy(2, cache_position, k)
        value_cache = value_cache.index_copy(2, cache_position, v)
        seen = torch.arange(key_cache.shape[2])[None] <= cache_position[:, None]
        found = attend(q, key_cache, value_cache, attn_mask=seen[None, None])
        return self.o(tokens_of(found)), key_cache, value_cache


def positions(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Any]:
    b, n, capacity = sizes["batch"], sizes["query_len"], sizes["capacity"]
    start = rng.integers(0, capacity - n + 1)
    caches = {
        name: rng.standard_normal((b, H, capacity, D)) for name in ("key_cache", "value_cache")
    }
    return {
        "x": rng.standard_normal((b, n, E)),
        **caches,
        "cache_position": np.arange(start, start + n),
    }


def padded_cache(m: Projected, x: Tensor, cache: tuple[Tensor, Tensor, Tensor]) -> Any:
    """Append to a past, then pad it to the capacity of a buffer."""
    past_key, past_value, buffer = cache
    q, k, v = m.project(x)
    k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    n, capacity = k.shape[2], buffer.shape[2]
    assert n <= capacity, f"{n} keys exceed the capacity {capacity}"
    room = buffer[:, :, n:]
    at = torch.arange(q.shape[2])[:, None] + past_key.shape[2]
    mask = torch.arange(capacity)[None] <= at
    k, v = torch.cat([k, room], 2), torch.cat([v, room], 2)
    return m.output(attend(q, k, v, attn_mask=mask)), k, v


def transformer_xl() -> Subject:
    inputs = {"w": r(3, 2, E), "r": r(7, E), "mems": r(4, 2, E)}
    axes = {
        "w": {0: "query_len", 1: "batch"},
        "r": {0: "key_len"},
        "mems": {0: "mem_len", 1: "batch"},
    }
    relations = {"key_len": "mem_len + query_len"}
    return Subject(TransformerXL().eval(), inputs, axes, ["output", "memory"], relations=relations)


def static_cache() -> Subject:
    axes = {
        "x": TOKENS, "key_cache": ROOM, "value_cache": ROOM, "cache_position": {0: "query_len"},
    }  # fmt: skip
    outputs = ["output", "keys", "values"]
    relations = {"capacity": ">= query_len"}
    return Subject(Positions().eval(), positions, axes, outputs, relations=relations)


MODULES: Table = {
    "Transformer-XL": transformer_xl,
    "static cache": static_cache,
    "padded cache": lambda: beside(
        padded_cache,
        (r(2, H, 4, D), r(2, H, 4, D), r(2, H, 12, D)),
        {"other.0": PAST, "other.1": PAST, "other.2": ROOM},
        "capacity = >= past_len + query_len",
        outputs=("output", "keys", "values"),
    ),
}  # fmt: skip
