"""MHA, MQA and GQA by name.

Named as the classes that they stand for in papers and in PyTorch: each is `Attention` with one
value fixed, so they are functions.
"""

from __future__ import annotations

from typing import Any

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
