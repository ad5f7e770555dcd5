"""Rotary positions as config.json states them: fields of the spec.

Keys as in `modeling_rope_utils.py` of Hugging Face's transformers: ``rope_scaling`` with a
``rope_theta`` beside it, or the newer ``rope_parameters`` that holds both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from attn_export.spec.rules import ROTARY_SCALINGS
from attn_export.weights.config import FULL, SLIDING, Config, Layer


def rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields of rotary positions on whole heads, whatever `partial_rotary_factor` is."""
    return _fields(layer, _parameters(layer), "rope_theta", "")


def cohere_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for Cohere: pairs lie side by side. Refuse its norm of heads."""
    if layer.config.flag("use_qk_norm"):
        raise layer.config.refused("use_qk_norm", True, "Cohere's norm has weights for each head")
    return {**rotary(layer), "rotary": "interleaved"}


def gptj_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for GPT-J: pairs side by side, of the first numbers of each head."""
    fields: dict[str, Any] = {"rotary": "interleaved", "rotary_theta": 10000.0}
    if layer.config.has("rotary_dim"):
        fields["rotary_dim"] = layer.config.whole("rotary_dim")
    return fields


def smollm3_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for SmolLM3: by default every fourth layer has no positions."""
    config = layer.config
    kinds = config.values.get("no_rope_layers")
    if kinds is None:
        every = max(config.whole("no_rope_layer_interval"), 1)
        return rotary(layer) if (layer.number + 1) % every else {}
    if not isinstance(kinds, list) or layer.number >= len(kinds):
        raise config.wrong("no_rope_layers", f"a list with an entry for layer {layer.number}")
    return rotary(layer) if kinds[layer.number] else {}


def modernbert_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for ModernBERT: each kind of layers has its base."""
    theta_key = "local_rope_theta" if layer.slides else "global_rope_theta"
    return _fields(layer, _parameters(layer), theta_key, "")


def neox_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields of rotary positions under GPT-NeoX's names."""
    return _fields(layer, _parameters(layer), "rotary_emb_base", "rotary_pct")


def phi3_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for Phi-3, in which older names of scaling mean LongRoPE."""
    given = _parameters(layer)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in ("su", "yarn"):
        given = {**given, "rope_type": "longrope"}
    elif kind not in (None, "default", "longrope"):
        raise layer.config.refused("rope_type", kind, "Phi-3 knows longrope only")
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
    if partial_key and config.positive(partial_key, share) < 1:
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
    if factor is None and kind in ("yarn", "longrope"):
        whole = config.positive("max_position_embeddings", longest)
        factor = whole / config.positive("original_max_position_embeddings", original)
    factor = config.positive("rope_scaling.factor", factor)
    # Below 1 LongRoPE's factor means no factor on queries and keys, as 1 does.
    fields: dict[str, Any] = {"rotary_factor": max(factor, 1.0) if kind == "longrope" else factor}
    if kind != "linear":
        length = config.positive("original_max_position_embeddings", original)
        fields["rotary_original_len"] = int(length)
    for key, field in CONSTANTS.get(kind, {}).items():
        if given.get(key) is not None:
            fields[field] = config.positive(key, given[key])
    if kind == "longrope":
        return fields | _longrope(config, given)
    return fields | (_yarn(config, given, factor) if kind == "yarn" else {})


CONSTANTS: Final[Mapping[str, Mapping[str, str]]] = {
    "llama3": {"low_freq_factor": "rotary_low_freq", "high_freq_factor": "rotary_high_freq"},
    "yarn": {"beta_fast": "rotary_beta_fast", "beta_slow": "rotary_beta_slow"},
}
"""The fields of the keys that one way of scaling may have besides."""


def _longrope(config: Config, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the divisors of the frequencies, and the factor on queries and keys."""
    fields: dict[str, Any] = {}
    for key, field in (
        ("short_factor", "rotary_short_factors"), ("long_factor", "rotary_long_factors"),
    ):  # fmt: skip
        numbers = given.get(key)
        if not isinstance(numbers, list):
            raise config.wrong(f"rope_scaling.{key}", "a list of numbers", numbers)
        fields[field] = tuple(config.positive(f"rope_scaling.{key}", number) for number in numbers)
    if given.get("attention_factor") is not None:
        fields["rotary_magnitude"] = config.positive("attention_factor", given["attention_factor"])
    return fields


def latent_magnitude(layer: Layer) -> float:
    """Return the factor on queries and on keys that DeepSeek multiplies the scale with."""
    config, given = layer.config, _parameters(layer)
    kind = given.get("rope_type", given.get("type", "default"))
    share = given.get("mscale_all_dim")
    if kind in (None, "default") or not share:
        return 1.0
    factor = config.positive("rope_scaling.factor", given.get("factor"))
    share = config.positive("mscale_all_dim", share)
    return 0.1 * share * math.log(max(factor, 1.0)) + 1.0


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
