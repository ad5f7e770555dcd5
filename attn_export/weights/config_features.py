"""Rules for features of attention layers: each returns fields of the spec.

`families.toml` lists the rules of each family. Sources are the `modeling_*.py` and
`configuration_*.py` of Hugging Face's transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attn_export.weights.config import Layer
from attn_export.weights.config_rotary import (
    cohere_rotary,
    gemma3_rotary,
    gptj_rotary,
    latent_magnitude,
    modernbert_rotary,
    neox_rotary,
    phi3_rotary,
    rotary,
    smollm3_rotary,
)
from attn_export.weights.select_layer import CROSS, ENCODER


def causal(_: Layer) -> dict[str, Any]:
    """Set causal for a decoder: keys after the query's own are hidden."""
    return {"causal": True}


def by_role(layer: Layer) -> dict[str, Any]:
    """Set the fields of an encoder or a decoder, as the prefix indicates."""
    if layer.role == CROSS:
        return {"cross": True}
    return {} if layer.role == ENCODER else {"causal": True}


def window(layer: Layer) -> dict[str, Any]:
    """Set the window; `sliding_window` counts the query's own key too."""
    if not layer.config.values.get("sliding_window"):
        return {}
    return {"window_left": layer.config.whole("sliding_window") - 1}


def window_if_used(layer: Layer) -> dict[str, Any]:
    """Set the window of all layers, if windows are enabled."""
    return window(layer) if layer.config.flag("use_sliding_window") else {}


def window_of_some(layer: Layer) -> dict[str, Any]:
    """Set the window of the layers that have one."""
    return window(layer) if layer.slides else {}


def qwen_window(layer: Layer) -> dict[str, Any]:
    """Set the window of the layers that have one, if windows are enabled."""
    return window_of_some(layer) if layer.config.flag("use_sliding_window") else {}


def query_scale(layer: Layer) -> dict[str, Any]:
    """Set Gemma's scale: 1 / sqrt(`query_pre_attn_scalar`)."""
    return {"scale": layer.config.positive("query_pre_attn_scalar") ** -0.5}


def granite_scale(layer: Layer) -> dict[str, Any]:
    """Set Granite's scale, `attention_multiplier`."""
    return {"scale": layer.config.positive("attention_multiplier")}


def multi_query(layer: Layer) -> dict[str, Any]:
    """Set one K/V head; StarCoder's packing of several K/V heads is not supported."""
    if not layer.config.flag("multi_query"):
        raise layer.config.unsupported("multi_query", False, "only one head of keys and values is")
    return {"num_kv_heads": 1}


def softcap(layer: Layer) -> dict[str, Any]:
    """Set Gemma 2's cap on the scores, null for none."""
    key = "attn_logit_softcapping"
    return {"softcap": layer.config.positive(key)} if layer.config.has(key) else {}


def head_norm(layer: Layer) -> dict[str, Any]:
    """Set RMSNorm of every query and key head."""
    return {"qk_norm": "rms", "norm_eps": layer.config.positive("rms_norm_eps")}


def causal_only(layer: Layer) -> dict[str, Any]:
    """Set causal for a decoder; bidirectional attention is not supported."""
    key = "use_bidirectional_attention"
    if layer.config.flag(key):
        raise layer.config.unsupported(key, True, "give SPEC.toml and take config.json away")
    return {"causal": True}


def gemma3_sides(layer: Layer) -> dict[str, Any]:
    """Set causal; for EmbeddingGemma a window that is half as wide on each side instead."""
    if not layer.config.flag("use_bidirectional_attention"):
        return {"causal": True, **window_of_some(layer)}
    if not layer.slides:
        return {}
    half = layer.config.whole("sliding_window") // 2
    return {"window_left": half, "window_right": half}


def sinks(_: Layer) -> dict[str, Any]:
    """Set gpt-oss's sinks: learned scores that have no key."""
    return {"sinks": True}


def falcon(layer: Layer) -> dict[str, Any]:
    """Set Hkv from two flags, and Falcon's variant of ALiBi or rotary positions."""
    config = layer.config
    alibi = {"causal": True, "alibi": True, "alibi_falcon": True}
    fields = alibi if config.flag("alibi") else {"causal": True, **rotary(layer)}
    if config.flag("new_decoder_architecture"):
        key = "num_kv_heads"
        return fields | {"num_kv_heads": config.whole(key) if config.has(key) else layer.heads}
    return fields | {"num_kv_heads": 1 if config.flag("multi_query") else layer.heads}


def gpt2_scale(layer: Layer) -> dict[str, Any]:
    """Set the scale: 1/sqrt(D), unless flags disable it or divide it by the layer's number."""
    config = layer.config
    divided = config.flag("scale_attn_by_inverse_layer_idx")
    if config.flag("scale_attn_weights") and not divided:
        return {}
    scale = layer.head_dim**-0.5 if config.flag("scale_attn_weights") else 1.0
    return {"scale": scale / (layer.number + 1 if divided else 1)}


def alibi(_: Layer) -> dict[str, Any]:
    """Set ALiBi with the slopes of the paper."""
    return {"alibi": True}


def modernbert(layer: Layer) -> dict[str, Any]:
    """Set rotary positions and, for layers with a window, half of it on each side."""
    fields = modernbert_rotary(layer)
    if not layer.slides:
        return fields
    half = layer.config.whole("local_attention") // 2
    return fields | {"window_left": half, "window_right": half}


def mpt(layer: Layer) -> dict[str, Any]:
    """Set the scale of MPT's `attn_config`; `clip_qkv` is not supported."""
    inner = layer.config.values.get("attn_config") or {}
    if not isinstance(inner, dict):
        raise layer.config.invalid("attn_config", "an object", inner)
    if inner.get("clip_qkv"):
        raise layer.config.unsupported("attn_config.clip_qkv", inner["clip_qkv"], USE_MODULE)
    scale = inner.get("softmax_scale")
    if scale is None:
        return {}
    return {"scale": layer.config.check_positive("attn_config.softmax_scale", scale)}


def latent(layer: Layer) -> dict[str, Any]:
    """Set the widths of multi-head latent attention, its rotary positions and its scale."""
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


USE_MODULE: Final = "give the model's own code by --module PATH.py:FUNCTION"
"""Advice for features that a spec cannot express."""


def bert(layer: Layer) -> dict[str, Any]:
    """Set causal for a decoder, by its flag, or cross by the prefix."""
    key = "position_embedding_type"
    embedding = layer.config.values.get(key)
    if embedding not in (None, "absolute"):
        why = "only absolute positions leave attention as it is"
        raise layer.config.unsupported(key, embedding, why)
    if layer.role == CROSS:
        return {"cross": True}
    return {"causal": layer.config.flag("is_decoder")}


def t5(layer: Layer) -> dict[str, Any]:
    """Set the scale to 1, and a learned bias by distance unless the layer is cross-attention."""
    fields = {**by_role(layer), "scale": 1.0}
    if layer.role == CROSS:
        return fields
    return fields | {
        "relative_buckets": layer.config.whole("relative_attention_num_buckets"),
        "relative_max_distance": layer.config.whole("relative_attention_max_distance"),
    }


RULES: Final[Mapping[str, Callable[[Layer], dict[str, Any]]]] = {
    rule.__name__: rule
    for rule in (
        alibi, bert, by_role, causal, causal_only, cohere_rotary, falcon, gemma3_rotary,
        gemma3_sides, gpt2_scale, gptj_rotary, granite_scale, head_norm, latent, modernbert, mpt,
        multi_query, neox_rotary, phi3_rotary, query_scale, qwen_window, rotary,
        sinks, smollm3_rotary, softcap, t5, window, window_if_used, window_of_some,
    )
}  # fmt: skip
"""The rules, by the names in `families.toml`."""
