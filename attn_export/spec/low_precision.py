"""Rules and constants of a spec on low precision: types of weights, activations and the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attn_export.errors import SpecError
from attn_export.spec.fields import SEED, AttentionFields
from attn_export.spec.inputs import Input, Shape

PROJECTIONS: Final = ("q", "k", "v", "out")
_WEIGHTS_DTYPES: Final = ("int8", "int4")
_BLOCK_SIZES: Final = (0, 16, 32, 64, 128)

PER_RUN: Final = "dynamic-int8"
PER_BLOCK: Final = "dynamic-int8-per-block"
"""Values of `activations`: one scale for all tokens of a run, or one for each block of a token."""


def _require_fields(spec: AttentionFields, values: Mapping[str, Any], problem: str) -> None:
    """Check that fields have the only values that another field allows."""
    for name, required in values.items():
        if getattr(spec, name) != required:
            raise SpecError(f"{name} = {getattr(spec, name)!r} {problem}")


def quantisation(spec: AttentionFields) -> None:
    """Check that blocks divide the inputs of quantised projections, and that types match."""
    dtypes = by_projection(spec.weights_dtype)
    if not dtypes:
        problem = 'with weights_dtype = \'none\'; set weights_dtype = "int8" or "int4"'
        _require_fields(spec, {"block_size": 0, "scheme": "symmetric"}, problem)
        return
    if spec.dtype != "float32":
        raise SpecError(
            f"weights_dtype = {spec.weights_dtype!r} with dtype = {spec.dtype!r}: quantised "
            "weights are dequantised to float32; leave dtype out"
        )
    if spec.packed_qkv and len({dtypes.get(name) for name in "qkv"}) > 1:
        raise SpecError(
            f"packed_qkv = true with weights_dtype = {spec.weights_dtype!r}: the one projection "
            "has one type for q, k and v; give them the same"
        )
    if spec.block_size not in _BLOCK_SIZES:
        raise SpecError(f"block_size must be one of 0, 16, 32, 64, 128; got {spec.block_size}")
    inputs = (spec.embed_dim, spec.kdim, spec.vdim, spec.num_heads * spec.v_head_dim)
    for name, width in zip(PROJECTIONS, inputs, strict=True):
        if name in dtypes and spec.block_size and width % spec.block_size:
            raise SpecError(
                f"block_size {spec.block_size} does not divide the {width} inputs of projection "
                f"{name}; set block_size = 0 for one scale per output, or one that divides"
            )


def quantised_activations(spec: AttentionFields) -> None:
    """Check that the weights of all projections are compatible with quantised activations.

    The weights must be int8 with one scale for each output, or int4 with the blocks of the
    activations.
    """
    if spec.activations == "none":
        return
    field = f"activations = {spec.activations!r}"
    needed = "int4" if spec.activations == PER_BLOCK else "int8"
    if set(map(by_projection(spec.weights_dtype).get, PROJECTIONS)) != {needed}:
        raise SpecError(
            f"{field} with weights_dtype = {spec.weights_dtype!r}: products of integers have "
            f'{needed} weights in all projections; set weights_dtype = "{needed}"'
        )
    if spec.activations == PER_BLOCK:
        if not spec.block_size:
            raise SpecError(
                f"block_size = 0 with {field}: activations have the blocks of weights; set "
                "block_size to 16, 32, 64 or 128"
            )
        return
    for name, required in (("block_size", 0), ("scheme", "symmetric")):
        if getattr(spec, name) != required:
            raise SpecError(
                f"{name} = {getattr(spec, name)!r} with {field}, which takes {required!r} only; "
                f"leave {name} out"
            )


def parse_weights_dtype(text: object) -> str:
    """Return the canonical text of `weights_dtype`: ``"int4"`` or ``"q,k,v=int4 out=int8"``."""
    rule = (
        'weights_dtype is "none", "int8", "int4" or some of q, k, v, out with each, as in '
        '"q,k,v=int4 out=int8"'
    )
    words = str(text).split()
    if words == ["none"]:
        return "none"
    if len(words) == 1 and words[0] in _WEIGHTS_DTYPES:
        return words[0]
    dtypes: dict[str, str] = {}
    for word in words:
        names, _, dtype = word.partition("=")
        for name in names.split(","):
            name = "out" if name == "o" else name
            if name not in PROJECTIONS or name in dtypes or dtype not in _WEIGHTS_DTYPES:
                raise SpecError(f"{rule}; got {str(text)[:60]!r}")
            dtypes[name] = dtype
    if not dtypes or not isinstance(text, str):
        raise SpecError(f"{rule}; got {str(text)[:60]!r}")
    if set(dtypes) == set(PROJECTIONS) and len(set(dtypes.values())) == 1:
        return dtypes["q"]
    groups = {
        dtype: [name for name in PROJECTIONS if dtypes.get(name) == dtype]
        for dtype in dict.fromkeys(dtypes[name] for name in PROJECTIONS if name in dtypes)
    }
    return " ".join(f"{','.join(names)}={dtype}" for dtype, names in groups.items())


def by_projection(weights_dtype: str) -> dict[str, str]:
    """Return the integer type of each quantised projection, from a canonical `weights_dtype`."""
    if weights_dtype == "none":
        return {}
    if "=" not in weights_dtype:
        return dict.fromkeys(PROJECTIONS, weights_dtype)
    pairs = (word.split("=") for word in weights_dtype.split())
    return {name: dtype for names, dtype in pairs for name in names.split(",")}


POSITIONS: Final = 4095
"""The largest position id in test cases."""

KV_RANGES: Final = {"int8": (-128, 127), "int4": (-8, 7)}
"""The least and the largest integer of a cache, by `kv_dtype`."""

FLOAT16: Final = "float16"
"""The `kv_dtype` of a cache in float16, which has no scales."""

_KV_STORED: Final[Mapping[str, tuple[str, int, int]]] = {
    "int8": ("int8", -128, 127), "int4": ("uint8", 0, 255), FLOAT16: (FLOAT16, 0, 0),
}  # fmt: skip
"""The element type of a cache, and its least and largest integer (0 for float16), by `kv_dtype`."""

_NO_SCALES: Final[Mapping[str, Any]] = {"kv_scale": "per-tensor", "kv_scales_from": SEED}
"""The values of the fields on scales if the cache holds no integers."""

FLOAT_CACHE: Final[Mapping[str, Any]] = {"kv_dtype": "none", **_NO_SCALES}
"""The values of the fields on the cache if it has the type of the layer."""

IN_A_BYTE: Final = {"int4": 2}
"""The number of integers in a byte of a cache, by `kv_dtype`, if there are several."""

BY_BLOCK: Final = "per-block"
"""The `kv_scale` with scales and zero points for each token, which the cache holds."""

BLOCK, LEAST_BLOCK = 32, 16
"""The largest number of channels in a block, and the least one for heads that are wider."""

LEAST_ZERO, LARGEST_ZERO, LARGEST_NIBBLE = -128, 127, 15
"""The least and the largest zero point of a block, and the largest integer; a byte holds a zero
point minus the least."""

DRAWN_SCALES, DRAWN_ZEROS = (160, 178), (116, 124)
"""The ranges of the bytes of scales and zero points of a random past: scales are 1/16 to 1/3."""


def block_width(width: int) -> int:
    """Return the width of the blocks of a head: its largest divisor up to `BLOCK`."""
    return max(size for size in range(1, min(width, BLOCK) + 1) if width % size == 0)


def stored_width(spec: AttentionFields, width: int) -> int:
    """Return the number of elements of the cache for one head of a token."""
    channels = width // IN_A_BYTE.get(spec.kv_dtype, 1)
    # Each block has a byte for its scale and one for its zero point.
    return channels + (2 * (width // block_width(width)) if spec.kv_scale == BY_BLOCK else 0)


def inputs_of_own_type(spec: AttentionFields, shapes: Mapping[str, Shape]) -> dict[str, Input]:
    """Return the inputs whose type is not that of the layer, by name: caches and integers.

    `shapes`: The shapes of all inputs.
    """
    inputs: dict[str, Input] = {}
    if spec.kv_dtype != "none":
        dtype, low, high = _KV_STORED[spec.kv_dtype]
        for name, width in (("past_key", spec.head_dim), ("past_value", spec.v_head_dim)):
            inputs[name] = Input(shapes[name], dtype, low, high, columns=_columns(spec, width))
    if "past_length" in shapes:
        inputs["past_length"] = Input(shapes["past_length"], "int64", 0, "past_len")
    if spec.position_ids:
        # If frequencies change with the length, some cases are longer than that and some are not.
        by_length = spec.rotary_scaling in ("dynamic", "longrope")
        last = spec.rotary_original_len * 3 // 2 if by_length else POSITIONS
        inputs["position_ids"] = Input(shapes["position_ids"], "int64", 0, last)
    return inputs


def _columns(spec: AttentionFields, width: int) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges of the bytes of scales and zero points; empty if the cache has none."""
    if spec.kv_scale != BY_BLOCK:
        return ()
    count = width // block_width(width)
    return (width // 2, *DRAWN_SCALES), (width // 2 + count, *DRAWN_ZEROS)


def typed_cache(spec: AttentionFields) -> None:
    """Check that a cache with a type of its own is written in place, in a float32 layer."""
    field = f"kv_dtype = {spec.kv_dtype!r}"
    if spec.kv_dtype not in KV_RANGES:
        problem = f"with {field}; set kv_dtype to one of {', '.join(KV_RANGES)}"
        _require_fields(spec, _NO_SCALES, problem)
    if spec.kv_dtype == "none":
        return
    if spec.cache != "in-place":
        raise SpecError(
            f"{field} with cache = {spec.cache!r}: only a cache that is written in place has a "
            'type of its own; set cache = "in-place"'
        )
    if spec.dtype != "float32":
        raise SpecError(
            f"{field} with dtype = {spec.dtype!r}: only a layer in float32 has a cache of another "
            "type; leave dtype out"
        )
    if spec.kv_latent_dim:
        raise SpecError(
            f"{field} with kv_latent_dim = {spec.kv_latent_dim}: a cache of latents has the type "
            "of the layer; leave kv_dtype out"
        )
    if spec.kv_dtype == FLOAT16 and spec.activations != "none":
        raise SpecError(
            f"{field} with activations = {spec.activations!r}: which float16 number is right may "
            "depend on rounding, so no integer of the output would be certain; set kv_dtype to "
            f"none, {' or '.join(KV_RANGES)}"
        )
    for name in ("head_dim", "v_head_dim"):
        width = getattr(spec, name)
        if width % IN_A_BYTE.get(spec.kv_dtype, 1):
            raise SpecError(
                f"{field} with {name} = {width}: a byte holds two channels; make {name} even"
            )
    _check_blocks(spec)


def _check_blocks(spec: AttentionFields) -> None:
    """Check that scales by block come with int4, with valid blocks, and without given scales."""
    if spec.kv_scale != BY_BLOCK:
        return
    field = f"kv_scale = {BY_BLOCK!r}"
    for name in ("head_dim", "v_head_dim"):
        width = getattr(spec, name)
        if block_width(width) < min(width, LEAST_BLOCK):
            raise SpecError(
                f"{field} with {name} = {width}, which no block of {LEAST_BLOCK} to {BLOCK} "
                "channels divides; choose another kv_scale"
            )
    if spec.kv_dtype != "int4":
        raise SpecError(
            f"{field} with kv_dtype = {spec.kv_dtype!r}: blocks hold 4 bits; set kv_dtype = "
            '"int4", or choose another kv_scale'
        )
    if spec.kv_scales_from != SEED:
        raise SpecError(
            f"kv_scales_from = {spec.kv_scales_from!r} with {field}: each token has scales of its "
            "own; leave kv_scales_from out"
        )
