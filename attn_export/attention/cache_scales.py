"""The scales of a cache of integers: from tokens, or as given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from attn_export.attention.module import Attention
from attn_export.attention.quantised_cache import CacheScales, Pair
from attn_export.spec import AttentionSpec
from attn_export.spec.fields import SEED
from attn_export.spec.low_precision import BY_BLOCK, KV_RANGES

ROWS, TOKENS, OF_TOKENS = 32, 64, 8
"""The size of the random inputs that scales are taken from, and their seed."""


CLIPPED = frozenset({"int4"})
"""The types whose scales clip the largest values: with few steps, smaller steps gain more."""

STEPS, AN_OCTAVE = 31, 6
"""The number of scales that are tried, each 2^(1/6) of the one before: down to 1/32."""

Batch = Mapping[str, Tensor]
"""Inputs of tokens, by name."""


class _Enough(Exception):  # noqa: N818 - no error
    """All that is needed of a run is known."""


def new_rows(module: Attention, inputs: Mapping[str, Tensor]) -> Pair:
    """Return new keys `[B, Hkv, L, D]` and values before they are rounded; compute no more.

    Args:
        module: The module; its cache holds integers.
        inputs: Its inputs.
    """
    assert module.kv_scales is not None
    found: list[Pair] = []

    def note(_: nn.Module, new: Pair) -> None:
        found.append(new)
        raise _Enough

    hook = module.kv_scales.register_forward_pre_hook(note)
    queries = getattr(module, "q_proj", None)  # none where one projection is for q, k and v
    if queries is not None:  # the largest projection, of a layer with few K/V heads
        module.add_module("q_proj", _Zeros(queries.out_features))
    try:
        module(**inputs)
    except _Enough:
        pass
    finally:
        if queries is not None:
            module.add_module("q_proj", queries)
        hook.remove()
    return found[0]


class _Zeros(nn.Module):
    """A projection whose outputs nobody reads.

    Args:
        width: The number of outputs.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros `[B, L, width]` for an input `[B, L, N]`."""
        return x.new_zeros(*x.shape[:-1], self._width)


def scale_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """Return a note for the reader on scales of random tokens, if there are such."""
    random = spec.kv_scale != BY_BLOCK and spec.kv_scales_from == SEED
    if spec.kv_dtype not in KV_RANGES or not random:
        return ()
    return (
        f"the scales of the {spec.kv_dtype} cache are {rule_of(spec)} of {ROWS * TOKENS} random "
        "tokens, from a seed; larger ones are clipped: your own tokens may need other scales",
    )


def rule_of(spec: AttentionSpec) -> str:
    """Return how the scales of a spec follow from keys and values, as the start of a phrase."""
    if spec.kv_dtype in CLIPPED:
        return "those of the least squared error of the keys and values"
    return "the largest keys and values"


def calibrated(module: Attention, batches: Iterable[Batch] = ()) -> Attention:
    """Return the module after its scales became those of tokens.

    The largest magnitude of keys, and of values, is the largest integer; with 4 bits a smaller one
    is, by which the squared error is least.

    Args:
        module: Changed in place, if its cache holds integers.
        batches: Tokens: `query [B, L, E]`, and `position_ids [B, L]` where they are inputs.
            Default: random ones, from a seed.
    """
    scales, spec = module.kv_scales, module.spec
    if not isinstance(scales, CacheScales):
        return module
    found = [_by_token(module, inputs_of(spec, each)) for each in batches or (_random(spec),)]
    for buffer, *rows in zip((scales.k_scale, scales.v_scale), *found, strict=True):
        x = torch.cat(rows)
        over = (0,) if buffer.dim() else (0, 1, 2)
        largest = x.abs().amax(over)
        # A channel that is always 0 has any scale.
        scale = torch.where(largest > 0, largest, 1.0) / scales.high
        if spec.kv_dtype in CLIPPED:
            scale = _least_error(x, scale, over, (scales.low, scales.high))
        buffer.copy_(scale.reshape(buffer.shape))
    return module


def _least_error(
    x: Tensor, largest: Tensor, over: tuple[int, ...], limits: tuple[int, int]
) -> Tensor:
    """Return the scales of the least squared error.

    Args:
        x: Keys or values, `[N, Hkv, D]`.
        largest: The scales that clip nothing: a scalar, or `[Hkv, D]`.
        over: The axes that share a scale.
        limits: The least and the largest integer.
    """
    best, least = largest, torch.full_like(largest, torch.inf)
    for step in range(STEPS):
        scale = largest * 2 ** (-step / AN_OCTAVE)
        error = ((x / scale).round().clamp(*limits) * scale - x).square().sum(over)
        best, least = torch.where(error < least, scale, best), error.minimum(least)
    return best


def _random(spec: AttentionSpec) -> Batch:
    random = torch.Generator().manual_seed(OF_TOKENS)
    return {"query": torch.randn((ROWS, TOKENS, spec.embed_dim), generator=random)}


@torch.no_grad()
def _by_token(module: Attention, inputs: Batch) -> list[Tensor]:
    """Return new keys and values of tokens, `[N, Hkv, D]` and `[N, Hkv, Dv]`."""
    return [rows.transpose(1, 2).flatten(0, 1) for rows in new_rows(module, inputs)]


def inputs_of(spec: AttentionSpec, batch: Batch) -> dict[str, Tensor]:
    """Return inputs without a past for tokens: positions from 0 on, everything else 0.

    Args:
        spec: The spec.
        batch: `query [B, L, E]`, and other inputs.
    """
    B, L, _ = batch["query"].shape
    sizes = {"batch": B, "query_len": L, "capacity": L}
    inputs: dict[str, Tensor] = {}
    for name, wanted in spec.inputs().items():
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in wanted.shape]
        inputs[name] = torch.zeros(shape, dtype=getattr(torch, wanted.dtype))
    if "position_ids" in inputs:
        inputs["position_ids"] += torch.arange(L)
    return {**inputs, **batch}


def set_scales(module: Attention, scales: Mapping[str, Tensor], origin: str) -> None:
    """Give a module other scales, and note their origin in its spec.

    Args:
        module: Changed in place; its cache holds integers.
        scales: `k_scale` and `v_scale`, in the shapes of its own.
        origin: The value of the field `kv_scales_from`.
    """
    assert module.kv_scales is not None
    for name, scale in scales.items():
        module.kv_scales.get_buffer(name).copy_(scale)
    module.spec = dataclasses.replace(module.spec, kv_scales_from=origin)
