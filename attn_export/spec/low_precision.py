"""Rules and constants of a spec on low precision: the types of weights, and of single inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attn_export.errors import SpecError
from attn_export.spec.fields import AttentionFields
from attn_export.spec.inputs import Input, Shape

PROJECTIONS: Final = ("q", "k", "v", "out")
_WEIGHTS_DTYPES: Final = ("int8", "int4")
_BLOCK_SIZES: Final = (0, 16, 32, 64, 128)


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

FLOAT16: Final = "float16"
"""The `kv_dtype` of a whole model whose caches are narrower than it."""


def inputs_of_own_type(spec: AttentionFields, shapes: Mapping[str, Shape]) -> dict[str, Input]:
    """Return the inputs of integers, by name.

    `shapes`: The shapes of all inputs.
    """
    inputs: dict[str, Input] = {}
    if "past_length" in shapes:
        inputs["past_length"] = Input(shapes["past_length"], "int64", 0, "past_len")
    if spec.position_ids:
        # If frequencies change with the length, some cases are longer than that and some are not.
        by_length = spec.rotary_scaling in ("dynamic", "longrope")
        last = spec.rotary_original_len * 3 // 2 if by_length else POSITIONS
        inputs["position_ids"] = Input(shapes["position_ids"], "int64", 0, last)
    return inputs
