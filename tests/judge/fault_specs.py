"""The specs into which faults are planted: every feature is in one of them at least."""

from __future__ import annotations

from conftest import small_spec

SPECS = {
    "gqa_causal_cache_bool_mask": small_spec(),
    "mha_weights_float_mask": small_spec(
        num_kv_heads=4, v_head_dim=6, causal=False, cache="none",
        attn_mask="float[B,H,L,S]", attn_weights=True,
    ),
    "mqa_cross_bool_mask": small_spec(
        num_kv_heads=1, cross=True, kdim=24, vdim=20, causal=False, cache="none",
        attn_mask="bool[B,1,L,S]",
    ),
    # As Qwen3, but with biases, and an eps that shows.
    "rms_norm_rotary": small_spec(qk_norm="rms", norm_eps=1e-2, rotary="half"),
    "layer_norm_rotary_no_cache": small_spec(
        qk_norm="layer", norm_eps=1e-2, rotary="interleaved", causal=False, cache="none",
        attn_mask="none", bias="q,k",
    ),
    "partial_interleaved_linear": small_spec(
        rotary="interleaved", rotary_dim=4, rotary_scaling="linear", rotary_factor=4.0,
        bias="q,v",
    ),
    # Of the four pairs one is stretched, one partly.
    "llama3": small_spec(
        rotary="half", rotary_scaling="llama3", rotary_factor=8.0, rotary_original_len=1024,
        attn_mask="none", bias="none",
    ),
    # As gpt-oss.
    "yarn_window_sinks": small_spec(
        rotary="half", rotary_scaling="yarn", rotary_factor=32.0, rotary_original_len=1024,
        sinks=True, window_left=5, attn_weights=True,
    ),
    # As Gemma 2.
    "softcap_window": small_spec(rotary="half", softcap=30.0, window_left=7, bias="none"),
    "window_of_both_sides": small_spec(
        num_kv_heads=4, causal=False, cache="none", window_left=4, window_right=2,
        attn_mask="bool[B,H,L,S]", bias="q,v,out",
    ),
    "alibi_3_heads_float_mask": small_spec(
        embed_dim=24, num_heads=3, num_kv_heads=1, causal=False, alibi=True, softcap=2.0,
        attn_mask="float[B,1,L,S]",
    ),
    "alibi_causal": small_spec(alibi=True, attn_mask="none"),
    "t5_decoder": small_spec(
        num_kv_heads=4, relative_buckets=8, relative_max_distance=20, scale=1.0, bias="none",
    ),
    "t5_encoder": small_spec(
        num_kv_heads=4, causal=False, cache="none", relative_buckets=16,
        relative_max_distance=32, scale=1.0, bias="none", attn_weights=True,
    ),
    "packed_position_ids": small_spec(packed_qkv=True, rotary="half", position_ids=True),
    "packed_added_keys_weights": small_spec(
        num_kv_heads=4, v_head_dim=6, causal=False, cache="none", packed_qkv=True, bias="q,k,v",
        add_bias_kv=True, add_zero_attn=True, attn_mask="float[B,H,L,S]", attn_weights=True,
    ),
    # Only far keys reach beyond this length.
    "dynamic": small_spec(
        rotary="half", rotary_scaling="dynamic", rotary_factor=4.0, rotary_original_len=128,
        attn_mask="none", bias="none", packed_qkv=True,
    ),
    "dynamic_position_ids": small_spec(
        rotary="interleaved", rotary_dim=6, rotary_scaling="dynamic", rotary_factor=2.0,
        rotary_original_len=24, position_ids=True, causal=False, cache="none",
    ),
    # The second pair is kept by half.
    "llama3_bounds_bias_key": small_spec(
        rotary="half", rotary_scaling="llama3", rotary_factor=8.0, rotary_original_len=1024,
        rotary_low_freq=0.125, rotary_high_freq=32.0, add_bias_kv=True, softcap=2.0,
    ),
    # The ramp goes from pair 1.01 to pair 2.51; by default it goes from 0 to 3.
    "yarn_bounds_zero_key": small_spec(
        rotary="half", rotary_scaling="yarn", rotary_factor=32.0, rotary_original_len=1024,
        rotary_beta_fast=16.0, rotary_beta_slow=0.5, rotary_truncate=False,
        rotary_magnitude=1.5, add_zero_attn=True, sinks=True, attn_mask="none", bias="none",
    ),
    "alibi_window_added_keys": small_spec(
        causal=False, cache="none", alibi=True, window_left=4, window_right=2,
        add_bias_kv=True, add_zero_attn=True, attn_mask="none",
    ),
    "in_place": small_spec(cache="in-place"),
    "in_place_rotary_window_alibi_weights": small_spec(
        cache="in-place", num_kv_heads=4, rotary="half", window_left=4, alibi=True,
        attn_mask="none", attn_weights=True, bias="q,v",
    ),
    "in_place_sinks_both_sides": small_spec(
        cache="in-place", causal=False, sinks=True, relative_buckets=8,
        relative_max_distance=20, window_left=9, window_right=1, attn_mask="float[B,1,1,S]",
        bias="none",
    ),
    "cross_norm_softcap_sinks": small_spec(
        cross=True, kdim=24, causal=False, cache="none", qk_norm="rms", norm_eps=1e-2,
        softcap=1.0, sinks=True, attn_mask="bool[B,1,1,S]",
    ),
}  # fmt: skip
