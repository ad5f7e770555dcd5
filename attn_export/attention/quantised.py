"""Quantisation of an `Attention`: its weights, and the scales of its cache."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from attn_export.attention.module import Attention
from attn_export.attention.quantised_activations import activation_notes
from attn_export.attention.quantised_cache import CacheScales, Pair, Quotients
from attn_export.errors import WeightsError
from attn_export.quantiser import QuantisedWeight, quantise
from attn_export.spec import AttentionSpec
from attn_export.spec.fields import SEED
from attn_export.spec.low_precision import BY_BLOCK, FLOAT_CACHE, KV_RANGES


def quantise_module(
    module: Attention, stored: Mapping[str, QuantisedWeight] = types.MappingProxyType({})
) -> Attention:
    """Return a module after its weights are quantised by its spec, and its cache is calibrated.

    `stored`: The integers of its weights, by name, if a checkpoint holds integers. The weights
    already have the values of these integers. The values before quantisation are not known, so
    `float_weights` stays empty.
    """
    spec = module.spec
    if stored:
        module.integers = stored
        return calibrate_cache(module)
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
    return calibrate_cache(module)


def quantisation_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """Return notes for the report on random scales of the cache and on scales of activations."""
    notes = activation_notes(spec)
    if spec.kv_dtype not in KV_RANGES or spec.kv_scale == BY_BLOCK or spec.kv_scales_from != SEED:
        return notes
    return (
        f"the scales of the {spec.kv_dtype} cache are {scale_rule(spec)} of {BATCH * TOKENS} "
        "random tokens, from a seed; larger values are clipped: your own tokens may need other "
        "scales",
        *notes,
    )


def unquantise(module: Attention, *, keep_cache: bool = False) -> Attention:
    """Return a copy of a module without quantisation, with its original weights."""
    spec = dataclasses.replace(
        module.spec, weights_dtype="none", block_size=0, scheme="symmetric", activations="none"
    )
    if not keep_cache:
        spec = dataclasses.replace(spec, **FLOAT_CACHE)
    unquantised = Attention(spec).eval()
    state = {**module.state_dict(), **module.float_weights}
    unquantised.load_state_dict({name: state[name] for name in unquantised.state_dict()})
    return unquantised


def read_cache(module: Attention, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs with the past dequantised to float32, `[B, Hkv, S, D]`, `[B, Hkv, S, Dv]`."""
    if module.kv_scales is None:
        return dict(inputs)
    past = (inputs["past_key"], inputs["past_value"])
    key, value = module.kv_scales.read(*past, torch.float32)
    # The cache has keys after `change_basis`, which is its own inverse.
    return {**inputs, "past_key": module.kv_scales.change_basis(key), "past_value": value}


# -- scales of a cache of integers, calibrated on tokens or set to given values -----------------

BATCH, TOKENS, TOKEN_SEED = 32, 64, 8
"""The batch size and the length of the random inputs that scales are calibrated on, and their
seed."""


CLIPPED = frozenset({"int4"})
"""Types whose scales clip the largest values: with few steps, smaller steps reduce the error."""

CANDIDATES, CANDIDATES_PER_HALVING = 31, 6
"""The number of candidate scales, and the number of them in a halving: the last is 1/32 of the
first."""

Batch = Mapping[str, Tensor]
"""Inputs of tokens, by name."""


class _Stop(Exception):  # noqa: N818 - no error
    """Signal that ends a run once keys and values are known."""


def new_keys_and_values(module: Attention, inputs: Mapping[str, Tensor]) -> Pair:
    """Return new keys `[B, Hkv, L, D]` and values `[B, Hkv, L, Dv]` as they are before rounding.

    The run of the module ends there, by an exception in a hook.
    """
    assert module.kv_scales is not None
    pairs: list[Pair] = []

    def record(_: nn.Module, pair: Pair) -> None:
        pairs.append(pair)
        raise _Stop

    hook = module.kv_scales.register_forward_pre_hook(record)
    q_proj = getattr(module, "q_proj", None)  # None if one projection computes q, k and v
    if q_proj is not None:  # the largest projection of a layer with few K/V heads
        module.add_module("q_proj", _Zeros(q_proj.out_features))
    try:
        module(**inputs)
    except _Stop:
        pass
    finally:
        if q_proj is not None:
            module.add_module("q_proj", q_proj)
        hook.remove()
    return pairs[0]


class _Zeros(nn.Module):
    """Replacement for a projection of so many outputs, which are not used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros `[B, L, width]` for an input `[B, L, N]`."""
        return x.new_zeros(*x.shape[:-1], self._width)


def scale_rule(spec: AttentionSpec) -> str:
    """Return the rule by which scales are computed from keys and values, as part of a sentence."""
    if spec.kv_dtype in CLIPPED:
        return "those of the least squared error of the keys and values"
    return "those that just fit the largest keys and values"


def calibrate_cache(module: Attention, batches: Iterable[Batch] = ()) -> Attention:
    """Return a module after the scales of its cache are set by the keys and values of tokens.

    The largest magnitude becomes the largest integer. Scales of 4-bit integers are smaller: those
    of the least squared error.

    `batches`: Batches of tokens: `query [B, L, E]`, and `position_ids [B, L]` if the spec has them.
    Default: random tokens from a fixed seed.
    """
    scales, spec = module.kv_scales, module.spec
    if not isinstance(scales, CacheScales):
        return module
    pairs = [_by_token(module, token_inputs(spec, batch)) for batch in batches or (_random(spec),)]
    for buffer, *tensors in zip((scales.k_scale, scales.v_scale), *pairs, strict=True):
        x = torch.cat(tensors)
        axes = (0,) if buffer.dim() else (0, 1, 2)
        largest = x.abs().amax(axes)
        # The scale of a channel that is always 0 does not matter.
        scale = torch.where(largest > 0, largest, 1.0) / scales.high
        if spec.kv_dtype in CLIPPED:
            scale = _least_error_scale(x, scale, axes, (scales.low, scales.high))
        buffer.copy_(scale.reshape(buffer.shape))
    return module


def _least_error_scale(
    x: Tensor, unclipped: Tensor, axes: tuple[int, ...], limits: tuple[int, int]
) -> Tensor:
    """Return the scales of the least squared error; `unclipped` are those that clip nothing."""
    best, least = unclipped, torch.full_like(unclipped, torch.inf)
    for step in range(CANDIDATES):
        scale = unclipped * 2 ** (-step / CANDIDATES_PER_HALVING)
        rounded = Quotients(x / scale, scale, *limits).integers() * scale
        error = (rounded - x).square().sum(axes)
        best, least = torch.where(error < least, scale, best), error.minimum(least)
    return best


def _random(spec: AttentionSpec) -> Batch:
    random = torch.Generator().manual_seed(TOKEN_SEED)
    return {"query": torch.randn((BATCH, TOKENS, spec.embed_dim), generator=random)}


@torch.no_grad()
def _by_token(module: Attention, inputs: Batch) -> list[Tensor]:
    """Return new keys and values of tokens, `[N, Hkv, D]` and `[N, Hkv, Dv]`."""
    return [rows.transpose(1, 2).flatten(0, 1) for rows in new_keys_and_values(module, inputs)]


def token_inputs(spec: AttentionSpec, batch: Batch) -> dict[str, Tensor]:
    """Return the inputs of a run without a past, completed from those of a batch.

    Inputs that the batch lacks are 0, except that positions count from 0.

    `batch`: `query [B, L, E]`, and any other inputs.
    """
    B, L, _ = batch["query"].shape
    sizes = {"batch": B, "query_len": L, "capacity": L}
    inputs: dict[str, Tensor] = {}
    for name, input_ in spec.inputs().items():
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in input_.shape]
        inputs[name] = torch.zeros(shape, dtype=getattr(torch, input_.dtype))
    if "position_ids" in inputs:
        inputs["position_ids"] += torch.arange(L)
    return {**inputs, **batch}
