"""Loading of one attention layer of a checkpoint: its spec and its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.errors import WeightsError
from attn_export.parts import parts
from attn_export.quantiser import QuantisedWeight
from attn_export.spec import AttentionSpec
from attn_export.weights.config import Config
from attn_export.weights.from_config import (
    GEMMA3,
    ConfigSpec,
    check_agrees,
    family_of,
    find_family,
    read_config_spec,
)
from attn_export.weights.layouts import pool
from attn_export.weights.select_layer import (
    CROSS,
    DECODER,
    ENCODER,
    LayerMatch,
    choose_layer,
    parse_layer,
)
from attn_export.weights.shapes import NamedSizes, relative_bias_name
from attn_export.weights.source import TensorSource, find_lone_config, open_source, shown
from attn_export.weights.unpack import read_weights

if TYPE_CHECKING:
    from torch import Tensor

_LAYER_COUNTS = (
    "{side}_layers", "num_{side}_layers", "num_layers", "num_hidden_layers", "n_layers", "n_layer",
)  # fmt: skip
"""Keys of the number of layers, of which the first that exists counts; {side} stands for encoder or
decoder."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Checkpoint:
    """One attention layer of a checkpoint.

    Attributes:
        weights: The state dict of an `Attention` of that spec, in its dtype, on the CPU; None for
            a config.json without tensors.
        integers: The integers of the weights that the checkpoint stores as integers, by their
            names in `weights`.
    """

    spec: AttentionSpec
    weights: dict[str, Tensor] | None
    notes: tuple[str, ...]
    integers: Mapping[str, QuantisedWeight] = dataclasses.field(default_factory=dict)


def load_checkpoint(
    path: Path,
    *,
    layer: str | None = None,
    spec: AttentionSpec | None = None,
    fields: Mapping[str, Any] | None = None,
    pool_kv_heads: int | None = None,
) -> _Checkpoint:
    """Return one attention layer of a safetensors checkpoint; other tensors are not read."""
    fields = fields or {}
    if spec is not None and fields:
        spec = AttentionSpec.from_dict({**spec.to_dict(), **fields})
    opened = open_layer(Path(path), layer, spec, fields, pool_kv_heads)
    if isinstance(opened, _Checkpoint):
        return opened
    source, config, match = opened
    if config is not None and config.towers and match.tower:
        config = config.for_tower(match.tower)
    notes = [f"{match.shown} of {source.path.name}, stored as {match.layout.name}"]
    if spec is None:
        sizes, more = _from_config(source, match, config, fields)
    else:
        sizes, more = _from_spec(source, match, spec, config)
    norms_minus_one = _stores_norms_minus_one(source, match, config)
    weights, ours, read = read_weights(source, match, sizes, norms_minus_one=norms_minus_one)
    notes += [*more, *read]
    bias = relative_bias_name(match, source.files) if sizes.spec.relative_buckets else None
    if bias is not None and not bias.startswith(match.prefix):
        notes.append("the relative bias of block 0 is used: T5 stores it there for all layers")
    final_spec, integers = source.integers(ours, sizes.spec, pool_kv_heads)
    kv_heads = final_spec.num_kv_heads
    if integers:
        notes.append(
            f"its projections hold {final_spec.weights_dtype} as stored; nothing was rounded"
        )
    elif pool_kv_heads is not None:
        final_spec, weights = pool(weights, final_spec, pool_kv_heads)
        if pool_kv_heads != kv_heads:
            notes.append(f"K/V heads were pooled from {kv_heads} to {pool_kv_heads} by their means")
    return _Checkpoint(final_spec, weights, tuple(map(shown, notes)), integers)


def open_layer(
    path: Path, layer: str | None, spec: AttentionSpec | None, fields: Mapping[str, Any],
    pool_kv_heads: int | None,
) -> _Checkpoint | tuple[TensorSource, Config | None, LayerMatch]:  # fmt: skip
    """Find a layer without importing torch.

    Returns:
        What a config.json without tensors describes, or the files, their config and the layer.
    """
    lone_config = find_lone_config(path) if spec is None else None
    if lone_config is not None:
        return _load_config_alone(lone_config, layer, fields, pool_kv_heads)
    source = open_source(path)
    config = Config.load(source.config)
    if any(name.rpartition(".")[2] in INTEGERS for name in source.files):
        source = _with_integers(source, config)
    if spec is None and config is not None and not config.towers:
        find_family(config)  # raises an error before tensors are searched
    return source, config, choose_layer(source, layer, _wanted_role(spec, fields))


INTEGERS = ("qweight", "weight_packed", "weight_scale", "SCB")
"""The tensors by which a layer of integers is recognised."""


def _with_integers(source: TensorSource, config: Config | None) -> TensorSource:
    module = next((part.checkpoints for part in parts() if part.checkpoints), "")
    if not module:
        raise WeightsError(
            f"{source.path} holds integers, which needs the part quantised_checkpoints, which is "
            "missing; install attn-export whole, or give a checkpoint in float"
        )
    wrapped: TensorSource = import_module(module).with_integers(source, config)
    return wrapped


def _load_config_alone(
    path: Path, layer: str | None, fields: Mapping[str, Any], pool_kv_heads: int | None
) -> _Checkpoint:
    """Return the spec of one attention layer of a config.json without tensors."""
    config = Config.load(path)
    if config is None:
        raise WeightsError(f"{path} was removed meanwhile; restore it")
    if pool_kv_heads is not None:
        raise WeightsError(
            f"{path} has no tensors beside it whose K/V heads could be pooled; change num_kv_heads"
        )
    number, role = parse_layer(layer, _wanted_role(None, fields))
    find_family(config)  # raises an error for a family that is not known
    side = "encoder" if role == ENCODER else "decoder"
    keys = [key.format(side=side) for key in _LAYER_COUNTS if config.has(key.format(side=side))]
    if keys and number >= config.whole(keys[0]):
        raise WeightsError(
            f"{path} has {keys[0]} {config.whole(keys[0])}, so there is no layer {number}; give a "
            "smaller --layer"
        )
    in_config = read_config_spec(config, number, role, None)
    spec = AttentionSpec.from_dict({**in_config.fields, **fields})
    note = f"layer {number} as {path} describes it, with random weights: it holds no tensors"
    return _Checkpoint(spec, None, (shown(note),))


def _wanted_role(spec: AttentionSpec | None, fields: Mapping[str, Any]) -> str | None:
    """Return the role that a layer must have: encoder, decoder or cross; None if any."""
    if spec is None and not {"causal", "cross"} & fields.keys():
        return None
    cross = fields.get("cross", False) if spec is None else spec.cross
    causal = fields.get("causal", False) if spec is None else spec.causal
    if cross:
        return CROSS
    return DECODER if causal else ENCODER


def _from_spec(
    source: TensorSource, match: LayerMatch, spec: AttentionSpec, config: Config | None
) -> tuple[NamedSizes, list[str]]:
    """Check a spec against the config; return its sizes and notes."""
    sizes = NamedSizes(spec, {}, "the spec")
    if config is None:
        return sizes, []
    if family_of(config.model_type) is None:
        note = f"config.json was not compared: its model_type {config.model_type!r} is not known"
        return sizes, [note]
    agreed = check_agrees(spec, _in_config(source, match, config), config)
    return sizes, [agreed] if agreed else []


def _from_config(
    source: TensorSource, match: LayerMatch, config: Config | None, fields: Mapping[str, Any]
) -> tuple[NamedSizes, list[str]]:
    """Return the sizes of the config's spec with some fields changed, with notes."""
    if config is None:
        raise WeightsError(
            f"nothing says what the attention in {source.path} is: give SPEC.toml, or put the "
            "model's config.json beside it"
        )
    in_config = _in_config(source, match, config)
    notes = []
    if not in_config.has_biases:
        notes.append(f"config.json does not say which biases there are: {in_config.spec.bias}")
    spec = AttentionSpec.from_dict({**in_config.fields, **fields})
    keys = {field: key for field, key in in_config.keys.items() if field not in fields}
    return NamedSizes(spec, keys, "config.json"), notes


def _in_config(source: TensorSource, match: LayerMatch, config: Config) -> ConfigSpec:
    """Return the spec in a config.json, with the biases of the tensors if it does not state any."""
    layout = match.layout
    if layout.latent:
        stored = any(match.prefix + name in source.files for name in layout.biases)
        biases = "all" if stored else "none"
    else:
        # A single name is that of a bias that packs those of q, k and v.
        names = layout.biases if len(layout.biases) > 1 else layout.biases * 3
        pairs = zip(("q", "k", "v", "out"), (*names, layout.out_names[1]), strict=True)
        biases = ",".join(side for side, name in pairs if match.prefix + name in source.files)
    return read_config_spec(config, match.layer or 0, match.role, biases or "none")


def _stores_norms_minus_one(source: TensorSource, match: LayerMatch, config: Config | None) -> bool:
    """Return whether norm weights are stored minus 1: for Gemma 3, by its config or its norms."""
    if config is not None and config.model_type:
        return config.model_type in GEMMA3
    layer = match.prefix.removesuffix("self_attn.")
    inside = {name.removeprefix(layer) for name in source.files if name.startswith(layer)}
    # Gemma 3n and 4 have that norm too, but do not subtract 1; they are recognised by these names.
    of_later_models = ("laurel.", "per_layer_input_gate.", "layer_scalar", "altup.")
    return "pre_feedforward_layernorm.weight" in inside and not any(
        name.startswith(of_later_models) for name in inside
    )
