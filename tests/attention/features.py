"""One spec for every feature that a model has beyond heads, masks and a cache."""

from __future__ import annotations

from tried_fields import alone

KV_HEADS = {"mha": 4, "mqa": 1, "gqa": 2}

_YARN = {"rotary_scaling": "yarn", "rotary_factor": 8.0, "rotary_original_len": 64}
FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "biases of q and v": {"bias": "q,v"},
    "no bias of out": {"bias": "q,k,v"},
    "rms norm": {"qk_norm": "rms"},
    "layer norm": {"qk_norm": "layer", "norm_eps": 1e-2},
    "rotary": {"rotary": "half"},
    "rotary interleaved": {"rotary": "interleaved", "rotary_theta": 100.0},
    "rotary of a part": {"rotary": "half", "rotary_dim": 6},
    "rotary interleaved of a part": {
        "rotary": "interleaved", "rotary_dim": 4, "rotary_theta": 100.0,
    },
    "rotary linear": {"rotary": "half", "rotary_scaling": "linear", "rotary_factor": 2.5},
    "rotary llama3": {
        "rotary": "half", "rotary_scaling": "llama3", "rotary_factor": 8.0,
        "rotary_original_len": 64,
    },
    "rotary llama3 of its own": {
        "rotary": "half", "rotary_scaling": "llama3", "rotary_factor": 8.0,
        "rotary_original_len": 64, "rotary_low_freq": 2.0, "rotary_high_freq": 3.0,
    },
    "rotary yarn": {"rotary": "half", **_YARN},
    "rotary yarn of gpt-oss": {
        "rotary": "half", **_YARN, "rotary_truncate": False, "rotary_beta_fast": 8.0,
        "rotary_beta_slow": 0.5, "rotary_magnitude": 1.5,
    },
    "rotary longrope": {
        "rotary": "half", "rotary_scaling": "longrope", "rotary_factor": 4.0,
        "rotary_original_len": 64, "rotary_short_factors": (1.0, 1.5, 2.0, 4.0),
        "rotary_long_factors": (1.0, 4.0, 16.0, 30.0),
    },
    "position ids": {"rotary": "interleaved", "position_ids": True},
    "packed qkv": {"packed_qkv": True},
    "packed qkv without biases": {"packed_qkv": True, "bias": "out"},
    "learned key": {"add_bias_kv": True},
    "key of 0": {"add_zero_attn": True},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True},
    "window": {"window_left": 2},
    "window of one key": {"window_left": 0, "window_right": 0, "causal": False},
    "window to the right of 0": {"window_left": 3, "window_right": 0, "causal": False},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi": True},
    "alibi of falcon": {"alibi": True, "alibi_falcon": True},
    "relative bias": {"relative_buckets": 4, "relative_max_distance": 6},
    "sinks": {"sinks": True},
    "Gemma 2": {"softcap": 0.8, "window_left": 3, "rotary": "half", "bias": "none"},
    "Qwen 3": {"qk_norm": "rms", "rotary": "half", "bias": "none"},
    "gpt-oss": {"sinks": True, "window_left": 3, "rotary": "half", **_YARN},
    "everything": {
        "bias": "q,v", "qk_norm": "rms", "rotary": "interleaved", "rotary_dim": 4, **_YARN,
        "window_left": 4, "softcap": 0.8, "alibi": True, "relative_buckets": 4,
        "relative_max_distance": 6, "sinks": True, "add_bias_kv": True, "position_ids": True,
    },
}  # fmt: skip
"""Features with which a query sees no key after its own, so that a sequence can be fed in pieces:
causal, or with a window that ends at the query."""

SEEING_AHEAD = {
    "window ahead": {"window_right": 1, "causal": False},
    "symmetric window": {"window_left": 2, "window_right": 2, "causal": False},
    "relative bias on both sides": {
        "relative_buckets": 8, "relative_max_distance": 9, "causal": False,
    },
    "alibi on both sides": {"alibi": True, "causal": False},
    "rotary on both sides": {"rotary": "half", "causal": False},
    "sinks on both sides": {"sinks": True, "causal": False, "softcap": 2.0},
}  # fmt: skip

_DYNAMIC = {
    "rotary": "half", "rotary_scaling": "dynamic", "rotary_factor": 3.0, "rotary_original_len": 6,
}  # fmt: skip
GROWING = {
    "rotary dynamic": _DYNAMIC,
    "rotary dynamic within its context": {**_DYNAMIC, "rotary_original_len": 64},
    "rotary dynamic with position ids": {**_DYNAMIC, "position_ids": True},
}
"""Features whose keys depend on the length at which they were made."""


_NORMS = {"q_norm.weight": (8,), "k_norm.weight": (8,)}
PARAMETERS = {
    "plain": {},
    "rms norm": _NORMS,
    "layer norm": _NORMS | {"q_norm.bias": (8,), "k_norm.bias": (8,)},
    "rotary llama3": {},
    "alibi": {},
    "relative bias": {"score_bias.relative_attention_bias.weight": (4, 4)},
    "sinks": {"sinks": (4,)},
}
"""The parameters beside projections that a feature has, with their shapes."""

CACHES = {"no cache": "none", "cache": "append", "cache in place": "in-place"}
COMPANY = {
    "no mask": {}, "padding": {"attn_mask": "bool[B,1,1,S]"}, "causal": {"causal": True},
}  # fmt: skip
ROWS = {
    name: fields
    for name, fields in alone().items()
    if not any(
        fields.items() <= row.items() or name in row
        for row in (*FEATURES.values(), *SEEING_AHEAD.values(), *GROWING.values())
    )
}
"""Fields, and their values, that no feature above has: tried as their rows say."""
FEATURES |= ROWS

IN_ANY_PLACE = FEATURES | SEEING_AHEAD
EVERY = IN_ANY_PLACE | GROWING

_GROUPS = (
    ("rotary", "rms norm", "biases of q and v"),
    ("rotary interleaved of a part", "layer norm", "window"),
    ("rotary linear", "softcap", "added keys"),
    ("rotary llama3 of its own", "position ids", "alibi"),
    ("rotary yarn of gpt-oss", "sinks"),
    ("rotary dynamic", "packed qkv", "relative bias"),
    ("rotary longrope", "alibi of falcon", "symmetric window"),
)
GROUPS = tuple(
    (*group, *list(ROWS)[number :: len(_GROUPS)]) for number, group in enumerate(_GROUPS)
)
"""Features that are built together, with each cache and each of `COMPANY`."""
