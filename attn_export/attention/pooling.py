"""Mean pooling of key/value heads: MHA to GQA or MQA (Ainslie et al. 2023, sec. 2.1).

Legend: Hkv key/value heads, n of them after pooling.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from attn_export.attention.module import Attention
from attn_export.errors import UsageError, WeightsError
from attn_export.spec import AttentionSpec
from attn_export.spec.fields import SOFTMAX
from attn_export.spec.rules import divisors

_OF_KV_HEADS: Final = ("k_proj.", "v_proj.", "added_keys.")
"""Prefixes of the weights whose first axis consists of K/V heads."""


def pool_kv_heads(module: Attention | nn.MultiheadAttention, kv_heads: int) -> Attention:
    """Return an `Attention` in which neighbouring key and value heads are replaced by their mean.

    A query head uses the mean of the group of its head. Norms do not change, since all heads share
    them. Equal heads do not change bitwise; others are approximated, and the paper trains the
    result further.

    Args:
        module: A layer of ours, or PyTorch's, which is converted by `Attention.from_torch`.
        kv_heads: The number of key/value heads of the result, which divides that of the module.

    Raises:
        WeightsError: If it does not divide it.
        UsageError: If the module is no softmax attention.
    """
    if isinstance(module, nn.MultiheadAttention):
        module = Attention.from_torch(module)
    spec = module.spec
    if spec.kind != SOFTMAX:
        raise UsageError("K/V heads are pooled of softmax attention")
    pooled_spec, weights = _pooled(module.state_dict(), spec, kv_heads)
    pooled = Attention(pooled_spec)
    pooled.load_state_dict(weights)
    like = module.out_proj.weight
    return pooled.to(device=like.device, dtype=like.dtype).train(module.training)


def _pooled(
    weights: Mapping[str, Tensor], spec: AttentionSpec, kv_heads: int
) -> tuple[AttentionSpec, dict[str, Tensor]]:
    """Return the spec with n K/V heads, and its weights."""
    before = spec.num_kv_heads
    if kv_heads < 1 or before % kv_heads:
        raise WeightsError(
            f"{kv_heads} pooled K/V heads do not divide num_kv_heads {before}; choose one of "
            f"{', '.join(map(str, divisors(before)))}"
        )
    pooled = dict(weights)
    for name, tensor in weights.items():
        if name.startswith(_OF_KV_HEADS):
            pooled[name] = _mean(tensor, before, kv_heads)
        elif name.startswith("qkv_proj."):
            D = spec.head_dim
            widths = (spec.num_heads * D, before * D, before * spec.v_head_dim)
            q, k, v = tensor.split(widths)
            pooled[name] = torch.cat([q, *(_mean(x, before, kv_heads) for x in (k, v))])
    return AttentionSpec.from_dict({**spec.to_dict(), "num_kv_heads": kv_heads}), pooled


def _mean(tensor: Tensor, before: int, after: int) -> Tensor:
    """Return the mean over each group of heads: `[Hkv * D, ...]` to `[n * D, ...]`."""
    # In float64 the sum of equal values is exact. Additions one by one keep -0.0, which `sum` would
    # turn into 0.0.
    heads = tensor.double().unflatten(0, (after, before // after, -1))
    total: Tensor = functools.reduce(operator.add, heads.unbind(1))  # [n, D, ...]
    return (total / (before // after)).flatten(0, 1).to(tensor.dtype)
