"""The fields of a spec, and what they mean."""

from __future__ import annotations

import dataclasses
from typing import Final

DERIVED: Final = -1
"""Stands for "derived from the other dimensions" in an integer field."""

NO_MASK: Final = "none"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFields:
    """One attention layer: dimensions, heads, mask, cache.

    Attributes:
        embed_dim: E, the width of `query` and `output`.
        num_heads: H, the number of query heads.
        num_kv_heads: Hkv, the number of key/value heads; divides H. Default H (MHA).
        head_dim: D, the width of one query/key head. Default E // H.
        v_head_dim: Dv, the width of one value head. Default D.
        cross: Whether `key` and `value` are inputs of their own.
        kdim: The width of `key`, cross-attention only. Default E.
        vdim: The width of `value`, cross-attention only. Default `kdim`.
        bias: Whether the four projections have biases.
        scale: Factor on the scores. Default 1/sqrt(D) (Vaswani et al. 2017, eq. 1).
        causal: Whether query i sees keys up to P + i only.
        attn_mask: ``"none"`` or dtype and shape, such as ``"bool[B,1,1,S]"``.
        cache: ``"none"`` or ``"append"`` (`past_*` in, `present_*` = past + new out).
        attn_weights: Whether the softmax weights `[B, H, L, S]` are an output.
        dropout: Probability on the weights, in training only.
        dtype: The type of weights, inputs and outputs.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int = DERIVED
    head_dim: int = DERIVED
    v_head_dim: int = DERIVED
    cross: bool = False
    kdim: int = DERIVED
    vdim: int = DERIVED
    bias: bool = True
    scale: float | None = None
    causal: bool = False
    attn_mask: str = NO_MASK
    cache: str = "none"
    attn_weights: bool = False
    dropout: float = 0.0
    dtype: str = "float32"
