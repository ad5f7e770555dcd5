"""Inputs of whole numbers, and the rule for caches of integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attn_export.errors import SpecError
from attn_export.spec.fields import AttentionFields
from attn_export.spec.inputs import Input, Shape

POSITIONS: Final = 4095
"""The largest of the position ids that are tried."""

KV_RANGES: Final = {"int8": (-128, 127)}
"""The integers that a cache may hold, by `kv_dtype`."""


def integer_inputs(spec: AttentionFields, shapes: Mapping[str, Shape]) -> dict[str, Input]:
    """Return the inputs of a spec that are whole numbers, by name.

    Args:
        spec: The spec.
        shapes: The shapes of all inputs.
    """
    found: dict[str, Input] = {}
    if spec.kv_dtype != "none":
        span = KV_RANGES[spec.kv_dtype]
        names = ("past_key", "past_value")
        found |= {name: Input(shapes[name], spec.kv_dtype, *span) for name in names}
    if "past_length" in shapes:
        found["past_length"] = Input(shapes["past_length"], "int64", 0, "past_len")
    if spec.position_ids:
        # Beyond the length from which on frequencies change, often but not always.
        stretched = spec.rotary_scaling in ("dynamic", "longrope")
        last = spec.rotary_original_len * 3 // 2 if stretched else POSITIONS
        found["position_ids"] = Input(shapes["position_ids"], "int64", 0, last)
    return found


def quantised_cache(spec: AttentionFields) -> None:
    """Check that a cache of integers is written in place, by attention in float32."""
    if spec.kv_dtype == "none":
        if spec.kv_scale != "per-tensor":
            raise SpecError(
                f"kv_scale = {spec.kv_scale!r} with kv_dtype = 'none'; set kv_dtype = \"int8\""
            )
        return
    given = f"kv_dtype = {spec.kv_dtype!r}"
    if spec.cache != "in-place":
        raise SpecError(
            f"{given} with cache = {spec.cache!r}: only a cache that is written in place holds "
            'integers; set cache = "in-place"'
        )
    if spec.dtype != "float32":
        raise SpecError(
            f"{given} with dtype = {spec.dtype!r}: the scales of a cache of integers are float32; "
            "leave dtype out"
        )
    if spec.kv_latent_dim:
        raise SpecError(
            f"{given} with kv_latent_dim = {spec.kv_latent_dim}: a cache of latents stays in "
            "floating point; leave kv_dtype out"
        )
