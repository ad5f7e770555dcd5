"""MHA, MQA and GQA by name, and the `Attention` of a spec with seeded weights.

Named as the classes that they stand for in papers and in PyTorch: each is `Attention` with one
value fixed, so they are functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attn_export.attention.module import Attention
from attn_export.spec import AttentionSpec


def MultiHeadAttention(embed_dim: int, num_heads: int, **options: Any) -> Attention:  # noqa: N802
    """Return an `Attention` in which every query head has its own key/value head.

    Args:
        embed_dim: E.
        num_heads: H.
        options: Further fields of `AttentionSpec`.

    Raises:
        SpecError: If the options contradict each other.
    """
    return Attention(AttentionSpec(embed_dim=embed_dim, num_heads=num_heads, **options))


def MultiQueryAttention(embed_dim: int, num_heads: int, **options: Any) -> Attention:  # noqa: N802
    """Return an `Attention` in which all query heads share one key/value head (Shazeer 2019).

    Args:
        embed_dim: E.
        num_heads: H.
        options: Further fields of `AttentionSpec`.

    Raises:
        SpecError: If the options contradict each other.
    """
    return Attention(
        AttentionSpec(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=1, **options)
    )


def GroupedQueryAttention(  # noqa: N802
    embed_dim: int, num_heads: int, num_kv_heads: int, **options: Any
) -> Attention:
    """Return an `Attention` whose blocks of query heads share a KV head (Ainslie et al. 2023).

    Args:
        embed_dim: E.
        num_heads: H.
        num_kv_heads: Hkv, a divisor of H.
        options: Further fields of `AttentionSpec`.

    Raises:
        SpecError: If the options contradict each other.
    """
    return Attention(
        AttentionSpec(
            embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, **options
        )
    )


# -- the `Attention` of a spec, with weights that depend on a seed alone ------------------------


def seeded_attention(spec: AttentionSpec, seed: int = 0) -> Attention:
    """Return the module of a spec in eval mode, with random weights.

    The global random state is left as it was.

    Args:
        spec: The spec.
        seed: The seed of the weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Attention(spec).eval()
        _make_norms_matter(module)
    return module


def _make_norms_matter(module: nn.Module) -> None:
    """Give normalisations weights that show: those of 1 and 0 hide that they were left out."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, (nn.RMSNorm, nn.LayerNorm)):
                part.weight.normal_(1.0, 0.3)
                if isinstance(part, nn.LayerNorm):
                    part.bias.normal_(0.0, 0.3)
