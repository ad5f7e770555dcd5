"""The families of models whose config.json is known: a row for each.

Keys and defaults are those of the `configuration_*.py` of Hugging Face's transformers: authors
leave out keys that have the default of their model's class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from attn_export.weights import config_features as features
from attn_export.weights.config import Pattern, Rule
from attn_export.weights.config_features import gemma3_rotary, neox_rotary, phi3_rotary, rotary


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Description of the attention of one `model_type`.

    Attributes:
        embed_dim: The keys of E, of which the first that is there counts.
        num_heads: The keys of H; ``{side}`` stands for encoder or decoder.
        num_kv_heads: The key of Hkv, "" if there is none.
        head_dim: The key of D, "" if there is none.
        rules: Further features of its attention.
        defaults: The class's defaults for missing keys.
        bias: The projections with biases, as in `AttentionSpec.bias`; None if a key says so.
        bias_key: That key. If it is missing, the tensors decide.
        slides: The layers with a window, None if all are alike.
    """

    embed_dim: tuple[str, ...] = ("hidden_size",)
    num_heads: tuple[str, ...] = ("num_attention_heads",)
    num_kv_heads: str = ""
    head_dim: str = ""
    rules: tuple[Rule, ...]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bias: str | None = None
    bias_key: str = "attention_bias"
    slides: Pattern | None = None


def _grouped(*rules: Rule, **values: Any) -> Family:
    """Return a decoder family with Llama's names for K/V heads and their width."""
    defaults = {"rope_theta": 10000.0, **values.pop("defaults", {})}
    return Family(
        num_kv_heads="num_key_value_heads", head_dim="head_dim", rules=rules, defaults=defaults,
        **values,
    )  # fmt: skip


def _encoder_decoder(bias: str) -> Family:
    heads = ("{side}_attention_heads",)
    return Family(embed_dim=("d_model",), num_heads=heads, rules=(features.by_role,), bias=bias)


_QWEN: Final = {"num_key_value_heads": 32, "max_window_layers": 28, "sliding_window": 4096}
_GEMMA: Final = {
    "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_GPT_OSS_ROPE: Final = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_BERT: Final = Family(rules=(features.bert,), bias="all")

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": _grouped(features.causal, rotary),
    "mistral": _grouped(
        features.causal, rotary, features.window, bias="none",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": _grouped(
        features.causal, rotary, features.qwen_window, bias="q,k,v",
        slides=features.qwen_slides, defaults=_QWEN,
    ),
    "qwen3": _grouped(
        features.causal, rotary, features.qwen_window, features.head_norm,
        slides=features.qwen_slides, defaults={**_QWEN, "head_dim": 128, "rms_norm_eps": 1e-6},
    ),
    "gemma": _grouped(
        features.causal_only, rotary, defaults={"num_key_value_heads": 16, "head_dim": 256},
    ),
    "gemma2": _grouped(
        features.causal_only, rotary, features.window_of_some, features.query_scale,
        features.softcap, slides=features.even,
        defaults={**_GEMMA, "attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": _grouped(
        features.gemma3_sides, gemma3_rotary, features.query_scale, features.head_norm,
        slides=features.gemma3_slides,
        defaults={
            **_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6, "rms_norm_eps": 1e-6,
        },
    ),
    "gpt_oss": _grouped(
        features.causal, rotary, features.window_of_some, features.sinks, slides=features.even,
        defaults={
            "rope_theta": 150000.0, "head_dim": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "sliding_window": 128, "rope_parameters": _GPT_OSS_ROPE,
            "max_position_embeddings": 131072,
        },
    ),
    "phi3": _grouped(features.causal, phi3_rotary, features.window, bias="none"),
    "falcon": Family(
        embed_dim=("hidden_size", "n_embed"), rules=(features.falcon, rotary), bias_key="bias",
        defaults={"rope_theta": 10000.0, "multi_query": True},
    ),
    "gpt2": Family(
        embed_dim=("n_embd",), num_heads=("n_head",),
        rules=(features.causal, features.gpt2_scale), bias="all",
        defaults={"n_embd": 768, "n_head": 12, "scale_attn_weights": True},
    ),
    "gpt_neox": Family(
        rules=(features.causal, neox_rotary),
        defaults={"rotary_emb_base": 10000.0, "rotary_pct": 0.25},
    ),
    "bloom": Family(
        embed_dim=("n_embed", "hidden_size"), num_heads=("n_head", "num_attention_heads"),
        rules=(features.causal, features.alibi), bias="all",
    ),
    "bert": _BERT,
    "roberta": _BERT,
    "t5": Family(
        embed_dim=("d_model",), num_heads=("num_heads",), head_dim="d_kv", rules=(features.t5,),
        bias="none",
        defaults={
            "d_model": 512, "num_heads": 8, "d_kv": 64, "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
        },
    ),
    "whisper": _encoder_decoder("q,v,out"),
    "bart": _encoder_decoder("all"),
}  # fmt: skip

GEMMA3: Final = ("gemma3", "gemma3_text")
"""Both have the text model's keys; the first is the model with pictures around it."""


def family_of(model_type: str) -> Family | None:
    """Return the row of a `model_type`, or None."""
    return FAMILIES.get("gemma3_text" if model_type in GEMMA3 else model_type)
