"""Tiny encoder-decoders of transformers with random weights, by the type of the model."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

_T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_WHISPER = {
    **_BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 40,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip

BUILT: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", _BART),
    "blenderbot": ("BlenderbotForConditionalGeneration", _BART),
    "blenderbot-small": ("BlenderbotSmallForConditionalGeneration", _BART),
    "marian": ("MarianMTModel", _BART), "mbart": ("MBartForConditionalGeneration", _BART),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "pegasus": ("PegasusForConditionalGeneration", _BART),
    "plbart": ("PLBartForConditionalGeneration", _BART),
    "t5": ("T5ForConditionalGeneration", _T5), "umt5": ("UMT5ForConditionalGeneration", _T5),
    "whisper": ("WhisperForConditionalGeneration", _WHISPER),
}  # fmt: skip
"""The types that are built, with their classes and fields."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "led": (
        "LEDForConditionalGeneration",
        {
            **_BART, "max_encoder_position_embeddings": 40, "max_decoder_position_embeddings": 40,
            "attention_window": 4,
        },
    ),
    "m2m_100": ("M2M100ForConditionalGeneration", _BART),
    "mvp": ("MvpForConditionalGeneration", _BART),
    "pegasus_x": ("PegasusXForConditionalGeneration", _BART),
    "speech_to_text": (
        "Speech2TextForConditionalGeneration", {**_BART, "max_source_positions": 12},
    ),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", _T5),
}  # fmt: skip
"""Types whose attention, positions, caches or inputs are their own."""


def tiny_pair(kind: str, **fields: Any) -> Any:
    """Return a model of a type, with other fields of its config."""
    torch.manual_seed(0)
    name, of_kind = {**BUILT, **REFUSED}[kind]
    config = CONFIG_MAPPING[kind](**{**of_kind, **fields})
    config._attn_implementation = "eager"
    return getattr(transformers, name)(config).eval()
