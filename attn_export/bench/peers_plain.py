"""Attention as a user would write it in PyTorch, and rooflines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_export.bench.dims import Dims
from attn_export.bench.feeds import Feed, Prepared, filled


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
        grouped = self.dims.num_heads != self.dims.num_kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

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
        """Merge the heads of `[B, H, L, D]` as the query has them, and apply `out_proj`."""
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


def prepare_torch(threads: int) -> None:
    """Set the number of threads, and compute float32 products in full precision."""
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")


def tensor(feed: Feed, seed: int) -> Tensor:
    """Return a tensor of a feed's shape and dtype, in memory aligned as that of other candidates.

    Args:
        feed: The description of the array.
        seed: Seed of the values.
    """
    array = filled(feed, seed)
    if feed.dtype == "bfloat16":
        return torch.from_numpy(array.view("uint16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensors(feeds: Mapping[str, Feed]) -> dict[str, Tensor]:
    """Return the tensors of feeds by name, with the position of each as its seed."""
    return {name: tensor(feed, seed) for seed, (name, feed) in enumerate(feeds.items())}


def ready(module: nn.Module, inputs: Mapping[str, Tensor], *, compiled: bool) -> Prepared:
    """Return a module and its inputs as a candidate that is ready to run.

    Args:
        module: The module to run.
        inputs: Its inputs by name.
        compiled: Whether torch.compile is used.
    """
    call: Callable[..., object] = torch.compile(module, dynamic=False) if compiled else module

    def run() -> object:
        with torch.inference_mode():
            return call(**inputs)

    if compiled:
        run()  # the first call compiles, which must not be measured
    return Prepared(run, {"threads": torch.get_num_threads(), "precision": "highest"})


# -- rooflines in PyTorch -----------------------------------------------------------------------


def make_roofline(options: Mapping[str, Any], threads: int) -> Prepared:
    """Return a matrix product or a sum over a buffer that is ready to run.

    Args:
        options: ``gemm``, the sizes [M, K, N] of a product; or ``read``, the number of float32
            elements to sum.
        threads: Threads for computing.
    """
    prepare_torch(threads)
    if "gemm" in options:
        M, K, N = options["gemm"]
        a, b = tensor(Feed((M, K)), 0), tensor(Feed((K, N)), 1)
        out = torch.empty(M, N)
        return Prepared(lambda: torch.mm(a, b, out=out))
    numbers = tensor(Feed((options["read"],)), 0)
    return Prepared(numbers.sum)
