"""Spec of one attention layer from a config.json, and its comparison with another spec.

`families.toml` describes the families of models whose config.json can be read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from attn_export.errors import SpecError, WeightsError
from attn_export.spec import AttentionSpec
from attn_export.spec.fields import FIELDS
from attn_export.spec.rules import unmet
from attn_export.weights.config import FULL, SLIDING, Config, Layer
from attn_export.weights.config_features import RULES
from attn_export.weights.select_layer import ENCODER
from attn_export.weights.source import shown


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of the attention of one `model_type`; `families.toml` explains the fields."""

    embed_dim: tuple[str, ...] = ("hidden_size",)
    num_heads: tuple[str, ...] = ("num_attention_heads",)
    num_kv_heads: str = ""
    head_dim: str = ""
    rules: tuple[str, ...]
    defaults: dict[str, Any] = {}
    bias: str | None = None
    bias_key: str = "attention_bias"
    usual_bias: str = "none"
    bias_off: str = "none"
    refused: str = ""
    slides: str | None = None


FAMILIES: Final[Mapping[str, Family]] = msgspec.toml.decode(
    Path(__file__).with_name("families.toml").read_bytes(), type=dict[str, Family]
)

GEMMA3: Final = ("gemma3", "gemma3_text")
"""Names of Gemma 3: the model with images, whose language model is the second, has its keys."""


def family_of(model_type: str) -> Family | None:
    """Return the family of a `model_type`, or None if it is unknown."""
    return FAMILIES.get("gemma3_text" if model_type in GEMMA3 else model_type)


def find_family(config: Config) -> Family:
    """Return the family of a config."""
    family = family_of(config.model_type)
    if family is None:
        raise WeightsError(
            f"{config.path} has model_type {shown(repr(config.model_type))}, which is not in the "
            "table of docs/checkpoints.md; give SPEC.toml, or the model's own code by --module "
            "PATH.py:FUNCTION"
        )
    if family.refused:
        raise WeightsError(
            f"{config.path} has model_type {shown(repr(config.model_type))}: {family.refused}, "
            "which a spec cannot say; give the model's own code by --module PATH.py:FUNCTION"
        )
    return family


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigSpec:
    """Spec of one attention layer, read from a config.json.

    Attributes:
        has_biases: Whether config.json states the biases; if not, they are those of the tensors.
    """

    spec: AttentionSpec
    fields: Mapping[str, Any]
    keys: Mapping[str, str]
    has_biases: bool


def read_config_spec(config: Config, number: int, role: str, biases: str | None) -> ConfigSpec:
    """Return the spec of one attention layer, read from a config.json.

    `biases`: The biases of the checkpoint's tensors, which apply if config.json does not state any;
    None for those that the family usually has.
    """
    family = find_family(config)
    config = Config(config.path, {**family.defaults, **config.values})
    fields, keys = _dimensions(config, family, role)
    head_dim = fields.get("head_dim", fields["embed_dim"] // max(fields["num_heads"], 1))
    has_window = _slides(config, family.slides, number)
    described = Layer(config, role, number, fields["num_heads"], head_dim, has_window)
    for name in family.rules:
        fields |= RULES[name](described)
    stated_bias = family.bias
    if stated_bias is None and config.has(family.bias_key):
        stated_bias = "all" if config.flag(family.bias_key) else family.bias_off
    stored_bias = family.usual_bias if biases is None else biases
    fields["bias"] = stored_bias if stated_bias is None else stated_bias
    try:
        spec = AttentionSpec.from_dict(fields)
    except SpecError as error:
        raise WeightsError(f"{config.path}: {error}") from error
    return ConfigSpec(spec, fields, keys, stated_bias is not None)


_PATTERNS: Final[Mapping[str, Callable[[Config, int], bool]]] = {
    # Every other layer, from the first.
    "even": lambda _, number: number % 2 == 0,
    # By default all but every sixth one.
    "gemma3_slides": lambda config, number: (
        (number + 1) % max(config.whole("sliding_window_pattern"), 1) != 0
    ),
    # By default all but every third one, from the first.
    "modernbert_slides": lambda config, number: (
        number % max(config.whole("global_attn_every_n_layers"), 1) != 0
    ),
    "no_layer": lambda _, __: False,
    # All layers from a given one on.
    "qwen_slides": lambda config, number: number >= config.whole("max_window_layers"),
}
"""Functions of a layer's number that return whether it has a window if `layer_types` is missing, by
the name in `families.toml`."""


def _slides(config: Config, pattern: str | None, number: int) -> bool:
    """Return whether a layer has a window; `pattern` is None if all layers are alike."""
    if pattern is None:
        return False
    layer_types = config.values.get("layer_types")
    if layer_types is None:
        return _PATTERNS[pattern](config, number)
    if not isinstance(layer_types, list) or number >= len(layer_types):
        raise config.invalid("layer_types", f"a list with an entry for layer {number}")
    if layer_types[number] not in (FULL, SLIDING):
        raise config.unsupported("layer_types", layer_types[number], f"known: {FULL}, {SLIDING}")
    return bool(layer_types[number] == SLIDING)


def _dimensions(config: Config, family: Family, role: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return E and H, Hkv and D if they are stated, and the key of each."""
    side = "encoder" if role == ENCODER else "decoder"
    fields: dict[str, Any] = {}
    keys = {}
    for field in ("embed_dim", "num_heads"):
        names = [name.format(side=side) for name in getattr(family, field)]
        keys[field] = next((name for name in names if config.has(name)), names[0])
        fields[field] = config.whole(keys[field])
    keys |= {"num_kv_heads": keys["num_heads"], "head_dim": "head_dim"}
    for field in ("num_kv_heads", "head_dim"):
        name = getattr(family, field)
        if name and config.has(name):
            keys[field], fields[field] = name, config.whole(name)
    return fields, keys


def check_agrees(spec: AttentionSpec, in_config: ConfigSpec, config: Config) -> str | None:
    """Check that a spec does not contradict a config.json.

    Returns:
        A note on a mask that the caller must pass, or None.
    """
    theirs = in_config.spec
    for field in _compared(spec, in_config):
        ours, other = getattr(spec, field), getattr(theirs, field)
        if not _same(ours, other):
            raise _contradiction(config, field, ours, other)
    for field, ours, other in (
        ("scale", spec.softmax_scale, theirs.softmax_scale),
        ("rotary_magnitude", spec.turn_magnitude, theirs.turn_magnitude),
    ):
        if not _same(ours, other):
            raise _contradiction(config, field, ours, other)
    if spec.causal == theirs.causal:
        return None
    if spec.causal or spec.mask is None:
        raise _contradiction(config, "causal", spec.causal, theirs.causal)
    return "the model is causal and the spec is not: attn_mask must hide later keys"


def _compared(spec: AttentionSpec, in_config: ConfigSpec) -> list[str]:
    """Return the names of the fields that have an effect in one of the two specs."""
    both = (spec, in_config.spec)
    return [
        name for name, field in FIELDS.items()
        if field.in_config and (name != "bias" or in_config.has_biases)
        and not all(unmet(each, field.acts_with) for each in both)
    ]  # fmt: skip


def _same(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs


def _contradiction(config: Config, field: str, ours: object, theirs: object) -> WeightsError:
    return WeightsError(
        f"{field} is {ours!r} in the spec and {theirs!r} by {config.path}; change the spec, or "
        "leave it out"
    )
