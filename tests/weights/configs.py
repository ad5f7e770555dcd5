"""Content of config.json in these tests."""

from __future__ import annotations

SIZES = {"hidden_size": 24, "num_attention_heads": 6}
GQA = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096}
DECODER = {"embed_dim": 24, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "bias": "none",
           "causal": True, "rotary": "half"}  # fmt: skip
MHA = {"embed_dim": 24, "num_heads": 6, "bias": "all"}
LAYER_TYPES = ["full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GEMMA2 = {**GQA, "sliding_window": 16, "query_pre_attn_scalar": 64}
SIXTEENTH = {"scale": 0.125}
GEMMA3_SPEC = {**DECODER, **SIXTEENTH, "qk_norm": "rms"}
GPT_OSS = {**GQA, "attention_bias": True, "sliding_window": 16}
T5_SIZES = {"d_model": 24, "num_heads": 6, "d_kv": 5, "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20}  # fmt: skip
T5_SPEC = {"embed_dim": 24, "num_heads": 6, "head_dim": 5, "bias": "none", "scale": 1.0}
BUCKETS = {"relative_buckets": 8, "relative_max_distance": 20}
SIDES = {"d_model": 24, "encoder_attention_heads": 6, "decoder_attention_heads": 4}
