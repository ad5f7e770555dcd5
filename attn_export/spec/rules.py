"""Rules of a spec: each is a function that raises an error with the rule and the values."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Final, Self

from attn_export.errors import SpecError, nearest
from attn_export.spec.fields import (
    DEFAULTS,
    DERIVED,
    FIELDS,
    LINEAR,
    NO_MASK,
    NUMBERS,
    TYPES,
    AttentionFields,
)

DTYPES: Final = FIELDS["dtype"].choices
PROJECTIONS: Final = ("q", "k", "v", "out")
ROTARY_SCALINGS: Final = FIELDS["rotary_scaling"].choices

LONGEST: Final = 120
"""The largest number of characters of a value in a message."""


def check_types(spec: AttentionFields) -> None:
    """Check that every field has its declared type."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        # bool is an int to Python, but num_heads = true is a fault.
        is_type = {
            "int": isinstance(value, int) and not isinstance(value, bool),
            "bool": isinstance(value, bool),
            "str": isinstance(value, str),
            "float": is_number(value),
            NUMBERS: isinstance(value, (list, tuple)) and all(map(is_number, value)),
        }
        if value is None and field.default is None:
            continue
        declared = TYPES[field.name]
        if not is_type[declared]:
            declared = "list of numbers" if declared == NUMBERS else declared
            shown = repr(value)
            shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…"
            raise SpecError(f"{field.name} must be of type {declared}; got {shown}")


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float, but no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_float(name: str, value: float) -> float:
    """Return a whole number as float for a float field, such as ``scale = 1``."""
    try:
        return float(value)
    except OverflowError as error:
        raise SpecError(f"{name} is too large: {str(value)[:20]}…") from error


def derive_fields(spec: AttentionFields) -> None:
    """Set fields to the types and the text in which they are kept, and derive dimensions."""

    def default(name: str, value: int) -> None:
        if getattr(spec, name) == DERIVED:
            object.__setattr__(spec, name, value)

    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if str(field.type).startswith("float") and isinstance(value, int):
            object.__setattr__(spec, field.name, _as_float(field.name, value))
        elif isinstance(value, (list, tuple)):
            numbers = tuple(_as_float(field.name, number) for number in value)
            object.__setattr__(spec, field.name, numbers)
    _heads_divide_width(spec)
    if spec.kind == LINEAR:
        object.__setattr__(spec, "causal", True)
    default("num_kv_heads", 1 if spec.kv_latent_dim else spec.num_heads)
    default("head_dim", spec.embed_dim // spec.num_heads)
    default("v_head_dim", spec.head_dim)
    default("rotary_dim", spec.head_dim)
    default("kdim", spec.embed_dim)
    default("vdim", spec.kdim)
    if spec.attn_mask != NO_MASK:
        object.__setattr__(spec, "attn_mask", str(MaskSpec.parse(spec.attn_mask)))


def _heads_divide_width(spec: AttentionFields) -> None:
    """Check that H is at least 1, and divides E unless D is given."""
    if spec.num_heads < 1:
        raise SpecError(f"num_heads must be at least 1; got {spec.num_heads}")
    if spec.head_dim == DERIVED and spec.embed_dim % spec.num_heads:
        raise SpecError(
            f"embed_dim {spec.embed_dim} does not divide by num_heads {spec.num_heads}; "
            "change one of them or set head_dim"
        )


def ranges(spec: AttentionFields) -> None:
    """Check that the value of every field is one of its choices or in its range."""
    for name, field in FIELDS.items():
        value = getattr(spec, name)
        if field.choices and value not in field.choices:
            near = nearest(str(value), field.choices)
            got = f"{value!r}{near and '; ' + near}"
            raise SpecError(f"{name} must be one of {', '.join(field.choices)}; got {got}")
        if field.least is None or field.most is None or value is None:
            continue
        if not field.least <= value <= field.most:  # so that NaN is an error
            if TYPES[name] == "float":
                wanted = f"positive and finite ({field.least:g} to {field.most:g})"
            else:
                wanted = f"at least {field.least} and at most {field.most}"
            raise SpecError(f"{name} must be {wanted}; got {value}")
    if not 0 <= spec.dropout < 1:
        raise SpecError(f"dropout must be at least 0 and less than 1; got {spec.dropout}")


def _is_set(spec: AttentionFields, name: str) -> bool:
    """Return whether a field has another value than its default."""
    return bool(getattr(spec, name) != DEFAULTS[name])


def unmet(spec: AttentionFields, needed: Mapping[str, tuple[object, ...]]) -> str:
    """Return the first field that is not as another needs it, or ""."""
    return next(
        (
            name for name, values in needed.items()
            if (getattr(spec, name) not in values if values else not _is_set(spec, name))
        ),
        "",
    )  # fmt: skip


def _kv_heads_divide_heads(spec: AttentionFields) -> None:
    """Check that Hkv divides H."""
    if spec.num_heads % spec.num_kv_heads:
        raise SpecError(
            f"num_heads {spec.num_heads} does not divide by num_kv_heads {spec.num_kv_heads}; "
            f"choose one of {', '.join(map(str, divisors(spec.num_heads)))}"
        )


def combinations(spec: AttentionFields) -> None:
    """Check that each field that is set has the fields that it needs, and none that it excludes."""

    def shown(name: str) -> str:
        value = getattr(spec, name)
        return f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"

    for name, field in FIELDS.items():
        if not _is_set(spec, name):
            continue
        if missing := unmet(spec, field.needs):
            values = field.needs[missing]
            advice = f"set {missing} = {json.dumps(values[0])}" if values else f"set {missing} too"
            raise SpecError(f"{shown(name)} with {shown(missing)}; {advice}")
        for other, why in field.excludes.items():
            if _is_set(spec, other):
                raise SpecError(f"{shown(name)} with {shown(other)}: {why}")


def _states(spec: AttentionFields) -> None:
    """Check that linear attention has a state as its cache, or none, and softmax has no state."""
    wanted = ("none", "state") if spec.kind == LINEAR else ("none", "append", "in-place")
    if spec.cache not in wanted:
        raise SpecError(
            f"cache = {spec.cache!r} with kind = {spec.kind!r}; set cache to {' or '.join(wanted)}"
        )
    if spec.conv_width == 1:
        raise SpecError("conv_width = 1 sees no other token; set it to at least 2, or 0 for none")


def positions(spec: AttentionFields) -> None:
    """Check the fields on positions: rotary, windows, relative bias, and widths that follow."""
    if not spec.cross and (spec.kdim, spec.vdim) != (spec.embed_dim, spec.embed_dim):
        raise SpecError(
            f"kdim {spec.kdim} and vdim {spec.vdim} differ from embed_dim {spec.embed_dim}, "
            "which only cross-attention can have; set cross = true"
        )
    if spec.rotary != "none" and (spec.rotary_dim % 2 or not 2 <= spec.rotary_dim <= spec.head_dim):
        raise SpecError(
            f"rotary_dim {spec.rotary_dim} must be even and at most head_dim {spec.head_dim}"
        )
    rotary_scaling(spec)
    longrope(spec)
    if spec.relative_buckets and spec.relative_buckets < 4:
        raise SpecError(f"relative_buckets must be 0 or at least 4; got {spec.relative_buckets}")
    if spec.relative_buckets and spec.relative_max_distance <= spec.relative_buckets:
        raise SpecError(
            f"relative_max_distance {spec.relative_max_distance} must be more than "
            f"relative_buckets {spec.relative_buckets}"
        )


def rotary_scaling(spec: AttentionFields) -> None:
    """Check the fields of rotary scaling, and `position_ids`."""
    for low, high, scaling in (
        ("rotary_low_freq", "rotary_high_freq", "llama3"),
        ("rotary_beta_slow", "rotary_beta_fast", "yarn"),
    ):
        if spec.rotary_scaling == scaling and getattr(spec, low) >= getattr(spec, high):
            raise SpecError(
                f"{low} {getattr(spec, low)} must be less than {high} {getattr(spec, high)}"
            )
    only_itself = spec.window_left == 0 and (spec.causal or spec.window_right == 0)
    if spec.position_ids and only_itself:
        raise SpecError(
            "position_ids = true with window_left = 0, where a query sees its own key only and "
            "positions change nothing; leave position_ids out"
        )
    if spec.rotary_scaling == "dynamic" and spec.rotary_dim < 4:
        raise SpecError(
            f"rotary_dim {spec.rotary_dim} with rotary_scaling = 'dynamic', which needs at least 4"
        )


def longrope(spec: AttentionFields) -> None:
    """Check that LongRoPE has a divisor for each pair, for short and for long sequences."""
    if spec.rotary_scaling != "longrope":
        return
    pairs = spec.rotary_dim // 2
    for name in ("rotary_short_factors", "rotary_long_factors"):
        factors = getattr(spec, name) or ()
        if len(factors) != pairs:
            raise SpecError(
                f"{name} has {len(factors)} numbers with rotary_scaling = 'longrope'; it needs "
                f"rotary_dim / 2 = {pairs}"
            )
        wrong = [factor for factor in factors if not 1e-6 <= factor <= 1e6]
        if wrong:
            raise SpecError(f"{name} must be positive and finite (1e-06 to 1e+06); got {wrong[0]}")
    if spec.rotary_original_len < 2:
        raise SpecError(
            f"rotary_original_len {spec.rotary_original_len} with rotary_scaling = 'longrope', "
            "which needs at least 2"
        )


def packing(spec: AttentionFields) -> None:
    """Check that q, k and v of a packed projection all have a bias or none."""
    if not spec.packed_qkv:
        return
    with_bias = [name for name in "qkv" if spec.bias == "all" or name in spec.bias.split(",")]
    if with_bias not in ([], ["q", "k", "v"]):
        raise SpecError(
            f"packed_qkv = true with bias = {spec.bias!r}: the one projection has a bias for q, k "
            'and v or none; set bias to "all", "none", "out" or "q,k,v"'
        )


def latent(spec: AttentionFields) -> None:
    """Check the fields that multi-head latent attention requires."""
    if not spec.kv_latent_dim:
        return
    field = f"kv_latent_dim = {spec.kv_latent_dim}"
    if spec.rotary == "none" or spec.rotary_dim >= spec.head_dim:
        raise SpecError(
            f"rotary = {spec.rotary!r} and rotary_dim {spec.rotary_dim} with {field}: some of the "
            f"head_dim {spec.head_dim} elements of a query are rotated, and some are not; set both"
        )
    if spec.num_kv_heads != 1:
        raise SpecError(
            f"num_kv_heads {spec.num_kv_heads} with {field}: all heads share the latent; leave "
            "num_kv_heads out"
        )
    if spec.bias not in ("none", "all") or (spec.bias == "all" and not spec.q_latent_dim):
        raise SpecError(
            f"bias = {spec.bias!r} with {field}: the projections to both latents and the output "
            'have a bias, or none has; set bias = "none", or q_latent_dim and bias = "all"'
        )


def parse_bias(bias: object) -> str:
    """Return the canonical text of a set of projections: ``"all"``, ``"none"`` or ``"q,v"``."""
    if isinstance(bias, bool):
        return "all" if bias else "none"
    words = list(bias) if isinstance(bias, (list, tuple)) else str(bias).split(",")
    names = [str(word).strip() for word in words]
    if names in (["all"], ["none"]):
        return names[0]
    unknown = [name for name in names if name not in PROJECTIONS]
    if unknown or not isinstance(bias, (str, list, tuple)):
        raise SpecError(f'bias is "all", "none" or some of q, k, v, out; got {bias!r}')
    in_order = [name for name in PROJECTIONS if name in names]
    return {0: "none", len(PROJECTIONS): "all"}.get(len(in_order), ",".join(in_order))


RULES: Final[tuple[Callable[[AttentionFields], None], ...]] = (
    ranges, _kv_heads_divide_heads, combinations, _states, positions, packing, latent,
)  # fmt: skip
"""The rules that are checked last, in order. `check_types` and `derive_fields` run before, and
`positions` calls `rotary_scaling` and `longrope`."""


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


# -- the mask -----------------------------------------------------------------------------------

_MASK_AXES: Final = ("B", "H", "L", "S")


@dataclasses.dataclass(frozen=True, slots=True)
class MaskSpec:
    """The type and shape of `attn_mask`, as written in a spec: ``bool[B,1,1,S]``.

    Attributes:
        dtype: ``"bool"`` (True = may attend) or ``"float"`` (added to the scores).
        axes: Two to four of ``"B"``, ``"H"``, ``"L"``, ``"S"`` or ``"1"``,
            right-aligned to `[B, H, L, S]`, the last one always ``"S"``.
    """

    dtype: str
    axes: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text such as ``"bool[B,1,1,S]"``."""
        match = re.fullmatch(r"(bool|float)\[([\w,\s]+)\]", text.strip())
        axes = tuple(a.strip() for a in match[2].split(",")) if match else ()
        rule = 'attn_mask is "none" or a dtype and a shape such as "bool[B,1,1,S]" or "float[L,S]"'
        if not match or not 2 <= len(axes) <= 4:
            raise SpecError(f"{rule}; got {text!r}")
        if axes[-1] != "S":
            raise SpecError(f"the last axis of attn_mask is S (key length); got {text!r}")
        for axis, allowed in zip(axes, _MASK_AXES[-len(axes) :], strict=True):
            if axis not in (allowed, "1") or (axis == "1" and allowed == "S"):
                raise SpecError(
                    f"attn_mask is right-aligned to [B,H,L,S], so its axis {axis!r} must be "
                    f"{allowed!r} or '1'; got {text!r}"
                )
        return cls(match[1], axes)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(self.axes)}]"
