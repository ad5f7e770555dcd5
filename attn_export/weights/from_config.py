"""Spec of one attention layer from a config.json.

`families.toml` describes the families of models whose config.json can be read.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from attn_export.errors import SpecError, WeightsError
from attn_export.spec import AttentionSpec
from attn_export.weights.config import CROSS, DECODER, ENCODER, FULL, SLIDING, Config, ConfigLayer
from attn_export.weights.config_features import RULES
from attn_export.weights.source import CONFIG, shown


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

_GEMMA3: Final = ("gemma3", "gemma3_text")
"""Names of Gemma 3: the model with images, whose language model is the second, has its keys."""


def _find_family(config: Config) -> Family:
    """Return the family of a config."""
    kind = config.model_type
    family = FAMILIES.get("gemma3_text" if kind in _GEMMA3 else kind)
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


_LAYER_COUNTS = (
    "{side}_layers", "num_{side}_layers", "num_layers", "num_hidden_layers", "n_layers", "n_layer",
)  # fmt: skip
"""Keys of the number of layers, of which the first that exists counts; {side} stands for encoder or
decoder."""


def spec_of_config(
    path: Path, layer: int = 0, fields: Mapping[str, Any] = types.MappingProxyType({})
) -> AttentionSpec:
    """Return the spec of one attention layer of a config.json, with some fields changed.

    `path`: The file, or its folder.
    `fields`: With `causal` or `cross` they say which attention is meant, where there are several.
    """
    path = path / CONFIG if path.is_dir() else path
    config = Config.load(path)
    if config is None:
        raise WeightsError(f"{path} does not exist; check the path")
    role = _role(fields)
    _find_family(config)  # raises an error for a family that is not known
    side = "encoder" if role == ENCODER else "decoder"
    keys = [key.format(side=side) for key in _LAYER_COUNTS if config.has(key.format(side=side))]
    if keys and not 0 <= layer < config.whole(keys[0]):
        raise WeightsError(
            f"{path} has {keys[0]} {config.whole(keys[0])}, so there is no layer {layer}"
        )
    return AttentionSpec.from_dict({**_fields_of(config, layer, role), **fields})


def _role(fields: Mapping[str, Any]) -> str:
    """Return the role that a layer must have; "" if any."""
    if not {"causal", "cross"} & fields.keys():
        return ""
    if fields.get("cross", False):
        return CROSS
    return DECODER if fields.get("causal", False) else ENCODER


def _fields_of(config: Config, number: int, role: str) -> dict[str, Any]:
    """Return the fields of the spec of one attention layer, read from a config.json."""
    family = _find_family(config)
    config = Config(config.path, {**family.defaults, **config.values})
    fields = _dimensions(config, family, role)
    head_dim = fields.get("head_dim", fields["embed_dim"] // max(fields["num_heads"], 1))
    has_window = _slides(config, family.slides, number)
    described = ConfigLayer(config, role, number, fields["num_heads"], head_dim, has_window)
    for name in family.rules:
        fields |= RULES[name](described)
    stated_bias = family.bias
    if stated_bias is None and config.has(family.bias_key):
        stated_bias = "all" if config.flag(family.bias_key) else family.bias_off
    fields["bias"] = family.usual_bias if stated_bias is None else stated_bias
    try:
        AttentionSpec.from_dict(fields)
    except SpecError as error:
        raise WeightsError(f"{config.path}: {error}") from error
    return fields


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


def _dimensions(config: Config, family: Family, role: str) -> dict[str, Any]:
    """Return E and H, and Hkv and D if they are stated."""
    side = "encoder" if role == ENCODER else "decoder"
    fields: dict[str, Any] = {}
    for field in ("embed_dim", "num_heads"):
        names = [name.format(side=side) for name in getattr(family, field)]
        fields[field] = config.whole(next((n for n in names if config.has(n)), names[0]))
    for field in ("num_kv_heads", "head_dim"):
        name = getattr(family, field)
        if name and config.has(name):
            fields[field] = config.whole(name)
    return fields
