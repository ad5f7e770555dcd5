"""Attention in plain PyTorch: one class, `Attention`, for MHA, MQA, GQA and MLA."""

from attn_export.attention.functional import scaled_dot_product_attention
from attn_export.attention.module import Attention
from attn_export.attention.variants import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
)

__all__ = [
    "Attention",
    "GroupedQueryAttention",
    "MultiHeadAttention",
    "MultiQueryAttention",
    "scaled_dot_product_attention",
]
