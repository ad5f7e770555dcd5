"""Rules for features of attention layers: each returns fields of the spec.

`families.toml` lists the rules of each family. Sources are the `modeling_*.py` and
`configuration_*.py` of Hugging Face's transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from attn_export.spec.rules import ROTARY_SCALINGS
from attn_export.weights.config import CROSS, ENCODER, FULL, SLIDING, Config, ConfigLayer

_PARTIAL: Final = "partial_rotary_factor"


def _rotary(
    layer: ConfigLayer,
    theta: str = "rope_theta",
    partial: str = "",
    parameters: Config | None = None,
) -> dict[str, Any]:
    """Return the fields of a rotation.

    `theta`: The key of its base; `partial`: that of the rotated share of a head, "" for all of it.
    """
    config, inner = layer.config, _parameters(layer) if parameters is None else parameters
    scaling = _scaling_type(inner)
    has_base = inner.has("rope_theta")
    base = inner.positive("rope_theta") if has_base else config.positive(theta)
    fields: dict[str, Any] = {"rotary": "half", "rotary_theta": base}
    share = 1.0
    if partial and inner.has(_PARTIAL):
        share = inner.positive(_PARTIAL)
    elif partial in config.values:
        share = config.positive(partial)
    if share < 1:
        fields["rotary_dim"] = int(layer.head_dim * share)
    if scaling in (None, "default"):
        return fields
    if scaling not in ROTARY_SCALINGS or scaling == "none":
        known = ", ".join(name for name in ROTARY_SCALINGS if name != "none")
        raise inner.unsupported("rope_type", scaling, f"known: {known}")
    return fields | {"rotary_scaling": scaling} | _scaling(config, str(scaling), inner)


def _smollm3_rotary(layer: ConfigLayer) -> dict[str, Any]:
    """Return the fields for SmolLM3: by default every fourth layer has no positions."""
    config = layer.config
    uses_rotary = config.values.get("no_rope_layers")
    if uses_rotary is None:
        every = max(config.whole("no_rope_layer_interval"), 1)
        return _rotary(layer) if (layer.number + 1) % every else {}
    if not isinstance(uses_rotary, list) or layer.number >= len(uses_rotary):
        raise config.invalid("no_rope_layers", f"a list with an entry for layer {layer.number}")
    return _rotary(layer) if uses_rotary[layer.number] else {}


def _phi3_rotary(layer: ConfigLayer) -> dict[str, Any]:
    """Return the fields for Phi-3, whose older names of scaling types mean LongRoPE."""
    inner = _parameters(layer)
    scaling = _scaling_type(inner)
    if scaling in ("su", "yarn"):
        inner = dataclasses.replace(inner, values={**inner.values, "rope_type": "longrope"})
    elif scaling not in (None, "default", "longrope"):
        raise inner.unsupported("rope_type", scaling, "Phi-3 knows longrope only")
    return _rotary(layer, partial=_PARTIAL, parameters=inner)


def _gemma3_rotary(layer: ConfigLayer) -> dict[str, Any]:
    """Return the fields for Gemma 3: layers with a window have another base and no scaling."""
    inner, values = _parameters(layer), layer.config.values
    has_both = not values.get("rope_scaling") and SLIDING in (values.get("rope_parameters") or ())
    if layer.slides and not has_both:
        none = dataclasses.replace(inner, values={})
        return _rotary(layer, "rope_local_base_freq", _PARTIAL, none)
    return _rotary(layer, partial=_PARTIAL, parameters=inner)


def _parameters(layer: ConfigLayer) -> Config:
    """Return the rotary parameters of this layer, empty if there are none."""
    key = "rope_scaling" if layer.config.values.get("rope_scaling") else "rope_parameters"
    inner = layer.config.inner(key)
    by_type = {FULL, SLIDING} & inner.values.keys()
    return inner.inner(SLIDING if layer.slides else FULL) if by_type else inner


def _scaling_type(inner: Config) -> object:
    """Return the type of scaling; "default" or None for no scaling."""
    return inner.values.get("rope_type", inner.values.get("type", "default"))


def _scaling(config: Config, scaling: str, inner: Config) -> dict[str, Any]:
    """Return the fields on the constants of a type of scaling."""
    longest, key = "max_position_embeddings", "original_max_position_embeddings"
    holder = inner
    if config.has(key):
        config.whole(key)  # raises an error for other numbers
        holder = config
    if scaling == "dynamic" or not holder.has(key):
        holder, key = config, longest
    if inner.has("factor") or scaling not in ("yarn", "longrope"):
        factor = inner.positive("factor")
    else:
        factor = config.positive(longest) / holder.positive(key)
    # Below 1 LongRoPE's factor means no factor on queries and keys, as 1 does.
    fields: dict[str, Any] = {
        "rotary_factor": max(factor, 1.0) if scaling == "longrope" else factor
    }
    if scaling != "linear":
        fields["rotary_original_len"] = int(holder.positive(key))
    for name, field in _CONSTANTS.get(scaling, {}).items():
        if inner.has(name):
            fields[field] = inner.positive(name)
    if scaling == "longrope":
        for name, field in _DIVISORS.items():
            numbers = inner.values.get(name)
            if not isinstance(numbers, list):
                raise inner.invalid(name, "a list of numbers")
            fields[field] = tuple(inner.positive(name, number) for number in numbers)
    return fields | _yarn(inner, factor) if scaling == "yarn" else fields


def _yarn(inner: Config, factor: float) -> dict[str, Any]:
    """Return the fields on truncation of the ramp, and on the factor on queries and keys."""
    fields: dict[str, Any] = {}
    if inner.has("truncate"):
        fields["rotary_truncate"] = inner.flag("truncate")
    both = inner.values.get("mscale") and inner.values.get("mscale_all_dim")
    if both and not inner.has("attention_factor"):
        of_queries = _magnitude(inner.positive("mscale"), factor)
        fields["rotary_magnitude"] = of_queries / _magnitude(
            inner.positive("mscale_all_dim"), factor
        )
    return fields


_CONSTANTS: Final[Mapping[str, Mapping[str, str]]] = {
    "llama3": {"low_freq_factor": "rotary_low_freq", "high_freq_factor": "rotary_high_freq"},
    "yarn": {
        "beta_fast": "rotary_beta_fast", "beta_slow": "rotary_beta_slow",
        "attention_factor": "rotary_magnitude",
    },
    "longrope": {"attention_factor": "rotary_magnitude"},
}  # fmt: skip
"""Optional keys of a type of scaling, each with its field of the spec."""

_DIVISORS: Final = {"short_factor": "rotary_short_factors", "long_factor": "rotary_long_factors"}
"""The keys of LongRoPE's divisors of frequencies, each with its field."""


def _latent_magnitude(layer: ConfigLayer) -> float:
    """Return DeepSeek's factor on queries and on keys, which is a part of its scale."""
    inner = _parameters(layer)
    if _scaling_type(inner) in (None, "default") or not inner.values.get("mscale_all_dim"):
        return 1.0
    return _magnitude(inner.positive("mscale_all_dim"), inner.positive("factor"))


def _magnitude(mscale: float, factor: float) -> float:
    """Return the factor on queries and keys by yarn's formula, with a weight of its logarithm."""
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


Fields = dict[str, Any]


def _by_role(layer: ConfigLayer) -> Fields:
    if layer.role == CROSS:
        return {"cross": True}
    return {} if layer.role == ENCODER else {"causal": True}


def _window(layer: ConfigLayer, *, if_used: bool = False, of_some: bool = False) -> Fields:
    """Return the window, which counts the query's own key, unless flags say that none is here."""
    config = layer.config
    if (if_used and not config.flag("use_sliding_window")) or (of_some and not layer.slides):
        return {}
    used = config.values.get("sliding_window")
    return {"window_left": config.whole("sliding_window") - 1} if used else {}


def _half_window(layer: ConfigLayer, key: str) -> Fields:
    """Return half of the window on each side, for layers that have one."""
    half = layer.config.whole(key) // 2 if layer.slides else None
    return {} if half is None else {"window_left": half, "window_right": half}


def _multi_query(layer: ConfigLayer) -> Fields:
    """Return one K/V head; StarCoder's packing of several K/V heads is not supported."""
    if not layer.config.flag("multi_query"):
        raise layer.config.unsupported("multi_query", False, "only one head of keys and values is")
    return {"num_kv_heads": 1}


def _causal_only(layer: ConfigLayer) -> Fields:
    key = "use_bidirectional_attention"
    if layer.config.flag(key):
        raise layer.config.unsupported(key, True, "give SPEC.toml and take config.json away")
    return {"causal": True}


def _gemma3_sides(layer: ConfigLayer) -> Fields:
    """Return causal; for EmbeddingGemma a window that is half as wide on each side instead."""
    if layer.config.flag("use_bidirectional_attention"):
        return _half_window(layer, "sliding_window")
    return {"causal": True, **_window(layer, of_some=True)}


def _cohere_rotary(layer: ConfigLayer) -> Fields:
    if layer.config.flag("use_qk_norm"):
        why = "Cohere's norm has weights for each head"
        raise layer.config.unsupported("use_qk_norm", True, why)
    return {**_rotary(layer), "rotary": "interleaved"}


def _gptj_rotary(layer: ConfigLayer) -> Fields:
    """Return the rotation of interleaved pairs of the first elements of each head."""
    key = "rotary_dim"
    width = {key: layer.config.whole(key)} if layer.config.has(key) else {}
    return {"rotary": "interleaved", "rotary_theta": 10000.0, **width}


def _falcon(layer: ConfigLayer) -> Fields:
    """Return Hkv from two flags, and Falcon's variant of ALiBi or rotary positions."""
    config = layer.config
    alibi = {"causal": True, "alibi": True, "alibi_falcon": True}
    fields = alibi if config.flag("alibi") else {"causal": True, **_rotary(layer)}
    if config.flag("new_decoder_architecture"):
        key = "num_kv_heads"
        return fields | {"num_kv_heads": config.whole(key) if config.has(key) else layer.heads}
    return fields | {"num_kv_heads": 1 if config.flag("multi_query") else layer.heads}


def _gpt2_scale(layer: ConfigLayer) -> Fields:
    """Return the scale: 1/sqrt(D), unless flags disable it or divide it by the layer's number."""
    config = layer.config
    divided = config.flag("scale_attn_by_inverse_layer_idx")
    if config.flag("scale_attn_weights") and not divided:
        return {}
    scale = layer.head_dim**-0.5 if config.flag("scale_attn_weights") else 1.0
    return {"scale": scale / (layer.number + 1 if divided else 1)}


def _modernbert(layer: ConfigLayer) -> Fields:
    """Return rotary positions, whose base depends on the window, and the window."""
    theta = "local_rope_theta" if layer.slides else "global_rope_theta"
    return _rotary(layer, theta) | _half_window(layer, "local_attention")


def _mpt(layer: ConfigLayer) -> Fields:
    """Return the scale of MPT's `attn_config`; `clip_qkv` is not supported."""
    inner = layer.config.inner("attn_config")
    if clip := inner.values.get("clip_qkv"):
        why = "give the model's own code by --module PATH.py:FUNCTION"
        raise layer.config.unsupported("attn_config.clip_qkv", clip, why)
    return {"scale": inner.positive("softmax_scale")} if inner.has("softmax_scale") else {}


def _latent(layer: ConfigLayer) -> Fields:
    """Return the widths of multi-head latent attention, its rotary positions and its scale."""
    config = layer.config
    rotary_dim = config.whole("qk_rope_head_dim")
    width = config.whole("qk_nope_head_dim") + rotary_dim
    fields = {"causal": True, **_rotary(layer), "rotary_dim": rotary_dim, "num_kv_heads": 1}
    if config.flag("rope_interleave"):
        fields["rotary"] = "interleaved"
    if config.has("q_lora_rank"):
        fields["q_latent_dim"] = config.whole("q_lora_rank")
    return fields | {
        "head_dim": width, "v_head_dim": config.whole("v_head_dim"),
        "kv_latent_dim": config.whole("kv_lora_rank"),
        "scale": width**-0.5 * _latent_magnitude(layer) ** 2,
    }  # fmt: skip


def _bert(layer: ConfigLayer) -> Fields:
    """Return causal for a decoder, by its flag, or cross by the prefix."""
    key = "position_embedding_type"
    embedding = layer.config.values.get(key)
    if embedding not in (None, "absolute"):
        why = "only absolute positions leave attention as it is"
        raise layer.config.unsupported(key, embedding, why)
    cross = layer.role == CROSS
    return {"cross": True} if cross else {"causal": layer.config.flag("is_decoder")}


def _t5(layer: ConfigLayer) -> Fields:
    """Return the scale, 1, and a learned bias by distance unless the layer is cross-attention."""
    fields = {**_by_role(layer), "scale": 1.0}
    return fields if layer.role == CROSS else fields | {
        "relative_buckets": layer.config.whole("relative_attention_num_buckets"),
        "relative_max_distance": layer.config.whole("relative_attention_max_distance"),
    }  # fmt: skip


SOFTCAP: Final = "attn_logit_softcapping"

RULES: Final[Mapping[str, Callable[[ConfigLayer], Fields]]] = {
    "alibi": lambda _: {"alibi": True},
    "bert": _bert,
    "by_role": _by_role,
    "causal": lambda _: {"causal": True},
    "causal_only": _causal_only,
    "cohere_rotary": _cohere_rotary,
    "falcon": _falcon,
    "gemma3_rotary": _gemma3_rotary,
    "gemma3_sides": _gemma3_sides,
    "gpt2_scale": _gpt2_scale,
    "gptj_rotary": _gptj_rotary,
    "granite_scale": lambda layer: {"scale": layer.config.positive("attention_multiplier")},
    "head_norm": lambda layer: {
        "qk_norm": "rms", "norm_eps": layer.config.positive("rms_norm_eps"),
    },
    "latent": _latent,
    "modernbert": _modernbert,
    "mpt": _mpt,
    "multi_query": _multi_query,
    "neox_rotary": lambda layer: _rotary(layer, "rotary_emb_base", "rotary_pct"),
    "phi3_rotary": _phi3_rotary,
    "query_scale": lambda layer: {"scale": layer.config.positive("query_pre_attn_scalar") ** -0.5},
    "qwen_window": lambda layer: _window(layer, if_used=True, of_some=True),
    "rotary": _rotary,
    "sinks": lambda _: {"sinks": True},
    "smollm3_rotary": _smollm3_rotary,
    "softcap": lambda layer: (
        {"softcap": layer.config.positive(SOFTCAP)} if layer.config.has(SOFTCAP) else {}
    ),
    "t5": _t5,
    "window": _window,
    "window_if_used": lambda layer: _window(layer, if_used=True),
    "window_of_some": lambda layer: _window(layer, of_some=True),
}  # fmt: skip
"""The rules, by the names in `families.toml`."""
