"""Fields of a spec: type, default, range, choices and meaning.

They are defined only here: the checks in `rules`, the options of the command line and the table in
docs/spec.md are generated from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

DERIVED: Final = -1
"""The value of an integer field that is derived from other dimensions."""

NO_MASK: Final = "none"

SEED, OF_DATA, OF_FILE = "seed", "data", "file"
"""The values of `kv_scales_from`."""

NUMBERS: Final = "tuple[float, ...]"
"""The type of a field that is a list of numbers."""

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
        is_option: Whether the command line has an option for the field.
    """

    meaning: str
    usual: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    is_option: bool = True


VARIANTS: Final = ("mha", "mqa", "gqa", "mla")

USUAL: Final[Mapping[str, Any]] = {
    "embed_dim": 512, "num_heads": 8, "causal": True, "attn_mask": "bool[B,1,1,S]",
    "cache": "append",
}  # fmt: skip
"""Values of fields that all variants have by default."""

KEY: Final = "field"
"""The key of the description in the metadata of a dataclass's field."""


def _field(meaning: str, *default: Any, **attributes: Any) -> Any:
    """Return a dataclass field with a description; `attributes` are those of `Field`."""
    metadata = {KEY: Field(meaning=meaning, **attributes)}
    if default:
        return dataclasses.field(default=default[0], metadata=metadata)
    return dataclasses.field(metadata=metadata)


def _size(meaning: str, *default: Any, usual: str = "") -> Any:
    """Return a field for a dimension."""
    return _field(meaning, *default, usual=usual, least=1, most=LARGEST)


def _factor(
    meaning: str, default: float | None, usual: str = "", *, least: float = 1e-6, most: float = 1e6
) -> Any:
    """Return a field for a positive number."""
    return _field(meaning, default, usual=usual, least=least, most=most)


def _count(meaning: str, default: int | None, usual: str = "") -> Any:
    """Return a field for an integer that is at least 0."""
    return _field(meaning, default, usual=usual, least=0, most=2**31 - 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFields:
    """Fields of an attention layer: dimensions, heads, mask, cache; see docs/spec.md."""

    embed_dim: int = _size("E, the width of query and output")
    num_heads: int = _size("H, the number of query heads")
    num_kv_heads: int = _size(
        "Hkv, the number of key/value heads, which divides H: H for MHA, 1 for MQA and MLA, "
        "else GQA",
        DERIVED, usual="H",
    )  # fmt: skip
    head_dim: int = _size("D, the width of a query or key head", DERIVED, usual="E / H")
    v_head_dim: int = _size("Dv, the width of a value head", DERIVED, usual="D")
    # DeepSeek-AI 2024 (DeepSeek-V2), sec. 2.1.
    kv_latent_dim: int = _field(
        "C, the width of the latent that keys and values of all heads are made from (MLA); the "
        "cache holds it as past_value, and the rotated R elements of the one key as past_key; 0 "
        "for none",
        0, least=0, most=LARGEST,
    )  # fmt: skip
    q_latent_dim: int = _field(
        "the width of the latent that queries are made from, in MLA; 0 for none",
        0, least=0, most=LARGEST,
    )  # fmt: skip
    cross: bool = _field("key and value are inputs of their own", False)
    kdim: int = _size("the width of key, in cross-attention", DERIVED, usual="E")
    vdim: int = _size("the width of value, in cross-attention", DERIVED, usual="kdim")
    packed_qkv: bool = _field("one projection, qkv_proj, makes queries, keys and values", False)
    bias: str = _field("the projections with a bias: all, none, or some as in q,k,v,out", "all")
    # Vaswani et al. 2017, eq. 1.
    scale: float | None = _factor(
        "the factor on the scores", None, "1 / sqrt(D)", least=1 / HUGE, most=HUGE
    )
    causal: bool = _field("query i sees keys up to P + i only", False)
    attn_mask: str = _field(
        "the dtype and shape of the mask, as in bool[B,1,1,S], float[B,H,L,S], bool[L,S], or none",
        NO_MASK,
    )
    cache: str = _field(
        "the KV cache; append: past_* in, present_* = past + new out; in-place: past_* are buffers "
        "of one capacity, past_length says how many keys each batch element holds, and new keys "
        "are written after those (keys beyond are never seen, but must be finite)",
        "none", choices=("none", "append", "in-place"),
    )  # fmt: skip
    attn_weights: bool = _field("the softmax weights [B, H, L, S] are an output", False)
    qk_norm: str = _field(
        "the normalisation of every query and key head, with learned weights (rms: Qwen3, Gemma 3)",
        "none", choices=("none", "rms", "layer"),
    )  # fmt: skip
    norm_eps: float = _factor(
        "the addition to the variance in qk_norm", 1e-6, least=1 / HUGE, most=HUGE
    )
    # Su et al. 2021.
    rotary: str = _field(
        "rotary positions: pairs are i and i + R/2 (half, as in Llama) or 2i and 2i + 1 "
        "(interleaved, as in GPT-J)",
        "none", choices=("none", "half", "interleaved"),
    )  # fmt: skip
    rotary_dim: int = _field(
        "R, the number of leading elements of a head that are rotated", DERIVED, usual="D"
    )
    rotary_theta: float = _factor("the base of the wavelengths", 10000.0, least=1.001, most=HUGE)
    rotary_scaling: str = _field(
        "the way to stretch the context; dynamic (NTK) and longrope go by the longest "
        "sequence of a batch",
        "none", choices=("none", "linear", "dynamic", "llama3", "yarn", "longrope"),
    )  # fmt: skip
    rotary_factor: float = _factor("the factor by which the context is stretched", 1.0, least=1.0)
    rotary_original_len: int = _field("the context of the training", 8192, least=1, most=2**31)
    rotary_low_freq: float = _factor(
        "in llama3, pairs that turn less often than this in it are stretched", 1.0
    )
    rotary_high_freq: float = _factor(
        "in llama3, pairs that turn more often than this in it are left alone", 4.0
    )
    rotary_beta_fast: float = _factor("the number of turns at which yarn's ramp begins", 32.0)
    rotary_beta_slow: float = _factor("the number of turns at which yarn's ramp ends", 1.0)
    rotary_truncate: bool = _field(
        "yarn's ramp begins and ends at whole pairs (not in gpt-oss)", True
    )
    rotary_magnitude: float | None = _factor(
        "yarn's and longrope's factor on rotated queries and keys", None,
        "0.1 ln(factor) + 1 in yarn, sqrt(1 + ln(factor) / ln(rotary_original_len)) in longrope",
    )  # fmt: skip
    # Ding et al. 2024.
    rotary_short_factors: tuple[float, ...] | None = _field(
        "longrope's R / 2 divisors of the frequencies, up to rotary_original_len keys",
        None, usual="none", is_option=False,
    )  # fmt: skip
    rotary_long_factors: tuple[float, ...] | None = _field(
        "longrope's R / 2 divisors of the frequencies, beyond rotary_original_len keys",
        None, usual="none", is_option=False,
    )  # fmt: skip
    position_ids: bool = _field(
        "the positions of the queries are an input [B, L], as for left padding; else they follow "
        "the past",
        False,
    )
    window_left: int | None = _count(
        "the number of keys that a query sees before its own (Mistral's sliding_window - 1)",
        None, "all",
    )  # fmt: skip
    window_right: int | None = _count(
        "the number of keys that a query sees after its own", None, "all"
    )
    softcap: float | None = _factor(
        "scores become softcap * tanh(score / softcap) before the mask (Gemma 2)",
        None, "none", least=1 / HUGE, most=HUGE,
    )  # fmt: skip
    # Press et al. 2022.
    alibi: bool = _field("scores lose slope * distance, with one slope for each head", False)
    alibi_falcon: bool = _field(
        "alibi as in Falcon: scores gain slope * position of the key, rounded to bfloat16, times "
        "the scale",
        False,
    )
    relative_buckets: int = _count("the buckets of T5's learned relative bias; 0 for none", 0)
    relative_max_distance: int = _size("the distance from which on all share the last bucket", 128)
    add_bias_kv: bool = _field(
        "a learned key and value after all others, visible to every query, as in "
        "nn.MultiheadAttention",
        False,
    )
    add_zero_attn: bool = _field(
        "a key and value of 0 after all others, visible to every query, likewise", False
    )
    sinks: bool = _field(
        "a learned score for each head that takes part in the softmax and stands for no key "
        "(gpt-oss)",
        False,
    )
    dropout: float = _field(
        "the probability on the weights, in training only", 0.0, is_option=False
    )
    dtype: str = _field(
        "the type of weights, inputs and outputs",
        "float32", choices=("float32", "float16", "bfloat16"),
    )  # fmt: skip
    weights_dtype: str = _field(
        "the integers that hold the weights of projections: int8, int4, or by projection as in "
        "q,k,v=int4 out=int8",
        "none",
    )
    block_size: int = _field(
        "the number of inputs that share a scale (16, 32, 64 or 128); 0: all inputs of an output",
        DERIVED, usual="32 with int4, else 0", least=0, most=128,
    )  # fmt: skip
    scheme: str = _field(
        "the zero of quantised weights: at 0, or stored for each scale (asymmetric)",
        "symmetric", choices=("symmetric", "asymmetric"),
    )  # fmt: skip
    activations: str = _field(
        "the inputs of projections as 8 bits, by scales that each run finds: one for all tokens, "
        "with int8 weights of one scale for each output, or one for each block of a token, with "
        "int4 weights in the same blocks",
        "none", choices=("none", "dynamic-int8", "dynamic-int8-per-block"),
    )  # fmt: skip
    kv_dtype: str = _field(
        "the type of keys and values in a cache written in place: integers, or float16 beside a "
        "layer in float32",
        "none", choices=("none", "int8", "int4", "float16"),
    )  # fmt: skip
    kv_scale: str = _field(
        "the scales of a cache of integers: one for all keys and one for all values; one for each "
        "channel of each head; or, with int4, one and a zero point for each block of up to 32 "
        "channels of each token, found as it is written",
        "per-tensor", choices=("per-tensor", "per-channel", "per-block"),
    )  # fmt: skip
    kv_scales_from: str = _field(
        "the origin of these scales: random tokens of a seed, hidden states (`--calibrate`), or a "
        "file of scales (`--kv-scales`)",
        SEED, choices=(SEED, OF_DATA, OF_FILE), is_option=False,
    )  # fmt: skip


FIELDS: Final[dict[str, Field]] = {
    field.name: field.metadata[KEY] for field in dataclasses.fields(AttentionFields)
}
"""The description of every field, by its name."""

TYPES: Final[dict[str, str]] = {
    field.name: str(field.type).removesuffix(" | None")
    for field in dataclasses.fields(AttentionFields)
}
"""The type of every field, by name: ``"int"``, ``"float"``, ``"bool"``, ``"str"`` or `NUMBERS`."""


def default_text(name: str) -> str:
    """Return the default of a field as text, "" if it has none."""
    field = next(field for field in dataclasses.fields(AttentionFields) if field.name == name)
    if FIELDS[name].usual:
        return FIELDS[name].usual
    if field.default is dataclasses.MISSING:
        return ""
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return str(field.default).lower()
