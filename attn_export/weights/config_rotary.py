"""Fields of the spec on rotary positions, read from a config.json.

The keys are those of `modeling_rope_utils.py` of Hugging Face's transformers: ``rope_scaling`` and
``rope_theta``, or the newer ``rope_parameters`` that contains both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from attn_export.spec.rules import ROTARY_SCALINGS
from attn_export.weights.config import FULL, SLIDING, Config, Layer


def rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for rotation of whole heads; `partial_rotary_factor` is ignored."""
    return _fields(layer, _parameters(layer), "rope_theta", "")


def cohere_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for Cohere: interleaved pairs; its norm of heads is not supported."""
    if layer.config.flag("use_qk_norm"):
        raise layer.config.unsupported(
            "use_qk_norm", True, "Cohere's norm has weights for each head"
        )
    return {**rotary(layer), "rotary": "interleaved"}


def gptj_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for GPT-J: interleaved pairs of the first elements of each head."""
    fields: dict[str, Any] = {"rotary": "interleaved", "rotary_theta": 10000.0}
    if layer.config.has("rotary_dim"):
        fields["rotary_dim"] = layer.config.whole("rotary_dim")
    return fields


def smollm3_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for SmolLM3: by default every fourth layer has no positions."""
    config = layer.config
    uses_rotary = config.values.get("no_rope_layers")
    if uses_rotary is None:
        every = max(config.whole("no_rope_layer_interval"), 1)
        return rotary(layer) if (layer.number + 1) % every else {}
    if not isinstance(uses_rotary, list) or layer.number >= len(uses_rotary):
        raise config.invalid("no_rope_layers", f"a list with an entry for layer {layer.number}")
    return rotary(layer) if uses_rotary[layer.number] else {}


def modernbert_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for ModernBERT: the base depends on whether the layer has a window."""
    theta_key = "local_rope_theta" if layer.slides else "global_rope_theta"
    return _fields(layer, _parameters(layer), theta_key, "")


def neox_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for GPT-NeoX, which has other names of keys."""
    return _fields(layer, _parameters(layer), "rotary_emb_base", "rotary_pct")


def phi3_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for Phi-3, whose older names of scaling types mean LongRoPE."""
    parameters = _parameters(layer)
    scaling = _scaling_type(parameters)
    if scaling in ("su", "yarn"):
        parameters = {**parameters, "rope_type": "longrope"}
    elif scaling not in (None, "default", "longrope"):
        raise layer.config.unsupported("rope_type", scaling, "Phi-3 knows longrope only")
    return _fields(layer, parameters, "rope_theta", "partial_rotary_factor")


def gemma3_rotary(layer: Layer) -> dict[str, Any]:
    """Return the fields for Gemma 3: layers with a window have another base and no scaling."""
    parameters = _parameters(layer)
    values = layer.config.values
    has_both = not values.get("rope_scaling") and SLIDING in (values.get("rope_parameters") or ())
    if layer.slides and not has_both:
        return _fields(layer, {}, "rope_local_base_freq", "partial_rotary_factor")
    return _fields(layer, parameters, "rope_theta", "partial_rotary_factor")


def _parameters(layer: Layer) -> Mapping[str, Any]:
    """Return the rotary parameters of this layer, empty if there are none."""
    config = layer.config
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    parameters = config.values.get(key) or {}
    if isinstance(parameters, dict) and {FULL, SLIDING} & parameters.keys():
        parameters = parameters.get(SLIDING if layer.slides else FULL) or {}
    if not isinstance(parameters, dict):
        raise config.invalid(key, "an object")
    return parameters


def _scaling_type(parameters: Mapping[str, Any]) -> object:
    """Return the type of scaling; "default" or None for no scaling."""
    return parameters.get("rope_type", parameters.get("type", "default"))


def _fields(
    layer: Layer, parameters: Mapping[str, Any], theta_key: str, partial_key: str
) -> dict[str, Any]:
    config = layer.config
    scaling = _scaling_type(parameters)
    theta = parameters.get("rope_theta")
    theta = (
        config.positive(theta_key) if theta is None else config.check_positive("rope_theta", theta)
    )
    share = parameters.get("partial_rotary_factor")
    if share is None:
        share = config.values.get(partial_key, 1.0)
    fields: dict[str, Any] = {"rotary": "half", "rotary_theta": theta}
    if partial_key and config.check_positive(partial_key, share) < 1:
        fields["rotary_dim"] = int(layer.head_dim * share)
    if scaling in (None, "default"):
        return fields
    if scaling not in ROTARY_SCALINGS or scaling == "none":
        known = ", ".join(name for name in ROTARY_SCALINGS if name != "none")
        raise config.unsupported("rope_type", scaling, f"known: {known}")
    return fields | {"rotary_scaling": scaling} | _scaling(config, str(scaling), parameters)


def _scaling(config: Config, scaling: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields on the constants of a type of scaling."""
    longest = config.values.get("max_position_embeddings")
    original = parameters.get("original_max_position_embeddings")
    if config.has("original_max_position_embeddings"):
        original = config.whole("original_max_position_embeddings")
    if scaling == "dynamic" or original is None:
        original = longest
    factor = parameters.get("factor")
    if factor is None and scaling in ("yarn", "longrope"):
        whole = config.check_positive("max_position_embeddings", longest)
        factor = whole / config.check_positive("original_max_position_embeddings", original)
    factor = config.check_positive("rope_scaling.factor", factor)
    # Below 1 LongRoPE's factor means no factor on queries and keys, as 1 does.
    fields: dict[str, Any] = {
        "rotary_factor": max(factor, 1.0) if scaling == "longrope" else factor
    }
    if scaling != "linear":
        length = config.check_positive("original_max_position_embeddings", original)
        fields["rotary_original_len"] = int(length)
    for key, field in CONSTANTS.get(scaling, {}).items():
        if parameters.get(key) is not None:
            fields[field] = config.check_positive(key, parameters[key])
    if scaling == "longrope":
        return fields | _longrope(config, parameters)
    return fields | (_yarn(config, parameters, factor) if scaling == "yarn" else {})


CONSTANTS: Final[Mapping[str, Mapping[str, str]]] = {
    "llama3": {"low_freq_factor": "rotary_low_freq", "high_freq_factor": "rotary_high_freq"},
    "yarn": {
        "beta_fast": "rotary_beta_fast", "beta_slow": "rotary_beta_slow",
        "attention_factor": "rotary_magnitude",
    },
    "longrope": {"attention_factor": "rotary_magnitude"},
}  # fmt: skip
"""Optional keys of a type of scaling, each with its field of the spec."""


def _longrope(config: Config, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields on the divisors of frequencies."""
    fields: dict[str, Any] = {}
    for key, field in (
        ("short_factor", "rotary_short_factors"), ("long_factor", "rotary_long_factors"),
    ):  # fmt: skip
        numbers = parameters.get(key)
        if not isinstance(numbers, list):
            raise config.invalid(f"rope_scaling.{key}", "a list of numbers", numbers)
        fields[field] = tuple(
            config.check_positive(f"rope_scaling.{key}", number) for number in numbers
        )
    return fields


def latent_magnitude(layer: Layer) -> float:
    """Return DeepSeek's factor on queries and on keys, which is a part of its scale."""
    config, parameters = layer.config, _parameters(layer)
    scaling = _scaling_type(parameters)
    share = parameters.get("mscale_all_dim")
    if scaling in (None, "default") or not share:
        return 1.0
    factor = config.check_positive("rope_scaling.factor", parameters.get("factor"))
    return _magnitude(config.check_positive("mscale_all_dim", share), factor)


def _yarn(config: Config, parameters: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the fields on truncation of the ramp, and on the factor on queries and keys."""
    fields: dict[str, Any] = {}
    truncate = parameters.get("truncate")
    if truncate is not None:
        if not isinstance(truncate, bool):
            raise config.invalid("truncate", "true or false", truncate)
        fields["rotary_truncate"] = truncate
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if parameters.get("attention_factor") is None and mscale and all_dim:
        of_queries = _magnitude(config.check_positive("mscale", mscale), factor)
        in_scale = _magnitude(config.check_positive("mscale_all_dim", all_dim), factor)
        fields["rotary_magnitude"] = of_queries / in_scale
    return fields


def _magnitude(mscale: float, factor: float) -> float:
    """Return the factor on queries and keys by yarn's formula, with a weight of its logarithm."""
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0
