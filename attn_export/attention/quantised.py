"""Projections of an `Attention` with the weights that few bits hold."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

import torch

from attn_export.attention.module import Attention
from attn_export.errors import WeightsError
from attn_export.quantiser import QuantisedWeight, quantise


def quantised(
    module: Attention, stored: Mapping[str, QuantisedWeight] = types.MappingProxyType({})
) -> Attention:
    """Return the module after its weights became those of integers, where its spec says so.

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
        return module
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
    return module


def unquantised(module: Attention) -> Attention:
    """Return a copy of a module with its weights as they were before they were quantised."""
    spec = dataclasses.replace(module.spec, weights_dtype="none", block_size=0, scheme="symmetric")
    before = Attention(spec).eval()
    before.load_state_dict({**module.state_dict(), **module.float_weights})
    return before
