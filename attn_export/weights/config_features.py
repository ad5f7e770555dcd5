"""Rules for features of attention layers: each returns fields of the spec.

`families.toml` lists the rules of each family. Sources are the `modeling_*.py` and
`configuration_*.py` of Hugging Face's transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attn_export.weights.config import CROSS, ENCODER, ConfigLayer
from attn_export.weights.config_rotary import (
    gemma3_rotary,
    latent_magnitude,
    phi3_rotary,
    rotary,
    smollm3_rotary,
)

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
    return {**rotary(layer), "rotary": "interleaved"}


def _gptj_rotary(layer: ConfigLayer) -> Fields:
    """Return the rotation of interleaved pairs of the first elements of each head."""
    key = "rotary_dim"
    width = {key: layer.config.whole(key)} if layer.config.has(key) else {}
    return {"rotary": "interleaved", "rotary_theta": 10000.0, **width}


def _falcon(layer: ConfigLayer) -> Fields:
    """Return Hkv from two flags, and Falcon's variant of ALiBi or rotary positions."""
    config = layer.config
    alibi = {"causal": True, "alibi": True, "alibi_falcon": True}
    fields = alibi if config.flag("alibi") else {"causal": True, **rotary(layer)}
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
    return rotary(layer, theta) | _half_window(layer, "local_attention")


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
    fields = {"causal": True, **rotary(layer), "rotary_dim": rotary_dim, "num_kv_heads": 1}
    if config.flag("rope_interleave"):
        fields["rotary"] = "interleaved"
    if config.has("q_lora_rank"):
        fields["q_latent_dim"] = config.whole("q_lora_rank")
    return fields | {
        "head_dim": width, "v_head_dim": config.whole("v_head_dim"),
        "kv_latent_dim": config.whole("kv_lora_rank"),
        "scale": width**-0.5 * latent_magnitude(layer) ** 2,
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
    "gemma3_rotary": gemma3_rotary,
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
    "neox_rotary": lambda layer: rotary(layer, "rotary_emb_base", "rotary_pct"),
    "phi3_rotary": phi3_rotary,
    "query_scale": lambda layer: {"scale": layer.config.positive("query_pre_attn_scalar") ** -0.5},
    "qwen_window": lambda layer: _window(layer, if_used=True, of_some=True),
    "rotary": rotary,
    "sinks": lambda _: {"sinks": True},
    "smollm3_rotary": smollm3_rotary,
    "softcap": lambda layer: (
        {"softcap": layer.config.positive(SOFTCAP)} if layer.config.has(SOFTCAP) else {}
    ),
    "t5": _t5,
    "window": _window,
    "window_if_used": lambda layer: _window(layer, if_used=True),
    "window_of_some": lambda layer: _window(layer, of_some=True),
}  # fmt: skip
"""The rules, by the names in `families.toml`."""
