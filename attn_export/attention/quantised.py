"""Quantisation of an `Attention`: its weights and its cache."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

import torch

from attn_export.attention.cache_scales import calibrate_cache, scale_notes
from attn_export.attention.module import Attention
from attn_export.attention.quantised_activations import activation_notes
from attn_export.errors import WeightsError
from attn_export.quantiser import QuantisedWeight, quantise
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import FLOAT_CACHE


def quantise_module(
    module: Attention, stored: Mapping[str, QuantisedWeight] = types.MappingProxyType({})
) -> Attention:
    """Quantise the weights of a module as its spec says, and calibrate its cache.

    Args:
        module: The module, changed in place.
        stored: The integers of its weights, by name, if a checkpoint holds integers. The weights
            already have the values of these integers. The values before quantisation are not
            known, so `float_weights` stays empty.

    Returns:
        The module.

    Raises:
        WeightsError: If a weight is not finite.
    """
    spec = module.spec
    if stored:
        module.integers = stored
        return calibrate_cache(module)
    integers: dict[str, QuantisedWeight] = {}
    originals: dict[str, torch.Tensor] = {}
    for name, dtype in spec.quantised_weights.items():
        weight = module.get_parameter(name)
        originals[name] = weight.detach().clone()
        try:
            # The weight of a linear layer is [out, in].
            integers[name] = quantise(
                originals[name].numpy().T, dtype, spec.block_size,
                symmetric=spec.scheme == "symmetric",
            )  # fmt: skip
        except ValueError as error:
            raise WeightsError(f"the weight {name} cannot be quantised: {error}") from error
        with torch.no_grad():
            weight.copy_(torch.from_numpy(integers[name].dequantised().T))
    module.integers, module.float_weights = integers, originals
    return calibrate_cache(module)


def quantisation_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """Return notes for the report on the scales of the cache and of activations."""
    return (*scale_notes(spec), *activation_notes(spec))


def unquantise(module: Attention, *, keep_cache: bool = False) -> Attention:
    """Return a copy of a module without quantisation, with its original weights.

    Args:
        module: The module.
        keep_cache: Whether the cache of the copy stays quantised.
    """
    spec = dataclasses.replace(
        module.spec, weights_dtype="none", block_size=0, scheme="symmetric", activations="none"
    )
    if not keep_cache:
        spec = dataclasses.replace(spec, **FLOAT_CACHE)
    unquantised = Attention(spec).eval()
    state = {**module.state_dict(), **module.float_weights}
    unquantised.load_state_dict({name: state[name] for name in unquantised.state_dict()})
    return unquantised


def read_cache(module: Attention, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return inputs with a quantised past dequantised to float32.

    Args:
        module: The module.
        inputs: Its inputs, by name. They stay as they are if its cache is not quantised.

    Returns:
        The inputs, with `past_key [B, Hkv, S, D]` and `past_value [B, Hkv, S, Dv]`.
    """
    if module.kv_scales is None:
        return dict(inputs)
    past = (inputs["past_key"], inputs["past_value"])
    key, value = module.kv_scales.read(*past, torch.float32)
    # The cache has keys after `change_basis`, which is its own inverse.
    return {**inputs, "past_key": module.kv_scales.change_basis(key), "past_value": value}
