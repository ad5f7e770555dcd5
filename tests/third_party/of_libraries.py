"""Attention of other libraries, as far as they are installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from third_party.subjects import (
    BATCH,
    KEYS,
    TOKENS,
    D,
    E,
    H,
    Table,
    bounded,
    ids,
    image,
    taken,
    tokens,
    two,
)  # fmt: skip

from attn_export import Subject

DIFFUSERS = "diffusers.models"
FLUX = f"{DIFFUSERS}.transformers.transformer_flux"


def made(place: str, *arguments: Any, **options: Any) -> Any:
    """Return an object of a class by its full name."""
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name)(*arguments, **options)


# -- diffusers ----------------------------------------------------------------------------------


def attention(processor: str = "AttnProcessor2_0", **options: Any) -> Any:
    place = f"{DIFFUSERS}.attention_processor"
    return made(
        f"{place}.Attention", E, heads=H, dim_head=D, processor=made(f"{place}.{processor}"),
        **options,
    )  # fmt: skip


def masked() -> Subject:
    inputs = {
        "hidden_states": torch.randn(2, 5, E), "encoder_hidden_states": torch.randn(2, 6, E),
        "attention_mask": torch.randn(2, 6),
    }  # fmt: skip
    axes = {"hidden_states": TOKENS, "encoder_hidden_states": KEYS, "attention_mask": KEYS}
    return taken(attention(cross_attention_dim=E), inputs, axes)


def block(**options: Any) -> Any:
    return made(f"{DIFFUSERS}.attention.BasicTransformerBlock", E, H, D, **options)


def joint(place: str, *, rotary: bool = False, **options: Any) -> Subject:
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(2, 5, E), "encoder_hidden_states": torch.randn(2, 6, E),
        "temb": torch.randn(2, E),
    }  # fmt: skip
    axes = {"hidden_states": TOKENS, "encoder_hidden_states": KEYS, "temb": BATCH}
    if rotary:
        inputs["image_rotary_emb"] = (torch.randn(11, D), torch.randn(11, D))
        axes |= {f"image_rotary_emb.{part}": {0: "total_len"} for part in range(2)}
    module = made(place, E, H, D, **options)
    outputs = ["context", "output"]
    subject = taken(module, inputs, axes, outputs, take=tuple)
    if not rotary:
        return subject
    sums = {"total_len": "query_len + key_len"}
    return Subject(subject.module, inputs, axes, outputs, relations=sums)


def flux() -> Subject:
    module = made(
        f"{FLUX}.FluxTransformer2DModel", in_channels=16, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=E,
        pooled_projection_dim=E, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 5, 16), "encoder_hidden_states": torch.randn(2, 6, E),
        "pooled_projections": torch.randn(2, E), "timestep": torch.rand(2),
        "img_ids": torch.rand(5, 3), "txt_ids": torch.rand(6, 3),
    }  # fmt: skip
    axes = {
        "hidden_states": TOKENS, "encoder_hidden_states": KEYS, "pooled_projections": BATCH,
        "timestep": BATCH, "img_ids": {0: "query_len"}, "txt_ids": {0: "key_len"},
    }  # fmt: skip
    return taken(module, inputs, axes)


def wan() -> Subject:
    rotary = tuple(torch.randn(1, 5, 1, D) for _ in range(2))
    inputs = {
        "hidden_states": torch.randn(2, 5, E), "encoder_hidden_states": torch.randn(2, 6, E),
        "temb": torch.randn(2, 6, E), "rotary_emb": rotary,
    }  # fmt: skip
    axes = {"hidden_states": TOKENS, "encoder_hidden_states": KEYS, "temb": BATCH}
    axes |= {f"rotary_emb.{part}": {1: "query_len"} for part in range(2)}
    place = f"{DIFFUSERS}.transformers.transformer_wan.WanTransformerBlock"
    return taken(made(place, E, 48, H), inputs, axes)


def noise(place: str, channels: int, text: bool = True, **options: Any) -> Subject:
    inputs: dict[str, Any] = {
        ("sample" if "UNet" in place else "hidden_states"): torch.randn(2, channels, 8, 8),
        "timestep": torch.tensor([3, 70]),
    }  # fmt: skip
    axes = {next(iter(inputs)): BATCH, "timestep": BATCH}
    if text:
        inputs["encoder_hidden_states"], axes["encoder_hidden_states"] = torch.randn(2, 6, E), KEYS
    if "SD3" in place:
        inputs["pooled_projections"], axes["pooled_projections"] = torch.randn(2, E), BATCH
    return taken(made(place, **options), inputs, axes)


SMALL = {"num_attention_heads": H, "attention_head_dim": D, "num_layers": 1, "sample_size": 8}
OF_DIFFUSERS: Table = {
    "diffusers.Attention": lambda: tokens(attention(), name="hidden_states"),
    "diffusers.Attention, eager": lambda: tokens(attention("AttnProcessor"), name="hidden_states"),
    "diffusers.Attention, upcast": lambda: tokens(
        attention("AttnProcessor", upcast_attention=True, upcast_softmax=True), name="hidden_states"
    ),
    "diffusers.Attention, norm of keys": lambda: tokens(
        attention(qk_norm="rms_norm"), name="hidden_states"
    ),
    "diffusers.Attention, cross and masked": masked,
    "diffusers.BasicTransformerBlock": lambda: two(
        block(cross_attention_dim=E), "hidden_states", "encoder_hidden_states"
    ),
    "diffusers.BasicTransformerBlock, itself twice": lambda: tokens(
        block(double_self_attention=True), name="hidden_states"
    ),
    "diffusers.JointTransformerBlock": lambda: joint(
        f"{DIFFUSERS}.attention.JointTransformerBlock", qk_norm="rms_norm"
    ),
    "diffusers.FluxTransformerBlock": lambda: joint(f"{FLUX}.FluxTransformerBlock", rotary=True),
    "diffusers.FluxTransformer2DModel": flux,
    "diffusers.WanTransformerBlock": wan,
    "diffusers.SD3Transformer2DModel": lambda: noise(
        "diffusers.SD3Transformer2DModel", 4, in_channels=4, out_channels=4, joint_attention_dim=E,
        caption_projection_dim=E, pooled_projection_dim=E, pos_embed_max_size=8, **SMALL,
    ),
    "diffusers.UNet2DConditionModel": lambda: noise(
        "diffusers.UNet2DConditionModel", 4, sample_size=8, block_out_channels=(16, E),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), layers_per_block=1,
        cross_attention_dim=E, norm_num_groups=8, attention_head_dim=H,
    ),
}  # fmt: skip


# -- x-transformers -----------------------------------------------------------------------------


def layers(kind: str = "Encoder", axis: Any = "query_len", **options: Any) -> Subject:
    module = made(
        f"x_transformers.{kind}", dim=E, depth=1, heads=H, attn_dim_head=D, **options
    )  # fmt: skip
    return tokens(module, axis=axis)


def language(**options: Any) -> Subject:
    inner = made("x_transformers.Decoder", dim=E, depth=1, heads=H, attn_dim_head=D, **options)
    module = made(
        "x_transformers.TransformerWrapper", num_tokens=50, max_seq_len=96, attn_layers=inner
    )
    return taken(module, {"x": ids()}, {"x": {0: "batch", 1: bounded(1, 90)}})


OF_X_TRANSFORMERS: Table = {
    "x-transformers, Encoder": layers,
    "x-transformers, Encoder, flash": lambda: layers(attn_flash=True),
    "x-transformers, Decoder": lambda: layers("Decoder"),
    "x-transformers, Decoder, flash": lambda: layers("Decoder", attn_flash=True),
    "x-transformers, rotary": lambda: layers("Decoder", rotary_pos_emb=True, attn_flash=True),
    "x-transformers, xpos": lambda: layers("Decoder", rotary_xpos=True),
    "x-transformers, ALiBi": lambda: layers("Decoder", alibi_pos_bias=True, alibi_num_heads=2),
    "x-transformers, T5's bias": lambda: layers("Encoder", rel_pos_bias=True),
    "x-transformers, shared heads": lambda: layers("Decoder", attn_kv_heads=2),
    "x-transformers, one head": lambda: layers("Decoder", attn_one_kv_head=True),
    "x-transformers, norm of queries": lambda: layers("Encoder", attn_qk_norm=True),
    "x-transformers, memory": lambda: layers("Encoder", attn_num_mem_kv=3),
    "x-transformers, talking heads": lambda: layers("Encoder", attn_pre_talking_heads=True),
    "x-transformers, gated": lambda: layers("Decoder", attn_gate_values=True),
    "x-transformers, softclamped": lambda: layers("Decoder", attn_softclamp_logits=True),
    "x-transformers, sparse": lambda: layers("Encoder", bounded(2), attn_sparse_topk=2),
    "x-transformers, sigmoid": lambda: layers("Encoder", attn_sigmoid=True),
    "x-transformers, TransformerWrapper": language,
}  # fmt: skip


# -- timm, torchvision and open_clip ------------------------------------------------------------

TIMM = "timm.layers"
VIT = {"img_size": 16, "patch_size": 4, "embed_dim": E, "depth": 1, "num_heads": H,
       "num_classes": 7}  # fmt: skip


def area(module: Any, name: str = "x") -> Subject:
    """Return a subject of a module that maps images `[B, 4, 4, E]`."""
    return taken(module, {name: torch.randn(2, 4, 4, E)}, {name: BATCH})


OF_TIMM: Table = {
    "timm.Attention": lambda: tokens(made(f"{TIMM}.Attention", E, H, qkv_bias=True)),
    "timm.Attention, norm of queries": lambda: tokens(
        made(f"{TIMM}.Attention", E, H, qk_norm=True, norm_layer=torch.nn.LayerNorm)
    ),
    "timm.DiffAttention": lambda: tokens(made(f"{TIMM}.DiffAttention", E, 2)),
    "timm.AttentionPoolLatent": lambda: tokens(
        made(f"{TIMM}.AttentionPoolLatent", E, num_heads=H, latent_len=2)
    ),
    "timm.Attention2d": lambda: image(made(f"{TIMM}.Attention2d", E, num_heads=H), 6, E),
    "timm.MultiQueryAttention2d": lambda: image(
        made(f"{TIMM}.MultiQueryAttention2d", E, num_heads=H, kv_stride=2), 6, E
    ),
    "timm.VisionTransformer": lambda: image(
        made("timm.models.vision_transformer.VisionTransformer", **VIT)
    ),
    "timm.Beit": lambda: image(
        made("timm.models.beit.Beit", use_rel_pos_bias=True, init_values=0.1, **VIT)
    ),
    "timm.Eva": lambda: image(made("timm.models.eva.Eva", use_rot_pos_emb=True, **VIT)),
    "timm.Cait": lambda: image(made("timm.models.cait.Cait", init_values=0.5, **VIT)),
    "timm.Xcit": lambda: image(made("timm.models.xcit.Xcit", **{**VIT, "patch_size": 8})),
    "timm.SwinTransformerBlock": lambda: area(
        made("timm.models.swin_transformer.SwinTransformerBlock", E, (4, 4), H, window_size=2,
             shift_size=1)
    ),
    "torchvision.SwinTransformerBlock": lambda: area(
        made("torchvision.models.swin_transformer.SwinTransformerBlock", E, H, [2, 2], [1, 1])
    ),
    "torchvision.SwinTransformerBlockV2": lambda: area(
        made("torchvision.models.swin_transformer.SwinTransformerBlockV2", E, H, [2, 2], [1, 1])
    ),
    "torchvision.VisionTransformer": lambda: tokens(
        made("torchvision.models.VisionTransformer", 16, 4, 1, H, E, 48).encoder.layers,
        name="input",
    ),
    "open_clip.ResidualAttentionBlock": lambda: tokens(
        made("open_clip.transformer.ResidualAttentionBlock", E, H), name="q_x"
    ),
    "open_clip.CustomResidualAttentionBlock": lambda: tokens(
        made("open_clip.transformer.CustomResidualAttentionBlock", E, H, scale_attn=True)
    ),
    "open_clip.AttentionalPooler": lambda: tokens(
        made("open_clip.transformer.AttentionalPooler", E, E, H, 3)
    ),
    "open_clip.VisionTransformer": lambda: image(
        made("open_clip.transformer.VisionTransformer", 16, 4, E, 1, H, 2.0, output_dim=8)
    ),
}  # fmt: skip

MODULES: Table = OF_DIFFUSERS | OF_X_TRANSFORMERS | OF_TIMM
