"""An `Attention` whose weights or whose cache few bits hold."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

import torch

from attn_export.attention.module import Attention
from attn_export.attention.quantised_cache import Pair
from attn_export.errors import WeightsError
from attn_export.quantiser import QuantisedWeight, quantise
from attn_export.spec import AttentionSpec

ROWS, TOKENS, SEED = 32, 64, 8
"""The size of the random inputs that scales are taken from, and their seed."""


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


def scale_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """Return a note for the reader on the scales of a cache of integers, if there is one."""
    if spec.kv_dtype == "none":
        return ()
    return (
        f"the scales of the {spec.kv_dtype} cache are the largest keys and values of "
        f"{ROWS * TOKENS} random tokens, from a seed; larger ones are clipped: your own tokens may "
        "need other scales",
    )


def unquantised(module: Attention, *, keep_cache: bool = False) -> Attention:
    """Return a copy of a module with its weights and its cache as before they were quantised.

    Args:
        module: The module.
        keep_cache: Whether its cache still holds integers.
    """
    spec = dataclasses.replace(module.spec, weights_dtype="none", block_size=0, scheme="symmetric")
    if not keep_cache:
        spec = dataclasses.replace(spec, kv_dtype="none", kv_scale="per-tensor")
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
    return {**inputs, "past_key": key, "past_value": value}


def calibrated(module: Attention) -> Attention:
    """Return the module after its scales became those of random inputs, from a seed.

    The largest magnitude of keys, and of values, is the largest integer.

    Args:
        module: Changed in place, if its cache holds integers.
    """
    scales, spec = module.kv_scales, module.spec
    if scales is None:
        return module
    seen: list[Pair] = []
    hook = scales.register_forward_pre_hook(lambda _, new: seen.append(new))
    random = torch.Generator().manual_seed(SEED)
    sizes = {"batch": ROWS, "query_len": TOKENS, "capacity": TOKENS, "past_len": 0}
    inputs: dict[str, torch.Tensor] = {}
    for name, wanted in spec.inputs().items():
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in wanted.shape]
        inputs[name] = torch.zeros(shape, dtype=getattr(torch, wanted.dtype))
    inputs["query"] = torch.randn(inputs["query"].shape, generator=random)
    if "position_ids" in inputs:
        inputs["position_ids"] += torch.arange(TOKENS)
    with torch.no_grad():
        module(**inputs)
    hook.remove()
    for buffer, new in zip((scales.k_scale, scales.v_scale), seen[0], strict=True):
        largest = new.abs().amax((0, 2)).unsqueeze(1) if buffer.dim() else new.abs().amax()
        # A channel that is always 0 has any scale.
        buffer.copy_(torch.where(largest > 0, largest, 1.0) / scales.high)
    return module
