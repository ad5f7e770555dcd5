"""Tiny models without caches of transformers with random weights, by the type of the model."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {
    **_SMALL, "vocab_size": 64, "intermediate_size": 64, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NARROW = {**_TEXT, "embedding_size": 16}
_IMAGE = {**_SMALL, "intermediate_size": 64, "image_size": 16, "patch_size": 8}
_SOUND = {
    **_SMALL, "intermediate_size": 64, "conv_dim": (16, 16), "conv_stride": (3, 2),
    "conv_kernel": (5, 3), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
}  # fmt: skip

BUILT: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertModel", _NARROW),
    "audio-spectrogram-transformer": ("ASTModel", {**_IMAGE, "max_length": 32, "num_mel_bins": 16}),
    "beit": ("BeitModel", _IMAGE), "bert": ("BertModel", _TEXT),
    "camembert": ("CamembertModel", _TEXT),
    "clip": ("CLIPModel", {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 16}),
    "clip_text_model": ("CLIPTextModel", _TEXT),
    "clip_vision_model": ("CLIPVisionModel", _IMAGE),
    "data2vec-audio": ("Data2VecAudioModel", _SOUND),
    "data2vec-text": ("Data2VecTextModel", _TEXT),
    "deberta-v2": (
        "DebertaV2Model",
        {
            **_TEXT, "relative_attention": True, "position_buckets": 8, "type_vocab_size": 0,
            "max_relative_positions": 32, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
            "norm_rel_ebd": "layer_norm", "position_biased_input": False,
        },
    ),
    "deit": ("DeiTModel", _IMAGE),
    "dinov2": ("Dinov2Model", _IMAGE),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", _IMAGE),
    "dinov3_vit": ("DINOv3ViTModel", _IMAGE),
    "distilbert": (
        "DistilBertModel",
        {
            "vocab_size": 64, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4,
            "max_position_embeddings": 40, "pad_token_id": 0,
        },
    ),
    "electra": ("ElectraModel", _NARROW), "ernie": ("ErnieModel", _TEXT),
    "esm": ("EsmModel", {**_TEXT, "mask_token_id": 5}), "eurobert": ("EuroBertModel", _TEXT),
    "hubert": ("HubertModel", _SOUND), "ijepa": ("IJepaModel", _IMAGE),
    "layoutlm": ("LayoutLMModel", _TEXT),
    "llama": ("LlamaModel", {**_TEXT, "num_key_value_heads": 2}),
    "mobilebert": (
        "MobileBertModel", {**_NARROW, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    ),
    "modernbert": (
        "ModernBertModel", {**_TEXT, "local_attention": 8, "global_attn_every_n_layers": 2},
    ),
    "mpnet": ("MPNetModel", _TEXT),
    "nomic_bert": ("NomicBertModel", _TEXT), "roberta": ("RobertaModel", _TEXT),
    "roberta-prelayernorm": ("RobertaPreLayerNormModel", _TEXT),
    "siglip": (
        "SiglipModel",
        {"text_config": {**_TEXT, "projection_size": 32}, "vision_config": _IMAGE},
    ),
    "siglip_text_model": ("SiglipTextModel", {**_TEXT, "projection_size": 32}),
    "siglip_vision_model": ("SiglipVisionModel", _IMAGE), "splinter": ("SplinterModel", _TEXT),
    "unispeech": ("UniSpeechModel", _SOUND), "unispeech-sat": ("UniSpeechSatModel", _SOUND),
    "videomae": ("VideoMAEModel", {**_IMAGE, "num_frames": 4}),
    "vit": ("ViTModel", _IMAGE), "vit_msn": ("ViTMSNModel", _IMAGE),
    "wav2vec2": ("Wav2Vec2Model", _SOUND), "xlm-roberta": ("XLMRobertaModel", _TEXT),
    "xmod": ("XmodModel", {**_TEXT, "languages": ["en"], "default_language": "en"}),
    "yolos": ("YolosModel", {**_IMAGE, "image_size": [16, 16]}),
}  # fmt: skip
"""The types that are built, with their classes and fields."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "convbert": ("ConvBertModel", _TEXT), "megatron-bert": ("MegatronBertModel", _TEXT),
    "rembert": ("RemBertModel", _TEXT), "roformer": ("RoFormerModel", _TEXT),
}  # fmt: skip
"""Types with attention of their own."""


def tiny_encoder(kind: str, architecture: str = "", **fields: Any) -> Any:
    """Return a model of a type, of another class or with other fields of its config."""
    torch.manual_seed(0)
    name, of_kind = {**BUILT, **REFUSED}[kind]
    config = CONFIG_MAPPING[kind](**{**of_kind, **fields})
    config._attn_implementation = "eager"
    model = getattr(transformers, architecture or name)(config)
    return model.eval()
