"""Tiny decoders of transformers with random weights, by the type of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from shared import once
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from attn_export.commands.main import run

MOST = 40
"""The number of positions of a model."""

_SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MOST,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": MOST}
_HEAD, _WINDOW = {"head_dim": 16}, {"sliding_window": 8}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip
_LATENT = {
    **_ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip

BUILT: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {}, "biogpt": {}, "codegen": {**_GPT, "rotary_dim": 4},
    "cohere": {}, "cohere2": {**_HEAD, **_MIXED},
    "deepseek_v2": _LATENT, "deepseek_v3": _LATENT, "ernie4_5": _HEAD,
    "exaone4": {**_MIXED, "sliding_window_pattern": 2}, "gemma": _HEAD,
    "gemma2": {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_HEAD, **_MIXED, "query_pre_attn_scalar": 16},
    "glm": _HEAD, "glm4": _HEAD, "glm4_moe": {**_HEAD, **_ROUTED}, "gpt2": _GPT,
    "gpt_bigcode": _GPT, "gpt_neox": {}, "gpt_oss": {**_HEAD, **_MIXED, **_EXPERTS},
    "gptj": {**_GPT, "rotary_dim": 4}, "granite": {},
    "granitemoe": {**_EXPERTS, "num_experts_per_tok": 2}, "helium": _HEAD,
    "hunyuan_v1_dense": _HEAD, "llama": {},
    "llama4_text": {
        **_HEAD, "attention_chunk_size": 8, "intermediate_size_mlp": 64, "num_local_experts": 2,
        "no_rope_layer_interval": 2, "floor_scale": 16,
    },
    "mistral": _WINDOW, "mixtral": {**_WINDOW, **_EXPERTS},
    "modernbert-decoder": {}, "nemotron": _HEAD, "olmo": {}, "olmo2": {}, "olmo3": _MIXED,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "persimmon": {}, "phi": {}, "phi3": _WINDOW, "phimoe": {**_WINDOW, **_EXPERTS},
    "qwen2": {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "qwen3": _HEAD,
    "qwen3_moe": {
        **_HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "seed_oss": _HEAD, "smollm3": {"no_rope_layer_interval": 2}, "stablelm": {},
    "starcoder2": _WINDOW,
}  # fmt: skip
"""The types that are built, with their fields beside `_SMALL`."""

REFUSED: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4}, "falcon": {},
    "xglm": {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 64},
}  # fmt: skip

_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {
    "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_state": 8, "mamba_n_groups": 1,
}  # fmt: skip

STATES: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({}, "keeps no keys and values: is_decoder is false"),
    "granitemoehybrid": (
        {**_MAMBA, **_EXPERTS, "num_experts_per_tok": 2},
        "state-space layers (GraniteMoeHybridMambaLayer)",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "convolution layers (Lfm2ShortConv)"),
    "mamba": ({"state_size": 8}, "state-space layers (MambaMixer)"),
    "openai-gpt": (_GPT, "keeps no keys and values from step to step"),
    "qwen3_next": ({**_LINEAR, "num_experts": 0}, "linear-attention layers (Qwen3NextGatedDelta"),
    "rwkv": ({"attention_hidden_size": 64}, "recurrent layers (RwkvSelfAttention)"),
}  # fmt: skip
"""Types that are refused by what they keep, with their fields and a part of the message."""


def tiny_decoder(kind: str, **fields: Any) -> Any:
    """Return a model of a type, with other fields of its config."""
    torch.manual_seed(0)
    of_kind = {**BUILT, **REFUSED, **{kind: given for kind, (given, _) in STATES.items()}}[kind]
    config = CONFIG_MAPPING[kind](**{**_SMALL, **of_kind, **fields})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def built(kind: str, **fields: Any) -> Path:
    """Return a bundle of a tiny decoder, built once from the folder `checkpoint_of(bundle)`."""

    def make(folder: Path) -> None:
        checkpoint = checkpoint_of(folder)
        tiny_decoder(kind, **fields).to(torch.bfloat16).save_pretrained(checkpoint)
        by_bytes("".join(map(chr, range(32, 96)))).save(str(checkpoint / "tokenizer.json"))
        options = ("--output", str(folder), "--runtime", "ort-cpu", "--quiet")
        assert run(["build", "--model", str(checkpoint), *options]) == 0

    return once("-".join((f"models/{kind}", *map(str, fields.values()))), make)


def checkpoint_of(bundle: Path) -> Path:
    return Path(f"{bundle}.checkpoint")


def by_bytes(alphabet: str = "") -> Tokenizer:
    """Return a tokenizer whose tokens are bytes."""
    names = alphabet.replace(" ", "Ġ") or sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
