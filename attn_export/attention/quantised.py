"""An `Attention` whose weights or whose cache few bits hold."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

import torch

from attn_export.attention.cache_scales import calibrated, scale_notes
from attn_export.attention.module import Attention
from attn_export.attention.quantised_activations import activation_notes
from attn_export.errors import WeightsError
from attn_export.quantiser import QuantisedWeight, quantise
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import FLOAT_CACHE


def quantised(
    module: Attention, stored: Mapping[str, QuantisedWeight] = types.MappingProxyType({})
) -> Attention:
    """Return the module after its weights became those of integers, where its spec says so.

    A cache of integers gets its scales then.

    Args:
        module: The module.
        stored: The integers of its weights where a checkpoint holds them; no weight is quantised
            then, and no others are known.

    Raises:
        WeightsError: If a weight is not finite.
    """
    spec = module.spec
    if stored:
        module.integers = stored
        return calibrated(module)
    integers: dict[str, QuantisedWeight] = {}
    before: dict[str, torch.Tensor] = {}
    for name, dtype in spec.quantised_weights.items():
        weight = module.get_parameter(name)
        before[name] = weight.detach().clone()
        try:
            # linear layers hold [out, in]
            integers[name] = quantise(
                before[name].numpy().T, dtype, spec.block_size,
                symmetric=spec.scheme == "symmetric",
            )  # fmt: skip
        except ValueError as error:
            raise WeightsError(f"the weight {name} cannot be quantised: {error}") from error
        with torch.no_grad():
            weight.copy_(torch.from_numpy(integers[name].dequantised().T))
    module.integers, module.float_weights = integers, before
    return calibrated(module)


def quantisation_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """Return notes for the reader on scales of random tokens, and of activations."""
    return (*scale_notes(spec), *activation_notes(spec))


def unquantised(module: Attention, *, keep_cache: bool = False) -> Attention:
    """Return a copy of a module with its weights and its cache as before they were quantised.

    Args:
        module: The module.
        keep_cache: Whether its cache still holds integers.
    """
    spec = dataclasses.replace(
        module.spec, weights_dtype="none", block_size=0, scheme="symmetric", activations="none"
    )
    if not keep_cache:
        spec = dataclasses.replace(spec, **FLOAT_CACHE)
    before = Attention(spec).eval()
    state = {**module.state_dict(), **module.float_weights}
    before.load_state_dict({name: state[name] for name in before.state_dict()})
    return before


def read_cache(module: Attention, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return inputs with the past that integers stand for, float32 `[B, Hkv, S, .]`.

    Args:
        module: The module that reads them.
        inputs: Its inputs; of a cache in floating point they stay as they are.
    """
    if module.kv_scales is None:
        return dict(inputs)
    past = (inputs["past_key"], inputs["past_value"])
    key, value = module.kv_scales.read(*past, torch.float32)
    # mixed twice, they are as they were
    return {**inputs, "past_key": module.kv_scales.mixed(key), "past_value": value}
