"""The spec of one attention of a checkpoint with a config.json, and whether another one agrees.

`families.toml` describes the families of models whose config.json is known.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from attn_export.errors import SpecError, WeightsError
from attn_export.spec import AttentionSpec
from attn_export.weights.config import Config, Layer, slides
from attn_export.weights.config_features import RULES
from attn_export.weights.select_layer import ENCODER, LayerMatch, LayerWanted
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
"""Both have the text model's keys; the first is the model with pictures around it."""


def family_of(model_type: str) -> Family | None:
    """Return the row of a `model_type`, or None."""
    return FAMILIES.get("gemma3_text" if model_type in GEMMA3 else model_type)


def described(config: Config) -> Family:
    """Return the family of a config.

    Raises:
        WeightsError: If it is not known, or if our attention cannot be that of its models.
    """
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
class Known:
    """Content of a config.json on one attention.

    Attributes:
        spec: The attention.
        fields: The fields that it was made from, without derived ones.
        keys: The key of each dimension, by the field of the spec.
        biases_said: Whether it lists the biases; otherwise the tensors did.
    """

    spec: AttentionSpec
    fields: Mapping[str, Any]
    keys: Mapping[str, str]
    biases_said: bool


def known(config: Config, found: LayerMatch | LayerWanted, biases: str | None) -> Known:
    """Return the description of one attention in a config.json.

    Args:
        config: The file.
        found: The attention.
        biases: The biases of the checkpoint, if the config does not list them; None for those that
            the family usually has.

    Raises:
        WeightsError: If a key is missing, wrong, or not supported by our attention.
    """
    family = described(config)
    config = config.with_defaults(family.defaults)
    fields, keys = _dimensions(config, family, found)
    head_dim = fields.get("head_dim", fields["embed_dim"] // max(fields["num_heads"], 1))
    number = found.layer or 0
    layer = Layer(
        config, found.role, number, fields["num_heads"], head_dim,
        slides(config, family.slides, number),
    )  # fmt: skip
    for name in family.rules:
        fields |= RULES[name](layer)
    said = family.bias
    if said is None and config.has(family.bias_key):
        said = "all" if config.flag(family.bias_key) else family.bias_off
    there = family.usual_bias if biases is None else biases
    fields["bias"] = there if said is None else said
    try:
        spec = AttentionSpec.from_dict(fields)
    except SpecError as error:
        raise WeightsError(f"{config.path}: {error}") from error
    return Known(spec, fields, keys, said is not None)


def _dimensions(
    config: Config, family: Family, found: LayerMatch | LayerWanted
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return E, H and, if present, Hkv and D; and the key of each."""
    side = "encoder" if found.role == ENCODER else "decoder"
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


FREE: Final = frozenset({
    "cross", "kdim", "vdim", "v_head_dim", "causal", "attn_mask", "cache", "attn_weights",
    "position_ids", "packed_qkv", "dropout", "dtype", "scale", "rotary_magnitude",
})  # fmt: skip
"""Fields that a config does not decide, or that are compared in another way."""

SCALED: Final = {
    "rotary_factor": ("linear", "dynamic", "llama3", "yarn"),
    "rotary_original_len": ("dynamic", "llama3", "yarn", "longrope"),
    "rotary_short_factors": ("longrope",), "rotary_long_factors": ("longrope",),
    "rotary_low_freq": ("llama3",), "rotary_high_freq": ("llama3",),
    "rotary_beta_fast": ("yarn",), "rotary_beta_slow": ("yarn",), "rotary_truncate": ("yarn",),
}  # fmt: skip
"""The ways of scaling in which a field means something."""


def check_agrees(spec: AttentionSpec, said: Known, config: Config) -> str | None:
    """Check that a spec does not contradict a config.json.

    Args:
        spec: The spec.
        said: The config's description of the attention.
        config: The config, for messages.

    Returns:
        A note on a mask that the caller must give, or None.

    Raises:
        WeightsError: If they do; names the field and both values.
    """
    theirs = said.spec
    for field in _compared(spec, said):
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
    return "the model is causal and the spec is not: attn_mask has to hide later keys"


def _compared(spec: AttentionSpec, said: Known) -> list[str]:
    """Return the fields that have a meaning in either spec."""
    both = (spec, said.spec)
    unused = {
        "rotary_": all(not s.has_rotary for s in both),
        "norm_eps": all(s.qk_norm == "none" for s in both),
        "relative_": all(not s.relative_buckets for s in both),
        "bias": not said.biases_said,
    }
    for field, kinds in SCALED.items():
        unused[field] = all(s.rotary_scaling not in kinds for s in both)
    off = tuple(start for start, is_unused in unused.items() if is_unused)
    names = [field.name for field in dataclasses.fields(spec)]
    return [name for name in names if name not in FREE and not name.startswith(off)]


def _same(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs


def _contradiction(config: Config, field: str, ours: object, theirs: object) -> WeightsError:
    return WeightsError(
        f"{field} is {ours!r} in the spec and {theirs!r} by {config.path}; change the spec, or "
        "leave it out"
    )
