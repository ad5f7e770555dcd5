"""A layer that is read out of a saved model gives what it gives within the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from shared import extended

from attn_export import Subject
from attn_export.weights.from_config import FAMILIES

E, H, B, L = 32, 4, 2, 9
SIZES = {
    "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 96, "hidden_size": E, "num_attention_heads": H,
    "intermediate_size": 48, "num_hidden_layers": 2, "use_cache": False,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 16, "head_dim": 8}  # fmt: skip
OLD = {**SIZES, "n_embd": E, "n_head": H, "n_layer": 2, "n_positions": 96}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "llama, ignored share": ("Llama", {**GROUPED, "partial_rotary_factor": 0.5}),
    "mixtral": ("Mixtral", {**GROUPED, "sliding_window": 4, **EXPERTS}),
    "qwen3_moe": ("Qwen3Moe", {**GROUPED, **EXPERTS}),
    "granite": ("Granite", {**GROUPED, "attention_multiplier": 0.3}),
    "smollm3": ("SmolLM3", {**GROUPED, "no_rope_layers": [0, 1]}),
    "smollm3 without positions": ("SmolLM3", {**GROUPED, "no_rope_layers": [1, 0]}),
    "cohere": ("Cohere", GROUPED),
    "starcoder2": ("Starcoder2", {**GROUPED, "sliding_window": 4}),
    "gptj": ("GPTJ", {**OLD, "rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCode", OLD),
    "opt": ("OPT", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": E}),
    "clip_text_model": ("CLIPText", {**SIZES, "use_cache": None}),
    "electra": ("Electra", SIZES),
    "xlm-roberta": ("XLMRoberta", SIZES),
}
LONGROPE = {"short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.0, 8.0, 30.0]}
PICTURES = {
    "hidden_size": E, "num_attention_heads": H, "intermediate_size": 48, "num_hidden_layers": 2,
    "image_size": 6, "patch_size": 2,
}  # fmt: skip


def longrope(original: int, **more: Any) -> dict[str, Any]:
    """Return the sizes of a model that switches at a length, below or above that of the test."""
    scaling = {"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": original}
    return {**GROUPED, "rope_scaling": scaling | more}


MODELS |= {
    "llama, longrope, short": ("Llama", longrope(L)),
    "llama, longrope, long": ("Llama", longrope(L - 1)),
    "llama, longrope, factors": ("Llama", longrope(4, factor=32.0)),
    "llama, longrope, attention factor": ("Llama", longrope(4, attention_factor=1.7)),
    "phi3": ("Phi3", GROUPED),
    "phi3, longrope, short": ("Phi3", longrope(4)),
    "phi3, longrope, long": ("Phi3", {**longrope(64), "original_max_position_embeddings": 4}),
    "phi3, longrope, part": ("Phi3", {
        **GROUPED, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 4,
        "rope_scaling": {
            "type": "su", "short_factor": [1.0, 1.1], "long_factor": [1.5, 4.0],
            "original_max_position_embeddings": 4,
        },
    }),
    "falcon, alibi": ("Falcon", {**SIZES, "alibi": True}),
    # Slopes that bfloat16 rounds.
    "falcon, alibi of 12 heads": ("Falcon", {
        **SIZES, "hidden_size": 48, "num_attention_heads": 12, "alibi": True, "multi_query": False,
    }),
    "falcon, alibi, grouped": ("Falcon", {
        **SIZES, "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True,
    }),
    "vit": ("ViT", PICTURES),
    "vit without biases of q, k and v": ("ViT", {**PICTURES, "qkv_bias": False}),
    "distilbert": ("DistilBert", {
        "vocab_size": 50, "dim": E, "n_heads": H, "n_layers": 2, "hidden_dim": 48,
        "max_position_embeddings": 96,
    }),
    "modernbert, window": ("ModernBert", {**SIZES, "local_attention": 5}),
    "modernbert, no window": ("ModernBert", {
        **SIZES, "local_attention": 4, "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True,
    }),
    "modernbert, even window": ("ModernBert", {
        **SIZES, "local_attention": 4, "global_attn_every_n_layers": 2,
    }),
    "mpt": ("Mpt", {"vocab_size": 50, "d_model": E, "n_heads": H, "n_layers": 2}),
    "mpt of 6 heads, scaled": ("Mpt", {
        "vocab_size": 50, "d_model": 48, "n_heads": 6, "n_layers": 2,
        "attn_config": {"softmax_scale": 0.2},
    }),
}  # fmt: skip
FOUR = {"num_hidden_layers": 4}
WIDE = {**GROUPED, "head_dim": 12}
NARROW = {"sliding_window": 3}
USED = {**NARROW, "use_sliding_window": True}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}
MODELS |= {
    "llama, biases and wide heads": ("Llama", {**WIDE, "attention_bias": True}),
    "llama, dynamic": ("Llama", {
        **GROUPED, "max_position_embeddings": 6,
        "rope_scaling": {"rope_type": "dynamic", "factor": 3.0},
    }),
    "mistral": ("Mistral", {**WIDE, **NARROW}),
    "qwen2": ("Qwen2", {**GROUPED, **FOUR, **USED, "max_window_layers": 2}),
    "qwen2, by layer": ("Qwen2", {
        **GROUPED, **USED, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "qwen3": ("Qwen3", {**WIDE, **USED, "max_window_layers": 1, "rms_norm_eps": 1e-2}),
    "gemma": ("Gemma", {**WIDE, "attention_bias": True}),
    "gemma2": ("Gemma2", {**WIDE, **NARROW, "query_pre_attn_scalar": 7}),
    "gemma3": ("Gemma3Text", {
        **WIDE, **NARROW, **LINEAR, "num_hidden_layers": 3, "sliding_window_pattern": 2,
    }),
    "gemma3, both sides": ("Gemma3Text", {
        **WIDE, "sliding_window": 4, "sliding_window_pattern": 2,
        "use_bidirectional_attention": True,
    }),
    "gpt-oss": ("GptOss", {**GROUPED, **EXPERTS, **NARROW, **FOUR}),
    "falcon, rotary": ("Falcon", {**SIZES, **LINEAR, "rope_theta": 500.0}),
    "falcon, heads apart": ("Falcon", {**SIZES, "multi_query": False, "bias": True}),
    "gpt2, by layer": ("GPT2", {**OLD, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("GPTNeoX", {**SIZES, "rotary_pct": 0.5, "rotary_emb_base": 500}),
    "bert, decoder": ("Bert", {**SIZES, "is_decoder": True}),
    "smollm3, windows": ("SmolLM3", {
        **GROUPED, **FOUR, **USED, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "clip_vision_model": ("CLIPVision", PICTURES),
}  # fmt: skip
LATENT = {
    **SIZES, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 5, "first_k_dense_replace": 2, "moe_intermediate_size": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "beta_fast": 4,
    "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip
MODELS |= {
    "deepseek_v2": ("DeepseekV2", LATENT),
    "deepseek_v2, lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None}),
    "deepseek_v2, yarn": ("DeepseekV2", {**LATENT, "rope_scaling": YARN}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "rope_parameters": {**YARN, "rope_theta": 500.0}}),
    "deepseek_v3, biases": ("DeepseekV3", {**LATENT, "attention_bias": True}),
    "deepseek_v3, halves": ("DeepseekV3", {**LATENT, "rope_interleave": False}),
}
DEFAULT = {
    "deepseek_v2, lite",
    "deepseek_v3",
    "vit",
    "distilbert",
    "modernbert, window",
    "mpt of 6 heads, scaled",
    "falcon, alibi of 12 heads",
    "llama, longrope, long",
    "phi3, longrope, part",
    "llama, ignored share",
    "granite",
    "cohere",
    "gptj",
    "gpt_bigcode",
    "opt",
}


def saved(name: str, folder) -> torch.nn.Module:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)
    model.save_pretrained(folder)
    return model


NAMES = (("self_attn", "attn", "self", "self_attention"), ("attention",))


def inside(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    """Return what each attention is given within the model, and what it returns, by layers."""
    modules = list(model.named_modules())
    of_names = ([m for n, m in modules if n.split(".")[-1] in names] for names in NAMES)
    attentions = next(found for found in of_names if found)
    outputs = [m for n, m in modules if n.endswith("attention.output.dense")]
    found: list[list[torch.Tensor]] = []

    def keep(_, arguments, options, returned) -> None:
        given = arguments[0] if arguments else options["hidden_states"]
        found.append([given, returned[0]])

    def keep_output(_, __, returned) -> None:
        found[-1][1] = returned

    for attention in attentions:
        attention.register_forward_hook(keep, with_kwargs=True)
    for output in outputs:  # BERT's attention ends in a part of its own
        output.register_forward_hook(keep_output)
    given = {"input_ids": torch.arange(B * L).reshape(B, L) + 3}
    if model.main_input_name == "pixel_values":
        given = {"pixel_values": torch.randn(B, 3, 6, 6)}
    with torch.inference_mode():
        model(**given)
    return found


@pytest.mark.parametrize("name", extended(MODELS, lambda name: name in DEFAULT))
@pytest.mark.filterwarnings("ignore")
def test_each_layer_of_a_saved_model_is_that_of_the_model(name: str, tmp_path):
    layers = inside(saved(name, tmp_path))
    assert len(layers) == MODELS[name][1].get("num_hidden_layers", 2)
    for number, (given, wanted) in enumerate(layers):
        subject = Subject.from_checkpoint(tmp_path, layer=number)
        first = next(iter(subject.inputs))
        with torch.inference_mode():
            found = subject.call(subject.module, {**subject.inputs, first: given})
        torch.testing.assert_close(next(iter(found.values())), wanted, rtol=1e-4, atol=1e-5)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    assert Subject.from_checkpoint(alone, layer=number).spec == subject.spec


UNSAID = [
    name for name, family in FAMILIES.items()
    if family.bias is None and not family.refused and family.bias_key not in family.defaults
]  # fmt: skip


@pytest.mark.parametrize("name", UNSAID)
def test_a_config_without_a_word_on_biases_has_those_of_the_class(name: str):
    config = hf.AutoConfig.for_model(name)
    there = getattr(config, FAMILIES[name].bias_key, False)
    assert FAMILIES[name].usual_bias == ("all" if there else "none")
