"""Small models of `transformers`, with random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as hf
from third_party.subjects import TOKENS, E, H, Table, bounded, ids, image, padding, taken

from attn_export import Subject

SIZES = {
    "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 96, "hidden_size": E, "num_attention_heads": H,
    "intermediate_size": 48, "num_hidden_layers": 1,
}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
UP_TO_90 = bounded(1, 90)


def model(kind: str, sizes: dict[str, Any], how: str, name: str = "Model") -> Any:
    """Return the model of a kind, such as "Llama"; `how` is "sdpa" or "eager"."""
    configuration = getattr(hf, f"{kind}Config")(**sizes)
    configuration._attn_implementation = how
    return getattr(hf, kind + name)(configuration)


def decoder(kind: str, how: str = "sdpa", **options: Any) -> Subject:
    """Return a subject of a decoder without a cache."""
    module = model(kind, {**DECODER, **options}, how)
    return taken(module, {"input_ids": ids()}, {"input_ids": TOKENS}, use_cache=False)


def padded(kind: str, how: str = "sdpa", axis: Any = UP_TO_90, **options: Any) -> Subject:
    """Return a subject of an encoder with a mask of padding."""
    module = model(kind, {**SIZES, **options}, how)
    inputs = {"input_ids": ids(), "attention_mask": padding()}
    return taken(module, inputs, {key: {0: "batch", 1: axis} for key in inputs})


def limited(kind: str, how: str = "sdpa", **options: Any) -> Subject:
    """Return a subject of a decoder with a table of positions."""
    module = model(kind, {**SIZES, **options}, how)
    axes = {"input_ids": {0: "batch", 1: UP_TO_90}}
    return taken(module, {"input_ids": ids()}, axes, use_cache=False)


def seen(kind: str, how: str = "sdpa", name: str = "Model", **options: Any) -> Subject:
    """Return a subject of a model of images."""
    sizes = {**SIZES, "image_size": 16, "patch_size": 4, "num_channels": 3, **options}
    return image(model(kind, sizes, how, name), name="pixel_values")


def both(kind: str, how: str = "sdpa", axis: Any = UP_TO_90, **options: Any) -> Subject:
    """Return a subject of an encoder with its decoder."""
    sizes = {
        **SIZES, "d_model": E, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": H,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": H,
        "decoder_attention_heads": H, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, **options,
    }  # fmt: skip
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(length=6)}
    axes = {"input_ids": {0: "batch", 1: "key_len"}, "decoder_input_ids": {0: "batch", 1: axis}}
    if axis is UP_TO_90:
        axes["input_ids"] = {0: "batch", 1: type(axis)("key_len", max=90)}
    return taken(model(kind, sizes, how), inputs, axes, use_cache=False)


def heard() -> Subject:
    sizes = {
        **SIZES, "d_model": E, "encoder_layers": 1, "encoder_attention_heads": H,
        "encoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 20,
        "decoder_layers": 1, "decoder_attention_heads": H,
    }  # fmt: skip
    module = model("Whisper", sizes, "sdpa").get_encoder()
    inputs = {"input_features": torch.randn(2, 8, 40)}
    return taken(module, inputs, {"input_features": {0: "batch"}})


def text_of(kind: str) -> Subject:
    sizes = {**SIZES, "projection_dim": E}
    configuration = getattr(hf, f"{kind}TextConfig")(**sizes)
    configuration._attn_implementation = "sdpa"
    module = getattr(hf, f"{kind}TextModel")(configuration)
    axes = {"input_ids": {0: "batch", 1: UP_TO_90}}
    return taken(module, {"input_ids": ids()}, axes)


MODULES: Table = {
    **{
        f"{kind}, {how}": partial(decoder, kind, how, **options)
        for kind, how, options in (
            ("Llama", "sdpa", {}),
            ("Llama", "eager", {}),
            ("Mistral", "sdpa", {}),
            ("Qwen2", "eager", {}),
            ("Qwen3", "sdpa", {}),
            ("Gemma", "sdpa", {}),
            ("Phi", "sdpa", {}),
            ("Phi3", "eager", {}),
            ("Olmo2", "sdpa", {}),
            ("Granite", "eager", {}),
            ("Cohere", "sdpa", {}),
            ("SmolLM3", "sdpa", {}),
            ("Starcoder2", "sdpa", {}),
            ("GPTNeoX", "sdpa", {}),
            ("GPTNeoX", "eager", {}),
            ("StableLm", "sdpa", {}),
            ("Helium", "sdpa", {}),
            ("Glm", "eager", {}),
            ("Nemotron", "sdpa", {}),
            ("Ernie4_5", "sdpa", {}),
            ("Bloom", "eager", {"n_head": H}),
            ("Mpt", "eager", {"d_model": E, "n_heads": H, "n_layers": 1}),
            ("Olmoe", "sdpa", EXPERTS),
        )
    },
    "Gemma2, eager": lambda: decoder("Gemma2", "eager", sliding_window=4),
    "Gemma3Text, sdpa": lambda: decoder("Gemma3Text", sliding_window=4),
    "GptOss, eager": lambda: decoder("GptOss", "eager", sliding_window=4, **EXPERTS),
    "Mixtral, sdpa": lambda: decoder("Mixtral", **EXPERTS),
    "Falcon, sdpa": lambda: limited("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "Falcon, ALiBi": lambda: limited("Falcon", "eager", alibi=True, multi_query=False),
    "GPT2, sdpa": lambda: limited("GPT2"),
    "GPT2, eager": lambda: limited("GPT2", "eager"),
    "GPTNeo, eager": lambda: limited(
        "GPTNeo",
        "eager",
        num_layers=2,
        num_heads=H,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        num_hidden_layers=2,
    ),
    "GPTJ, eager": lambda: limited("GPTJ", "eager", rotary_dim=4),
    "OPT, sdpa": lambda: limited("OPT", ffn_dim=48, word_embed_proj_dim=E),
    "GPTBigCode, sdpa": lambda: limited("GPTBigCode"),
    "Bert, sdpa": lambda: padded("Bert"),
    "Bert, eager": lambda: padded("Bert", "eager"),
    "Roberta, sdpa": lambda: padded("Roberta"),
    "Electra, eager": lambda: padded("Electra", "eager", embedding_size=E),
    "DistilBert, sdpa": lambda: padded("DistilBert", dim=E, n_heads=H, n_layers=1, hidden_dim=48),
    "Albert, sdpa": lambda: padded("Albert", embedding_size=16),
    "ModernBert, sdpa": lambda: padded("ModernBert", local_attention=4, num_hidden_layers=2),
    "DebertaV2, eager": lambda: padded(
        "DebertaV2", "eager", relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "MPNet, eager": lambda: padded("MPNet", "eager"),
    "T5, sdpa": lambda: both("T5", "sdpa", "query_len"),
    "T5, eager": lambda: both("T5", "eager", "query_len"),
    "Bart, sdpa": lambda: both("Bart"),
    "Marian, eager": lambda: both("Marian", "eager", decoder_start_token_id=1),
    "ViT, sdpa": lambda: seen("ViT"),
    "DeiT, eager": lambda: seen("DeiT", "eager"),
    "Beit, sdpa": lambda: seen("Beit", use_relative_position_bias=True),
    "Dinov2, sdpa": lambda: seen("Dinov2"),
    "Swin, eager": lambda: seen(
        "Swin",
        "eager",
        patch_size=2,
        embed_dim=16,
        depths=[2],
        num_heads=[2],
        window_size=4,
        num_attention_heads=[2],
    ),
    "SiglipVision, sdpa": lambda: seen("SiglipVision"),
    "CLIPVision, eager": lambda: seen("CLIPVision", "eager"),
    "CLIP, text": lambda: text_of("CLIP"),
    "Siglip, text": lambda: text_of("Siglip"),
    "Whisper, encoder": heard,
}
