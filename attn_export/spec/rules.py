"""What a spec has to obey: each rule is one function that names the rule and the values."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Final

from attn_export.errors import SpecError
from attn_export.spec.fields import DERIVED, AttentionFields

CACHES: Final = ("none", "append")
DTYPES: Final = ("float32",)


def check_types(spec: AttentionFields) -> None:
    """Every field has the type that it is declared with."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        # bool is an int to Python, but num_heads = true is a mistake.
        right = {
            "int": isinstance(value, int) and not isinstance(value, bool),
            "bool": isinstance(value, bool),
            "str": isinstance(value, str),
            "float": isinstance(value, (int, float)) and not isinstance(value, bool),
        }
        if value is None and field.default is None:
            continue
        wanted = str(field.type).removesuffix(" | None")
        if not right[wanted]:
            raise SpecError(f"{field.name} has to be of type {wanted}; got {value!r}")


def heads_divide_width(spec: AttentionFields) -> None:
    """H is at least 1, and divides E unless D is given."""
    if spec.num_heads < 1:
        raise SpecError(f"num_heads has to be at least 1; got {spec.num_heads}")
    if spec.head_dim == DERIVED and spec.embed_dim % spec.num_heads:
        raise SpecError(
            f"embed_dim {spec.embed_dim} does not divide by num_heads {spec.num_heads}; "
            "change one of them or set head_dim"
        )


def dimensions(spec: AttentionFields) -> None:
    """All dimensions are positive, and Hkv divides H."""
    for name in ("embed_dim", "num_kv_heads", "head_dim", "v_head_dim", "kdim", "vdim"):
        if getattr(spec, name) < 1:
            raise SpecError(f"{name} has to be at least 1; got {getattr(spec, name)}")
    if spec.num_heads % spec.num_kv_heads:
        raise SpecError(
            f"num_heads {spec.num_heads} does not divide by num_kv_heads {spec.num_kv_heads}; "
            f"choose one of {', '.join(map(str, divisors(spec.num_heads)))}"
        )


def choices(spec: AttentionFields) -> None:
    """Fields with a few values have one of them."""
    for name, allowed in (("cache", CACHES), ("dtype", DTYPES)):
        if getattr(spec, name) not in allowed:
            raise SpecError(
                f"{name} has to be one of {', '.join(allowed)}; got {getattr(spec, name)!r}"
            )


def numbers(spec: AttentionFields) -> None:
    """Factors and probabilities are in their ranges."""
    if spec.scale is not None and not 0 < spec.scale <= sys.float_info.max:
        raise SpecError(f"scale has to be positive and finite; got {spec.scale}")
    if not 0 <= spec.dropout < 1:
        raise SpecError(f"dropout has to be at least 0 and less than 1; got {spec.dropout}")


def cross_attention(spec: AttentionFields) -> None:
    """What only cross-attention has, and what it cannot have."""
    if not spec.cross and (spec.kdim, spec.vdim) != (spec.embed_dim, spec.embed_dim):
        raise SpecError(
            f"kdim {spec.kdim} and vdim {spec.vdim} differ from embed_dim {spec.embed_dim}, "
            "which only cross-attention can have; set cross = true"
        )
    if spec.cross and spec.causal:
        raise SpecError(
            "causal = true with cross = true: runtimes disagree on how a causal mask lines up "
            "when key and query differ in length; pass the mask as attn_mask instead"
        )
    if spec.cross and spec.cache != "none":
        raise SpecError(
            f"cache = {spec.cache!r} with cross = true: cross-attention has no keys to append; "
            'set cache = "none"'
        )


RULES: Final[tuple[Callable[[AttentionFields], None], ...]] = (
    dimensions, choices, numbers, cross_attention,
)  # fmt: skip
"""Checked in this order, after `check_types` and the derived values."""


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
