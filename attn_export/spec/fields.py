"""Fields of a spec: type, default, range, choices and meaning, and what each needs and excludes.

They are defined only here: the checks in `rules`, the options of the command line, the comparison
with config.json, the table in docs/spec.md and the tables of tests are generated from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

DERIVED: Final = -1
"""The value of an integer field that is derived from other dimensions."""

LARGEST: Final = 2**20
"""The largest dimension, of which tables still fit into memory."""
HUGE: Final = 1e30
"""The largest factor, and 1 / HUGE the smallest one, so that float32 does not overflow."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Description of one field.

    Attributes:
        meaning: A phrase for the help of the command line and for docs/spec.md.
        usual: The text of the default, if the default value is not clear by itself.
        least: The smallest value; None, as `most`, if there is no range.
        choices: The allowed values, if there are only a few; else empty.
        needs: Other fields that must have one of these values, or be set if there are none, for
            this field to be set: to be another than its default.
        acts_with: Likewise, for this field to have an effect. It may be set without.
        excludes: Other fields that must not be set if this one is, and why not.
        tries: Values with which tests try the field, if they are not all choices, or True.
        is_option: Whether the command line has an option for the field.
    """

    meaning: str
    usual: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    needs: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    acts_with: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    excludes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tries: tuple[object, ...] = ()
    is_option: bool = True


KEY: Final = "field"
"""The key of the description in the metadata of a dataclass's field."""


def field(meaning: str, *default: Any, **attributes: Any) -> Any:
    """Return a dataclass field with a description; `attributes` are those of `Field`."""
    metadata = {KEY: Field(meaning=meaning, **attributes)}
    if default:
        return dataclasses.field(default=default[0], metadata=metadata)
    return dataclasses.field(metadata=metadata)


def size(meaning: str, *default: Any, **attributes: Any) -> Any:
    """Return a field for a dimension."""
    return field(meaning, *default, least=1, most=LARGEST, **attributes)


def factor(meaning: str, *default: Any, **attributes: Any) -> Any:
    """Return a field for a positive number."""
    return field(meaning, *default, **{"least": 1e-6, "most": 1e6, **attributes})


def count(meaning: str, *default: Any, **attributes: Any) -> Any:
    """Return a field for an integer that is at least 0."""
    return field(meaning, *default, least=0, most=2**31 - 1, **attributes)


TURNED: Final = {"rotary": ("half", "interleaved")}
UNPLACED: Final = {
    "cross": "key and query of cross-attention have no common positions; leave it out"
}
LATENT: Final = {"kv_latent_dim": "multi-head latent attention excludes it; leave it out"}
OF_LINEAR: Final = {"kind": ("linear",)}
NOT_LINEAR: Final = dict.fromkeys(
    (
        "kv_latent_dim", "cross", "packed_qkv", "attn_mask", "attn_weights", "rotary",
        "window_left", "window_right", "softcap", "alibi", "relative_buckets", "add_bias_kv",
        "add_zero_attn", "sinks", "dropout", "weights_dtype",
    ),
    "linear attention has none; leave it out",
)  # fmt: skip
"""What several fields need or exclude."""


def scaled(*kinds: str) -> dict[str, tuple[str, ...]]:
    """Return the `acts_with` of a field of some `rotary_scaling`."""
    return {"rotary_scaling": kinds}


NO_MASK: Final = "none"

SOFTMAX, LINEAR = "softmax", "linear"
"""The values of `kind`."""

REMOVED: Final = {
    "activations": "none", "kv_dtype": "none", "kv_scale": "per-tensor", "kv_scales_from": "seed",
    "scheme": "symmetric", "block_size": 0,
}  # fmt: skip
"""The fields of earlier versions, each with its default, which specs that were written have."""

INT4_BLOCK: Final = 32
"""The inputs that share a scale of int4, which such specs have as `block_size`."""

NUMBERS: Final = "tuple[float, ...]"
"""The type of a field that is a list of numbers."""


# fmt: off
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFields:
    """Fields of an attention layer: dimensions, heads, mask, cache; see docs/spec.md."""

    embed_dim: int = size("E, the width of query and output")
    # Katharopoulos et al. 2020; with decays Yang et al. 2024a, with deltas Yang et al. 2024b.
    kind: str = field(
        "the kind of attention: softmax, or linear, in which each token changes a state "
        "[B, Hkv, D, Dv] and its queries read it",
        SOFTMAX, choices=(SOFTMAX, LINEAR), excludes=NOT_LINEAR,
    )
    update_rule: str = field(
        "the change of the state by a token: its key times its value is added (linear), after the "
        "state decays (gated), or less what the key finds (delta, gated_delta; lengths are then 1)",
        "gated_delta", choices=("linear", "gated", "delta", "gated_delta"),
        acts_with=OF_LINEAR,
    )
    conv_width: int = field(
        "the tokens, its own included, that a convolution with SiLU of queries, keys and values "
        "sees in linear attention, with past_conv as a further cache; 0 for none",
        0, least=0, most=64, needs=OF_LINEAR,
    )
    decay: str = field(
        "the decays of the state of a head: one, or one for each channel of the key",
        "head", choices=("head", "channel"),
        acts_with={"update_rule": ("gated_delta", "gated"), **OF_LINEAR},
    )
    shared_beta: bool = field(
        "all heads share the rate with which deltas are written", False,
        acts_with={"update_rule": ("gated_delta", "delta"), **OF_LINEAR},
    )
    num_heads: int = size("H, the number of query heads")
    num_kv_heads: int = size(
        "Hkv, the number of key/value heads, which divides H: H for MHA, 1 for MQA and MLA, "
        "else GQA",
        DERIVED, usual="H",
    )
    head_dim: int = size("D, the width of a query or key head", DERIVED, usual="E / H")
    v_head_dim: int = size("Dv, the width of a value head", DERIVED, usual="D")
    # DeepSeek-AI 2024 (DeepSeek-V2), sec. 2.1.
    kv_latent_dim: int = field(
        "C, the width of the latent that keys and values of all heads are made from (MLA); the "
        "cache holds it as past_value, and the rotated R elements of the one key as past_key; "
        "0 for none",
        0, least=0, most=LARGEST,
    )
    q_latent_dim: int = field(
        "the width of the latent that queries are made from, in MLA; 0 for none",
        0, least=0, most=LARGEST, needs={"kv_latent_dim": ()},
    )
    cross: bool = field(
        "key and value are inputs of their own", False, excludes=LATENT,
    )
    kdim: int = size("the width of key, in cross-attention", DERIVED, usual="E")
    vdim: int = size(
        "the width of value, in cross-attention", DERIVED, usual="kdim",
    )
    packed_qkv: bool = field(
        "one projection, qkv_proj, makes queries, keys and values",
        False,
        excludes={"cross": "key and query are different inputs; leave packed_qkv out", **LATENT},
    )
    bias: str = field("the projections with a bias: all, none, or some as in q,k,v,out", "all")
    # Vaswani et al. 2017, eq. 1.
    scale: float | None = factor(
        "the factor on the scores",
        None, usual="1 / sqrt(D)", least=1 / HUGE, most=HUGE, tries=(0.3,),
    )
    causal: bool = field(
        "query i sees keys up to P + i only",
        False,
        excludes={
            "cross": "runtimes disagree on how a causal mask lines up when key and query differ "
            "in length; pass the mask as attn_mask instead"
        },
    )
    attn_mask: str = field(
        "the dtype and shape of the mask, as in bool[B,1,1,S], float[B,H,L,S], bool[L,S], or "
        "none",
        NO_MASK,
    )
    cache: str = field(
        "the KV cache; append: past_* in, present_* = past + new out; in-place: past_* are "
        "buffers of one capacity, past_length says how many keys each batch element holds, and "
        "new keys are written after those (keys beyond are never seen, but must be finite); state: "
        "past_state in, present_state out, of linear attention",
        "none", choices=("none", "append", "in-place", "state"),
        excludes={"cross": 'cross-attention has no new keys; set cache = "none"'},
    )
    attn_weights: bool = field(
        "the softmax weights [B, H, L, S] are an output", False,
    )
    qk_norm: str = field(
        "the normalisation of every query and key head, with learned weights (rms: Qwen3, "
        "Gemma 3)",
        "none", choices=("none", "rms", "layer"), excludes=LATENT,
    )
    norm_eps: float = factor(
        "the addition to the variance in qk_norm",
        1e-6, least=1 / HUGE, most=HUGE, acts_with={"qk_norm": ("rms", "layer")}, tries=(1e-2,),
    )
    # Su et al. 2021.
    rotary: str = field(
        "rotary positions: pairs are i and i + R/2 (half, as in Llama) or 2i and 2i + 1 "
        "(interleaved, as in GPT-J)",
        "none", choices=("none", "half", "interleaved"), excludes=UNPLACED,
    )
    rotary_dim: int = field(
        "R, the number of leading elements of a head that are rotated",
        DERIVED, usual="D", acts_with=TURNED,
    )
    rotary_theta: float = factor(
        "the base of the wavelengths",
        10000.0, least=1.001, most=HUGE, acts_with=TURNED, tries=(100.0,),
    )
    rotary_scaling: str = field(
        "the way to stretch the context; dynamic (NTK) and longrope scale by the longest sequence "
        "of a batch",
        "none", choices=("none", "linear", "dynamic", "llama3", "yarn", "longrope"), needs=TURNED,
    )
    rotary_factor: float = factor(
        "the factor by which the context is stretched",
        1.0, least=1.0, acts_with=scaled("linear", "dynamic", "llama3", "yarn"), tries=(2.5,),
    )
    rotary_original_len: int = field(
        "the context of the training",
        8192, least=1, most=2**31, acts_with=scaled("dynamic", "llama3", "yarn", "longrope"),
        tries=(64,),
    )
    rotary_low_freq: float = factor(
        "in llama3, pairs that turn less often than this in it are stretched",
        1.0, acts_with=scaled("llama3"), tries=(2.0,),
    )
    rotary_high_freq: float = factor(
        "in llama3, pairs that turn more often than this in it are left alone",
        4.0, acts_with=scaled("llama3"), tries=(3.0,),
    )
    rotary_beta_fast: float = factor(
        "the number of turns at which yarn's ramp begins",
        32.0, acts_with=scaled("yarn"), tries=(8.0,),
    )
    rotary_beta_slow: float = factor(
        "the number of turns at which yarn's ramp ends",
        1.0, acts_with=scaled("yarn"), tries=(0.5,),
    )
    rotary_truncate: bool = field(
        "yarn's ramp begins and ends at whole pairs (not in gpt-oss)",
        True, acts_with=scaled("yarn"), tries=(False,),
    )
    rotary_magnitude: float | None = factor(
        "yarn's and longrope's factor on rotated queries and keys",
        None, usual="0.1 ln(factor) + 1 in yarn, sqrt(1 + ln(factor) / ln(rotary_original_len)) "
        "in longrope", acts_with=scaled("yarn", "longrope"),
    )
    # Ding et al. 2024.
    rotary_short_factors: tuple[float, ...] | None = field(
        "longrope's R / 2 divisors of the frequencies, up to rotary_original_len keys",
        None, usual="none", is_option=False, acts_with=scaled("longrope"),
    )
    rotary_long_factors: tuple[float, ...] | None = field(
        "longrope's R / 2 divisors of the frequencies, beyond rotary_original_len keys",
        None, usual="none", is_option=False, acts_with=scaled("longrope"),
    )
    position_ids: bool = field(
        "the positions of the queries are an input [B, L], as for left padding; else they "
        "follow the past",
        False, needs=TURNED,
    )
    window_left: int | None = count(
        "the number of keys that a query sees before its own (Mistral's sliding_window - 1)",
        None, usual="all", excludes=UNPLACED, tries=(2,),
    )
    window_right: int | None = count(
        "the number of keys that a query sees after its own",
        None, usual="all",
        excludes={"causal": "it hides those keys; leave window_right out", **UNPLACED}, tries=(1,),
    )
    softcap: float | None = factor(
        "scores become softcap * tanh(score / softcap) before the mask (Gemma 2)",
        None, usual="none", least=1 / HUGE, most=HUGE, tries=(0.8,),
    )
    # Press et al. 2022.
    alibi: bool = field(
        "scores lose slope * distance, with one slope for each head", False, excludes=UNPLACED,
    )
    alibi_falcon: bool = field(
        "alibi as in Falcon: scores gain slope * position of the key, rounded to bfloat16, "
        "times the scale",
        False, needs={"alibi": (True,)},
    )
    relative_buckets: int = count(
        "the buckets of T5's learned relative bias; 0 for none", 0, excludes=UNPLACED, tries=(4,),
    )
    relative_max_distance: int = size(
        "the distance from which on all share the last bucket",
        128, acts_with={"relative_buckets": ()}, tries=(6,),
    )
    add_bias_kv: bool = field(
        "a learned key and value after all others, visible to every query, as in "
        "nn.MultiheadAttention",
        False, excludes=LATENT,
    )
    add_zero_attn: bool = field(
        "a key and value of 0 after all others, visible to every query, likewise",
        False, excludes=LATENT,
    )
    sinks: bool = field(
        "a learned score for each head that takes part in the softmax and stands for no key "
        "(gpt-oss)",
        False,
    )
    dropout: float = field(
        "the probability on the weights, in training only", 0.0, is_option=False,
    )
    dtype: str = field(
        "the type of weights, inputs and outputs",
        "float32", choices=("float32", "float16", "bfloat16"),
    )
    weights_dtype: str = field(
        "the integers that hold the weights of projections",
        "none", choices=("none", "int8", "int4"), needs={"dtype": ("float32",)},
        excludes=LATENT,
    )
# fmt: on


FIELDS: Final[dict[str, Field]] = {
    each.name: each.metadata[KEY] for each in dataclasses.fields(AttentionFields)
}
"""The description of every field, by its name."""

TYPES: Final[dict[str, str]] = {
    each.name: str(each.type).removesuffix(" | None")
    for each in dataclasses.fields(AttentionFields)
}
"""The type of every field, by name: ``"int"``, ``"float"``, ``"bool"``, ``"str"`` or `NUMBERS`."""

DEFAULTS: Final[dict[str, Any]] = {
    each.name: each.default for each in dataclasses.fields(AttentionFields)
}
"""The default of every field, by name; `dataclasses.MISSING` if it has none."""


def default_text(name: str) -> str:
    """Return the default of a field as text, "" if it has none."""
    default = DEFAULTS[name]
    if FIELDS[name].usual or default is dataclasses.MISSING:
        return FIELDS[name].usual
    return f"{default:g}" if isinstance(default, float) else str(default).lower()
