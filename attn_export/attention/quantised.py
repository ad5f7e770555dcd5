"""Quantisation of the weights of an `Attention`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attn_export.attention.module import Attention
from attn_export.errors import WeightsError
from attn_export.quantiser import QuantisedWeight, quantise


def quantise_module(module: Attention) -> None:
    """Quantise the weights of a module by its spec, in place."""
    spec = module.spec
    integers: dict[str, QuantisedWeight] = {}
    originals: dict[str, Tensor] = {}
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


def unquantise(module: Attention) -> Attention:
    """Return a copy of a module without quantisation, with its original weights."""
    spec = dataclasses.replace(module.spec, weights_dtype="none", block_size=0, scheme="symmetric")
    unquantised = Attention(spec).eval()
    state = {**module.state_dict(), **module.float_weights}
    unquantised.load_state_dict({name: state[name] for name in unquantised.state_dict()})
    return unquantised
