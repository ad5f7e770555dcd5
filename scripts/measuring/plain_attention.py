"""Attention in plain PyTorch, as a user would write it, and its export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.parts.benchmarks.feeds import Prepared
from attn_export.parts.benchmarks.torch_layers import (
    prepare_torch,
    ready,
    save_bare,
    tensor,
    tensors,
)
from measuring.dims import Dims


class PlainAttention(nn.Module):
    """Attention by SDPA with optional projections and a cache that grows by concatenation.

    Args:
        dims: The number of heads and the widths. Batch size and lengths may differ at each call.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        E, q, kv = dims.embed_dim, dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        widths = {"q_proj": (E, q), "k_proj": (E, kv), "v_proj": (E, kv), "out_proj": (q, E)}
        for name, (in_features, out_features) in widths.items():
            linear = nn.Linear(in_features, out_features, bias=False) if E else nn.Identity()
            self.add_module(name, linear)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute attention.

        Args:
            query: `[B, L, E]`; without projections `[B, L, H·D]` or `[B, H, L, D]`.
            key: `[B, L, E]`; without projections `[B, L, Hkv·D]` or `[B, Hkv, L, D]`;
                None: the query.
            value: As `key`.
            past_key: Cached keys, `[B, Hkv, P, D]`, or None.
            past_value: Cached values, `[B, Hkv, P, D]`, or None.

        Returns:
            The output, `[B, L, E]`; without projections `[B, L, H·D]`, or `[B, H, L, D]` if there
            is a past. With a past, also its keys and values with the new ones,
            `[B, Hkv, P + L, D]`.
        """
        q, k, v = self._heads(query, key, value)
        present: tuple[Tensor, ...] = ()
        if past_key is not None and past_value is not None:
            k, v = torch.cat([past_key, k], dim=2), torch.cat([past_value, v], dim=2)
            present = (k, v)
        # One new token attends to all keys, which needs no mask.
        causal = self.dims.causal and past_key is None
        output = self._join_heads(self._attend(q, k, v, causal))
        return (output, *present) if present else output

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        shared = self.dims.num_heads != self.dims.num_kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)

    def _heads(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the inputs and return queries, keys and values as `[B, heads, L, D]`."""
        projected = (self.q_proj(query),
                     self.k_proj(query if key is None else key),
                     self.v_proj(query if value is None else value))  # fmt: skip
        if query.dim() == 4:
            return projected
        q, k, v = (x.unflatten(-1, (-1, self.dims.head_dim)).transpose(1, 2) for x in projected)
        return q, k, v

    def _join_heads(self, attended: Tensor) -> Tensor:
        """Return the result `[B, H, L, D]` in the layout of the query, after its projection."""
        if not self.dims.embed_dim and self.dims.past_len:
            return attended
        output: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return output


class StaticAttention(PlainAttention):
    """`PlainAttention` with a cache of fixed capacity, which is written in place."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.keys, self.values = (tensor(dims.cache(dims.key_len), seed) for seed in (1, 2))
        self.positions = torch.arange(dims.past_len, dims.key_len)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        past_key: Tensor | None = None,  # noqa: ARG002 (the past is in the cache already)
        past_value: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Write the new keys and values into the cache and attend to the tokens in it.

        Args:
            query: `[B, L, E]`; without projections `[B, L, H·D]` or `[B, H, L, D]`.
            key: `[B, L, E]`; without projections `[B, L, Hkv·D]` or `[B, Hkv, L, D]`;
                None: the query.
            value: As `key`.
            past_key: Ignored; the module holds the cache.
            past_value: Ignored.

        Returns:
            The output, as that of `PlainAttention` without a past.
        """
        q, k, v = self._heads(query, key, value)
        filled_len = self.dims.key_len
        self.keys.index_copy_(2, self.positions, k)
        self.values.index_copy_(2, self.positions, v)
        k, v = self.keys[:, :, :filled_len], self.values[:, :, :filled_len]
        return self._join_heads(self._attend(q, k, v, causal=False))


def make_plain(options: Mapping[str, Any], threads: int) -> Prepared:
    """Return a `PlainAttention` or `StaticAttention` that is ready to run.

    Args:
        options: ``dims``, fields of `Dims`; ``static``, whether to use `StaticAttention`;
            ``compile``, whether to use torch.compile, which needs a C++ compiler and Python's
            headers.
        threads: Threads for computing.
    """
    prepare_torch(threads)
    dims = Dims(**options["dims"])
    module = (StaticAttention if options["static"] else PlainAttention)(dims).eval()
    feeds = dims.token_inputs() if options["static"] else dims.inputs(in_place=False)
    return ready(module, tensors(feeds), compiled=options["compile"])


def bare_plain(dims: Mapping[str, Any], file: str) -> None:
    """Export `PlainAttention` by `torch.onnx.export` alone.

    Args:
        dims: The fields of `Dims`.
        file: The file to write.
    """
    sizes = Dims(**dims)
    example = dataclasses.replace(sizes, batch=2, query_len=5, key_len=5)
    if sizes.past_len:
        # For decoding, users would export plain code with an example of one new token.
        example = dataclasses.replace(sizes, batch=2, query_len=1, key_len=8)
    inputs = tensors(example.inputs(in_place=False))
    axes: dict[str, dict[int, str]] = {}
    for name in inputs:
        if name.startswith("past_"):
            axes[name] = {0: "batch", 2: "past_len"}
        elif sizes.past_len:  # a decoding step always has one new token
            axes[name] = {0: "batch"}
        else:
            axes[name] = {0: "batch", 1: "query_len"}
    names = list(sizes.outputs())
    save_bare(PlainAttention(sizes).eval(), inputs, axes, names, Path(file))
