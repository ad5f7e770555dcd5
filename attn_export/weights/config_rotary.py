"""Fields of the spec on rotary positions, read from a config.json.

The keys are those of `modeling_rope_utils.py` of Hugging Face's transformers: ``rope_scaling`` and
``rope_theta``, or the newer ``rope_parameters`` that contains both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from attn_export.spec.rules import ROTARY_SCALINGS
from attn_export.weights.config import FULL, SLIDING, Config, ConfigLayer

_PARTIAL: Final = "partial_rotary_factor"


def rotary(
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


def smollm3_rotary(layer: ConfigLayer) -> dict[str, Any]:
    """Return the fields for SmolLM3: by default every fourth layer has no positions."""
    config = layer.config
    uses_rotary = config.values.get("no_rope_layers")
    if uses_rotary is None:
        every = max(config.whole("no_rope_layer_interval"), 1)
        return rotary(layer) if (layer.number + 1) % every else {}
    if not isinstance(uses_rotary, list) or layer.number >= len(uses_rotary):
        raise config.invalid("no_rope_layers", f"a list with an entry for layer {layer.number}")
    return rotary(layer) if uses_rotary[layer.number] else {}


def phi3_rotary(layer: ConfigLayer) -> dict[str, Any]:
    """Return the fields for Phi-3, whose older names of scaling types mean LongRoPE."""
    inner = _parameters(layer)
    scaling = _scaling_type(inner)
    if scaling in ("su", "yarn"):
        inner = dataclasses.replace(inner, values={**inner.values, "rope_type": "longrope"})
    elif scaling not in (None, "default", "longrope"):
        raise inner.unsupported("rope_type", scaling, "Phi-3 knows longrope only")
    return rotary(layer, partial=_PARTIAL, parameters=inner)


def gemma3_rotary(layer: ConfigLayer) -> dict[str, Any]:
    """Return the fields for Gemma 3: layers with a window have another base and no scaling."""
    inner, values = _parameters(layer), layer.config.values
    has_both = not values.get("rope_scaling") and SLIDING in (values.get("rope_parameters") or ())
    if layer.slides and not has_both:
        none = dataclasses.replace(inner, values={})
        return rotary(layer, "rope_local_base_freq", _PARTIAL, none)
    return rotary(layer, partial=_PARTIAL, parameters=inner)


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
    for name, field in CONSTANTS.get(scaling, {}).items():
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


CONSTANTS: Final[Mapping[str, Mapping[str, str]]] = {
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


def latent_magnitude(layer: ConfigLayer) -> float:
    """Return DeepSeek's factor on queries and on keys, which is a part of its scale."""
    inner = _parameters(layer)
    if _scaling_type(inner) in (None, "default") or not inner.values.get("mscale_all_dim"):
        return 1.0
    return _magnitude(inner.positive("mscale_all_dim"), inner.positive("factor"))


def _magnitude(mscale: float, factor: float) -> float:
    """Return the factor on queries and keys by yarn's formula, with a weight of its logarithm."""
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0
