"""Types of the stored weights of projections: their text in a spec, and the rule for them."""

from __future__ import annotations

from typing import Final

from attn_export.errors import SpecError
from attn_export.spec.fields import AttentionFields

PROJECTIONS: Final = ("q", "k", "v", "out")
WEIGHTS_DTYPES: Final = ("int8", "int4")
BLOCK_SIZES: Final = (0, 16, 32, 64, 128)

PER_RUN: Final = "dynamic-int8"
PER_BLOCK: Final = "dynamic-int8-per-block"
"""Values of `activations`: one scale for all of a run, or one for each block of a token."""


def quantisation(spec: AttentionFields) -> None:
    """Check that blocks divide the inputs of quantised projections, and types go together."""
    dtypes = by_projection(spec.weights_dtype)
    if not dtypes:
        for name, unused in (("block_size", 0), ("scheme", "symmetric")):
            if getattr(spec, name) != unused:
                raise SpecError(
                    f"{name} = {getattr(spec, name)!r} with weights_dtype = 'none'; set "
                    'weights_dtype = "int8" or "int4"'
                )
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
    if spec.block_size not in BLOCK_SIZES:
        raise SpecError(f"block_size has to be one of 0, 16, 32, 64, 128; got {spec.block_size}")
    inputs = (spec.embed_dim, spec.kdim, spec.vdim, spec.num_heads * spec.v_head_dim)
    for name, width in zip(PROJECTIONS, inputs, strict=True):
        if name in dtypes and spec.block_size and width % spec.block_size:
            raise SpecError(
                f"block_size {spec.block_size} does not divide the {width} inputs of projection "
                f"{name}; set block_size = 0 for one scale per output, or one that divides"
            )


def quantised_activations(spec: AttentionFields) -> None:
    """Check that all projections have weights that go with quantised activations.

    They are int8 with one scale for each output, or int4 in the blocks of the activations.
    """
    if spec.activations == "none":
        return
    given = f"activations = {spec.activations!r}"
    needed = "int4" if spec.activations == PER_BLOCK else "int8"
    if set(map(by_projection(spec.weights_dtype).get, PROJECTIONS)) != {needed}:
        raise SpecError(
            f"{given} with weights_dtype = {spec.weights_dtype!r}: products of integers have "
            f'{needed} weights in all projections; set weights_dtype = "{needed}"'
        )
    if spec.activations == PER_BLOCK:
        if not spec.block_size:
            raise SpecError(
                f"block_size = 0 with {given}: activations have the blocks of weights; set "
                "block_size to 16, 32, 64 or 128"
            )
        return
    for name, wanted in (("block_size", 0), ("scheme", "symmetric")):
        if getattr(spec, name) != wanted:
            raise SpecError(
                f"{name} = {getattr(spec, name)!r} with {given}, which takes {wanted!r} only; "
                f"leave {name} out"
            )


def parse_weights_dtype(text: object) -> str:
    """Return the canonical text of `weights_dtype`: ``"int4"`` or ``"q,k,v=int4 out=int8"``."""
    wanted = (
        'weights_dtype is "none", "int8", "int4" or some of q, k, v, out with each, as in '
        '"q,k,v=int4 out=int8"'
    )
    words = str(text).split()
    if words == ["none"]:
        return "none"
    if len(words) == 1 and words[0] in WEIGHTS_DTYPES:
        return words[0]
    found: dict[str, str] = {}
    for word in words:
        names, _, dtype = word.partition("=")
        for name in names.split(","):
            name = "out" if name == "o" else name
            if name not in PROJECTIONS or name in found or dtype not in WEIGHTS_DTYPES:
                raise SpecError(f"{wanted}; got {str(text)[:60]!r}")
            found[name] = dtype
    if not found or not isinstance(text, str):
        raise SpecError(f"{wanted}; got {str(text)[:60]!r}")
    if set(found) == set(PROJECTIONS) and len(set(found.values())) == 1:
        return found["q"]
    groups = {
        dtype: [name for name in PROJECTIONS if found.get(name) == dtype]
        for dtype in dict.fromkeys(found[name] for name in PROJECTIONS if name in found)
    }
    return " ".join(f"{','.join(names)}={dtype}" for dtype, names in groups.items())


def by_projection(weights_dtype: str) -> dict[str, str]:
    """Return the type of the integers of each quantised projection, from a canonical text."""
    if weights_dtype == "none":
        return {}
    if "=" not in weights_dtype:
        return dict.fromkeys(PROJECTIONS, weights_dtype)
    pairs = (word.split("=") for word in weights_dtype.split())
    return {name: dtype for names, dtype in pairs for name in names.split(",")}
