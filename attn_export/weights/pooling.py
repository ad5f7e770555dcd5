"""Fewer K/V heads by the mean of neighbours (Ainslie et al. 2023, sec. 2.1).

Legend: Hkv key/value heads, n of them after pooling.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from attn_export.errors import WeightsError
from attn_export.spec import AttentionSpec
from attn_export.spec.rules import divisors
from attn_export.weights.layouts import ADDED_KEYS, as_apart, as_packed

OF_KV_HEADS: Final = ("k_proj.", "v_proj.", ADDED_KEYS)
"""The weights whose rows are those of K/V heads, one head after the other."""


def pool(
    weights: Mapping[str, Tensor], spec: AttentionSpec, kv_heads: int
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """Replace every Hkv / n neighbouring key and value heads by their mean.

    Query head h goes on to use the group that its head is in. Norms of heads are shared by all
    heads, so they stay. Equal heads pool to themselves, to the bit; others give an approximation
    that the paper trains further.

    Args:
        weights: By the names of `Attention`; k_proj.weight is `[Hkv * D, kdim]`.
        spec: Their spec.
        kv_heads: n, which divides Hkv.

    Returns:
        The spec with n K/V heads, and its weights.

    Raises:
        WeightsError: If n does not divide Hkv.
    """
    before = spec.num_kv_heads
    if kv_heads < 1 or before % kv_heads:
        raise WeightsError(
            f"{kv_heads} pooled K/V heads do not divide num_kv_heads {before}; choose one of "
            f"{', '.join(map(str, divisors(before)))}"
        )
    apart = as_apart(weights, spec) if spec.packed_qkv else weights
    pooled = {
        name: _mean(tensor, before, kv_heads) if name.startswith(OF_KV_HEADS) else tensor
        for name, tensor in apart.items()
    }
    pooled_spec = AttentionSpec.from_dict({**spec.to_dict(), "num_kv_heads": kv_heads})
    return pooled_spec, as_packed(pooled) if spec.packed_qkv else pooled


def _mean(tensor: Tensor, before: int, after: int) -> Tensor:
    """Return the mean over each group of heads: rows [Hkv * D, ...] -> [n * D, ...]."""
    # In float64 the sum of equal values is exact. Adding them one to the next keeps a -0.0, which
    # `sum` would add to 0.0.
    heads = tensor.to(torch.float64).unflatten(0, (after, before // after, -1))
    total: Tensor = functools.reduce(torch.add, heads.unbind(1))  # [n, D, ...]
    return (total / (before // after)).flatten(0, 1).to(tensor.dtype)
