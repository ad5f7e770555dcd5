"""Fields of a spec, and their meaning."""

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
        packed_qkv: Whether one projection `qkv_proj` makes queries, keys and values.
        bias: Which projections have biases: ``"all"``, ``"none"`` or some of q, k, v, out, as in
            ``"q,v,out"``. True, False and lists are taken too.
        scale: Factor on the scores. Default 1/sqrt(D) (Vaswani et al. 2017, eq. 1).
        causal: Whether query i sees keys up to P + i only.
        attn_mask: ``"none"`` or dtype and shape, such as ``"bool[B,1,1,S]"``.
        cache: ``"none"``, ``"append"`` (`past_*` in, `present_*` = past + new out) or
            ``"in-place"``: `past_*` are buffers of a fixed capacity, `past_length` `[B]` says how
            many keys each row holds, and `present_*` are the buffers with the new keys written
            after those. Keys beyond are never seen, but must be finite.
        attn_weights: Whether the softmax weights `[B, H, L, S]` are an output.
        qk_norm: Normalisation of every query and key head: ``"none"``, ``"rms"`` (Qwen3, Gemma 3)
            or ``"layer"``, with learned weights.
        norm_eps: The addition to the variance.
        rotary: Rotary positions (Su et al. 2021): ``"none"``, ``"half"`` (pairs are i and i + R/2,
            as in Llama) or ``"interleaved"`` (pairs are 2i and 2i + 1, as in GPT-J).
        rotary_dim: R, the number of leading elements of D that are rotated. Default D.
        rotary_theta: The base of the wavelengths.
        rotary_scaling: ``"none"``, ``"linear"``, ``"dynamic"`` (NTK, by the longest row of a
            batch), ``"llama3"`` or ``"yarn"``.
        rotary_factor: The factor by which the context is stretched.
        rotary_original_len: The context that the model was trained with.
        rotary_low_freq: llama3: pairs that turn less often than this in it are stretched.
        rotary_high_freq: llama3: pairs that turn more often than this in it are left alone.
        rotary_beta_fast: yarn: the same as `rotary_high_freq`, as a bound of its ramp.
        rotary_beta_slow: yarn: the same as `rotary_low_freq`.
        rotary_truncate: yarn: whether the ramp begins and ends at whole pairs (gpt-oss: not).
        rotary_magnitude: yarn: factor on rotated queries and keys. Default 0.1 ln(factor) + 1.
        position_ids: Whether the positions of the queries are an input `[B, L]`, as for left
            padding; else they follow the past.
        window_left: The number of visible keys before its own (Mistral's sliding_window - 1).
        window_right: The number of visible keys after its own.
        softcap: Scores become softcap·tanh(score / softcap) before the mask (Gemma 2).
        alibi: Scores lose slope·distance, one slope for each head (Press et al. 2022).
        relative_buckets: Buckets of T5's learned relative bias; 0 for none.
        relative_max_distance: Distances from here on share the last bucket.
        add_bias_kv: A learned key and value after all others, visible to every query, as in
            `torch.nn.MultiheadAttention`.
        add_zero_attn: A key and value of 0 after all others, visible to every query, likewise.
        sinks: A learned score for each head that takes part in the softmax and stands for no key
            (gpt-oss).
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
    packed_qkv: bool = False
    bias: str = "all"
    scale: float | None = None
    causal: bool = False
    attn_mask: str = NO_MASK
    cache: str = "none"
    attn_weights: bool = False
    qk_norm: str = "none"
    norm_eps: float = 1e-6
    rotary: str = "none"
    rotary_dim: int = DERIVED
    rotary_theta: float = 10000.0
    rotary_scaling: str = "none"
    rotary_factor: float = 1.0
    rotary_original_len: int = 8192
    rotary_low_freq: float = 1.0
    rotary_high_freq: float = 4.0
    rotary_beta_fast: float = 32.0
    rotary_beta_slow: float = 1.0
    rotary_truncate: bool = True
    rotary_magnitude: float | None = None
    position_ids: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float | None = None
    alibi: bool = False
    relative_buckets: int = 0
    relative_max_distance: int = 128
    add_bias_kv: bool = False
    add_zero_attn: bool = False
    sinks: bool = False
    dropout: float = 0.0
    dtype: str = "float32"
