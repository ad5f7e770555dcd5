"""Combinations of features, caches and masks, which a test builds and docs/spec.md lists."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Iterable

FEATURES: dict[str, dict[str, object]] = {
    "biases of q and v": {"bias": "q,v"},
    "rms norm": {"qk_norm": "rms"},
    "layer norm": {"qk_norm": "layer"},
    "rotary": {"rotary": "half"},
    "rotary interleaved": {"rotary": "interleaved", "rotary_dim": 4},
    "rotary linear": {"rotary": "half", "rotary_scaling": "linear", "rotary_factor": 4.0},
    "rotary llama3": {
        "rotary": "half", "rotary_scaling": "llama3", "rotary_factor": 8.0,
        "rotary_original_len": 32,
    },
    "rotary yarn": {
        "rotary": "half", "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 32,
    },
    "rotary dynamic": {
        "rotary": "half", "rotary_scaling": "dynamic", "rotary_factor": 2.0,
        "rotary_original_len": 20,
    },
    "rotary longrope": {
        "rotary": "half", "rotary_scaling": "longrope", "rotary_factor": 4.0,
        "rotary_original_len": 20, "rotary_dim": 4, "rotary_short_factors": (1.0, 2.0),
        "rotary_long_factors": (3.0, 20.0),
    },
    "position ids": {"rotary": "half", "position_ids": True},
    "packed qkv": {"packed_qkv": True},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True, "attn_weights": True},
    "window": {"window_left": 3},
    "symmetric window": {"window_left": 2, "window_right": 2},
    "softcap": {"softcap": 1.0},
    "alibi": {"alibi": True},
    "alibi of falcon": {"alibi": True, "alibi_falcon": True},
    "relative bias": {"relative_buckets": 8, "relative_max_distance": 16},
    "sinks": {"sinks": True},
}  # fmt: skip

CACHES = {"no cache": "none", "cache": "append"}
MASKS: dict[str, dict[str, object]] = {
    "no mask": {},
    "padding": {"attn_mask": "bool[B,1,1,S]"},
    "causal": {"causal": True},
}

GROUPS: tuple[tuple[str, ...], ...] = (
    ("rotary", "rms norm", "biases of q and v"),
    ("rotary interleaved", "layer norm", "window"),
    ("rotary linear", "softcap", "added keys"),
    ("rotary llama3", "position ids", "alibi"),
    ("rotary yarn", "sinks"),
    ("rotary dynamic", "packed qkv", "relative bias"),
    ("rotary longrope", "alibi of falcon", "symmetric window"),
)
"""Features that are built together: each feature in one group."""

TABLE = list(itertools.product(GROUPS, CACHES, MASKS))

IN_PLACE: dict[tuple[str, ...], tuple[str, ...]] = {
    ("rotary", "rms norm", "biases of q and v"): (),
    ("rotary interleaved", "layer norm", "window"): ("padding", "causal"),
    ("rotary linear", "softcap", "added keys"): ("padding", "causal"),
    ("rotary llama3", "alibi"): ("causal",),
    ("rotary yarn", "sinks", "alibi of falcon"): ("causal",),
    ("rotary dynamic", "packed qkv"): ("causal",),
    ("rotary longrope", "position ids", "relative bias", "symmetric window"): ("padding",),
}
"""Features that are built together with a cache that is written in place, and their masks."""

SENSELESS = [
    company for company in TABLE if "symmetric window" in company[0] and company[2] == "causal"
]


def fields_of(features: Iterable[str], *more: dict[str, object]) -> dict[str, object]:
    """Return the fields of a spec with these features."""
    return dict(ChainMap({}, *more, *(FEATURES[name] for name in features)))
