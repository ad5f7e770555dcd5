"""Inputs of whole numbers, and the rule for caches of integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attn_export.errors import SpecError
from attn_export.spec.fields import SEED, AttentionFields
from attn_export.spec.inputs import Input, Shape

POSITIONS: Final = 4095
"""The largest of the position ids that are tried."""

KV_RANGES: Final = {"int8": (-128, 127), "int4": (-8, 7)}
"""The integers that a cache may hold, by `kv_dtype`."""

KV_STORED: Final = {"int8": ("int8", -128, 127), "int4": ("uint8", 0, 255)}
"""The type of the elements of such a cache, their least and their largest value."""

FLOAT_CACHE: Final[Mapping[str, Any]] = {
    "kv_dtype": "none",
    "kv_scale": "per-tensor",
    "kv_scales_from": SEED,
}
"""The fields of a cache that holds no integers."""

IN_A_BYTE: Final = {"int4": 2}
"""The number of integers of a cache in a byte, where it is more than one."""


def integer_inputs(spec: AttentionFields, shapes: Mapping[str, Shape]) -> dict[str, Input]:
    """Return the inputs of a spec that are whole numbers, by name.

    Args:
        spec: The spec.
        shapes: The shapes of all inputs.
    """
    found: dict[str, Input] = {}
    if spec.kv_dtype != "none":
        stored = KV_STORED[spec.kv_dtype]
        found |= {name: Input(shapes[name], *stored) for name in ("past_key", "past_value")}
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
        for name, usual in FLOAT_CACHE.items():
            if getattr(spec, name) != usual:
                raise SpecError(
                    f"{name} = {getattr(spec, name)!r} with kv_dtype = 'none'; set kv_dtype to one "
                    f"of {', '.join(KV_RANGES)}"
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
    for name in ("head_dim", "v_head_dim"):
        width = getattr(spec, name)
        if width % IN_A_BYTE.get(spec.kv_dtype, 1):
            raise SpecError(
                f"{given} with {name} = {width}: a byte holds two channels; make {name} even"
            )
