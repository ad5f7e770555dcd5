"""Specs of linear attention that together have every rule, decay, rate and ratio of heads."""

from __future__ import annotations

from attn_export.spec import AttentionSpec

_USUAL = {"kind": "linear", "embed_dim": 24, "num_heads": 4, "head_dim": 6, "cache": "state"}

LINEAR_SPECS: dict[str, AttentionSpec] = {
    name: AttentionSpec(**{**_USUAL, **fields})
    for name, fields in {
        "linear": {"update_rule": "linear", "conv_width": 3},
        "gated, gqa": {"update_rule": "gated", "num_kv_heads": 2, "qk_norm": "rms"},
        "gated by channel, mqa": {
            "update_rule": "gated", "decay": "channel", "num_kv_heads": 1, "v_head_dim": 5,
        },
        "delta": {"update_rule": "delta", "bias": "none", "scale": 1.0},
        "delta of one rate, gqa": {"update_rule": "delta", "shared_beta": True, "num_kv_heads": 2},
        "gated delta, gqa": {
            "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 4, "bias": "none", "conv_width": 4,
        },
        "gated delta by channel": {"decay": "channel", "shared_beta": True, "bias": "q,out"},
        "gated delta, mqa": {"num_kv_heads": 1, "qk_norm": "rms", "scale": 0.3},
        "gated delta, no state": {"cache": "none", "conv_width": 2},
    }.items()
}  # fmt: skip
