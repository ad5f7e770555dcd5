"""The spec of each layer of a model, from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from attn_export.errors import WeightsError
from attn_export.spec import AttentionSpec
from attn_export.weights.from_config import FAMILIES, spec_of_config

E, H, L = 32, 4, 9
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


def longrope(original: int, **more: Any) -> dict[str, Any]:
    """Return the sizes of a model that switches at a length, below or above that of the test."""
    scaling = {"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": original}
    return {**GROUPED, "rope_scaling": scaling | more}


MODELS |= {
    "llama, longrope, short": ("Llama", longrope(L)),
    "llama, longrope, long": ("Llama", longrope(L - 1)),
    "llama, longrope, factors": ("Llama", longrope(4, factor=32.0)),
    "llama, longrope, attention factor": ("Llama", longrope(4, attention_factor=1.7)),
    "phi3, longrope, short": ("Phi3", longrope(4)),
    "phi3, longrope, long": ("Phi3", {**longrope(64), "original_max_position_embeddings": 4}),
    "phi3, longrope, part": ("Phi3", {
        **GROUPED, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 4,
        "rope_scaling": {
            "type": "su", "short_factor": [1.0, 1.1], "long_factor": [1.5, 4.0],
            "original_max_position_embeddings": 4,
        },
    }),
    # Slopes that bfloat16 rounds.
    "falcon, alibi of 12 heads": ("Falcon", {
        **SIZES, "hidden_size": 48, "num_attention_heads": 12, "alibi": True, "multi_query": False,
    }),
    "falcon, alibi, grouped": ("Falcon", {
        **SIZES, "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True,
    }),
    "distilbert": ("DistilBert", {
        "vocab_size": 50, "dim": E, "n_heads": H, "n_layers": 2, "hidden_dim": 48,
        "max_position_embeddings": 96,
    }),
    "modernbert, window": ("ModernBert", {**SIZES, "local_attention": 5}),
    "modernbert, no window": ("ModernBert", {
        **SIZES, "local_attention": 4, "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True,
    }),
    "mpt of 6 heads, scaled": ("Mpt", {
        "vocab_size": 50, "d_model": 48, "n_heads": 6, "n_layers": 2,
        "attn_config": {"softmax_scale": 0.2},
    }),
}  # fmt: skip
FOUR = {"num_hidden_layers": 4}
NARROW = {"sliding_window": 3}
USED = {**NARROW, "use_sliding_window": True}
MODELS |= {
    "smollm3, windows": ("SmolLM3", {
        **GROUPED, **FOUR, **USED, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
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
    "deepseek_v2, yarn": ("DeepseekV2", {**LATENT, "rope_scaling": YARN}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "rope_parameters": {**YARN, "rope_theta": 500.0}}),
    "deepseek_v3, biases": ("DeepseekV3", {**LATENT, "attention_bias": True}),
}

SPECS = json.loads((Path(__file__).parent / "specs_of_models.json").read_text())
"""The fields of the specs of all layers, or of the first one where all are alike. With them each
layer of a saved model gave what it gives within the model, until 0.2.0."""


def config_of(kind: str, sizes: dict[str, Any], folder: Path) -> Path:
    getattr(hf, f"{kind}Config")(**sizes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_the_config_of_a_model_says_what_each_layer_is(name: str, tmp_path: Path):
    kind, sizes = MODELS[name]
    folder, count = config_of(kind, sizes, tmp_path), sizes.get("num_hidden_layers", 2)
    for number in range(count):
        fields = SPECS[name][number if len(SPECS[name]) > 1 else 0]
        assert spec_of_config(folder, number) == AttentionSpec.from_dict(fields)
    with pytest.raises(WeightsError, match=f"so there is no layer {count}"):
        spec_of_config(folder, count)


UNSAID = [
    name for name, family in FAMILIES.items()
    if family.bias is None and not family.refused and family.bias_key not in family.defaults
]  # fmt: skip


@pytest.mark.parametrize("name", UNSAID)
def test_a_config_without_a_word_on_biases_has_those_of_the_class(name: str):
    config = hf.AutoConfig.for_model(name)
    there = getattr(config, FAMILIES[name].bias_key, False)
    assert FAMILIES[name].usual_bias == ("all" if there else "none")
