"""Features of a family's attention beyond its dimensions, rotary positions among them.

Each returns fields of the spec. Sources are the `modeling_*.py` and `configuration_*.py` of Hugging
Face's transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from attn_export.spec.rules import ROTARY_SCALINGS
from attn_export.weights.config import FULL, SLIDING, Config, Layer, Rule
from attn_export.weights.select_layer import CROSS, ENCODER

# -- rotary positions as config.json states them ------------------------------------------------

# Keys as in `modeling_rope_utils.py` of Hugging Face's transformers: ``rope_scaling`` with a
# ``rope_theta`` beside it, or the newer ``rope_parameters`` that holds both.


def rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields of rotary positions."""
    return _fields(layer, _parameters(layer), "rope_theta", "partial_rotary_factor")


def neox_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields of rotary positions under GPT-NeoX's names."""
    return _fields(layer, _parameters(layer), "rotary_emb_base", "rotary_pct")


def phi3_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for Phi-3; refuse scaling, which is always LongRoPE in Phi-3."""
    given = _parameters(layer)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in (None, "default"):
        raise layer.config.refused("rope_type", kind, "in Phi-3 it means LongRoPE")
    return _fields(layer, given, "rope_theta", "partial_rotary_factor")


def gemma3_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for Gemma 3: layers with a window have another base and no scaling."""
    given = _parameters(layer)
    values = layer.config.values
    of_each_kind = not values.get("rope_scaling") and SLIDING in (
        values.get("rope_parameters") or ()
    )
    if layer.slides and not of_each_kind:
        return _fields(layer, {}, "rope_local_base_freq", "partial_rotary_factor")
    return _fields(layer, given, "rope_theta", "partial_rotary_factor")


def _parameters(layer: Layer) -> Mapping[str, Any]:
    """Return the rotary parameters of this layer, empty if there are none."""
    config = layer.config
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    given = config.values.get(key) or {}
    if isinstance(given, dict) and {FULL, SLIDING} & given.keys():
        given = given.get(SLIDING if layer.slides else FULL) or {}
    if not isinstance(given, dict):
        raise config.wrong(key, "an object")
    return given


def _fields(
    layer: Layer, given: Mapping[str, Any], theta_key: str, partial_key: str
) -> dict[str, Any]:
    config = layer.config
    kind = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta")
    theta = config.number(theta_key) if theta is None else config.positive("rope_theta", theta)
    share = given.get("partial_rotary_factor")
    if share is None:
        share = config.values.get(partial_key, 1.0)
    fields: dict[str, Any] = {"rotary": "half", "rotary_theta": theta}
    if config.positive(partial_key, share) < 1:
        fields["rotary_dim"] = int(layer.head_dim * share)
    if kind in (None, "default"):
        return fields
    if kind not in ROTARY_SCALINGS or kind == "none":
        known = ", ".join(name for name in ROTARY_SCALINGS if name != "none")
        raise config.refused("rope_type", kind, f"known: {known}")
    return fields | {"rotary_scaling": kind} | _scaling(config, str(kind), given)


def _scaling(config: Config, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of one kind of scaling."""
    longest = config.values.get("max_position_embeddings")
    original = given.get("original_max_position_embeddings")
    if config.has("original_max_position_embeddings"):
        original = config.whole("original_max_position_embeddings")
    if kind == "dynamic" or original is None:
        original = longest
    factor = given.get("factor")
    if factor is None and kind == "yarn":
        whole = config.positive("max_position_embeddings", longest)
        factor = whole / config.positive("original_max_position_embeddings", original)
    fields: dict[str, Any] = {"rotary_factor": config.positive("rope_scaling.factor", factor)}
    if kind != "linear":
        length = config.positive("original_max_position_embeddings", original)
        fields["rotary_original_len"] = int(length)
    for key, field in CONSTANTS.get(kind, {}).items():
        if given.get(key) is not None:
            fields[field] = config.positive(key, given[key])
    return fields | (_yarn(config, given, fields["rotary_factor"]) if kind == "yarn" else {})


CONSTANTS: Final[Mapping[str, Mapping[str, str]]] = {
    "llama3": {"low_freq_factor": "rotary_low_freq", "high_freq_factor": "rotary_high_freq"},
    "yarn": {"beta_fast": "rotary_beta_fast", "beta_slow": "rotary_beta_slow"},
}
"""The fields of the keys that one way of scaling may have besides."""


def _yarn(config: Config, given: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return truncation of the ramp to whole pairs, and the factor on queries and keys."""

    def usual(scale: float) -> float:
        return 0.1 * scale * math.log(max(factor, 1.0)) + 1.0

    fields: dict[str, Any] = {}
    truncate = given.get("truncate")
    if truncate is not None:
        if not isinstance(truncate, bool):
            raise config.wrong("truncate", "true or false", truncate)
        fields["rotary_truncate"] = truncate
    if given.get("attention_factor") is not None:
        fields["rotary_magnitude"] = config.positive("attention_factor", given["attention_factor"])
    elif given.get("mscale") and given.get("mscale_all_dim"):
        one, all_of_it = (config.positive(key, given[key]) for key in ("mscale", "mscale_all_dim"))
        fields["rotary_magnitude"] = usual(one) / usual(all_of_it)
    return fields


# -- features of a family's attention beyond its dimensions: one function for each feature ------


def causal(_: Layer) -> dict[str, Any]:
    """Set causal for a decoder: no key after the query's own."""
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


def window_of_some(layer: Layer) -> dict[str, Any]:
    """Set the window of the layers that have one."""
    return window(layer) if layer.slides else {}


def qwen_window(layer: Layer) -> dict[str, Any]:
    """Set the window of those layers, if windows are enabled."""
    return window_of_some(layer) if layer.config.flag("use_sliding_window") else {}


def query_scale(layer: Layer) -> dict[str, Any]:
    """Set the scale that Gemma states as the width it is made for."""
    return {"scale": layer.config.number("query_pre_attn_scalar") ** -0.5}


def softcap(layer: Layer) -> dict[str, Any]:
    """Set Gemma 2's cap on the scores, null for none."""
    key = "attn_logit_softcapping"
    return {"softcap": layer.config.number(key)} if layer.config.has(key) else {}


def head_norm(layer: Layer) -> dict[str, Any]:
    """Set RMSNorm of every query and key head."""
    return {"qk_norm": "rms", "norm_eps": layer.config.number("rms_norm_eps")}


def causal_only(layer: Layer) -> dict[str, Any]:
    """Set causal for a decoder; refuse bidirectional use, which is not known well enough."""
    key = "use_bidirectional_attention"
    if layer.config.flag(key):
        raise layer.config.refused(key, True, "give SPEC.toml and take config.json away")
    return {"causal": True}


def gemma3_sides(layer: Layer) -> dict[str, Any]:
    """Set causal, or for EmbeddingGemma both sides, half of its window each."""
    if not layer.config.flag("use_bidirectional_attention"):
        return {"causal": True, **window_of_some(layer)}
    if not layer.slides:
        return {}
    each = layer.config.whole("sliding_window") // 2
    return {"window_left": each, "window_right": each}


def sinks(_: Layer) -> dict[str, Any]:
    """Set gpt-oss's learned score for no key."""
    return {"sinks": True}


def falcon(layer: Layer) -> dict[str, Any]:
    """Set Hkv from two flags. Refuse Falcon's ALiBi, which is not that of the paper."""
    config = layer.config
    if config.flag("alibi"):
        raise config.refused("alibi", True, "Falcon multiplies its ALiBi by the scale as well")
    if config.flag("new_decoder_architecture"):
        key = "num_kv_heads"
        return {
            "causal": True,
            "num_kv_heads": config.whole(key) if config.has(key) else layer.heads,
        }
    return {"causal": True, "num_kv_heads": 1 if config.flag("multi_query") else layer.heads}


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


def bert(layer: Layer) -> dict[str, Any]:
    """Set both sides, or causal for a decoder by its flag."""
    key = "position_embedding_type"
    kind = layer.config.values.get(key)
    if kind not in (None, "absolute"):
        raise layer.config.refused(key, kind, "only absolute positions leave attention as it is")
    if layer.role == CROSS:
        return {"cross": True}
    return {"causal": layer.config.flag("is_decoder")}


def t5(layer: Layer) -> dict[str, Any]:
    """Set no scale, and a learned bias by distance, except between decoder and encoder."""
    fields = {**by_role(layer), "scale": 1.0}
    if layer.role == CROSS:
        return fields
    return fields | {
        "relative_buckets": layer.config.whole("relative_attention_num_buckets"),
        "relative_max_distance": layer.config.whole("relative_attention_max_distance"),
    }


RULES: Final[Mapping[str, Rule]] = {
    rule.__name__: rule
    for rule in (
        alibi, bert, by_role, causal, causal_only, falcon, gemma3_rotary, gemma3_sides, gpt2_scale,
        head_norm, neox_rotary, phi3_rotary, query_scale, qwen_window, rotary, sinks, softcap, t5,
        window, window_of_some,
    )
}  # fmt: skip
"""The features that a table of `families.toml` may name."""
