"""Specs from a config.json of every family."""

from __future__ import annotations

import json

import pytest
from configs import (
    BUCKETS,
    DECODER,
    GEMMA2,
    GEMMA3_SPEC,
    GPT_OSS,
    GQA,
    LAYER_TYPES,
    LLAMA3,
    MHA,
    SIDES,
    SIXTEENTH,
    SIZES,
    T5_SIZES,
    T5_SPEC,
)

from attn_export import Subject
from attn_export.errors import SpecError, WeightsError
from attn_export.spec import AttentionSpec
from attn_export.weights.from_config import FAMILIES, spec_of_config

ROWS = [
    # family, keys, layer, which attention, what the spec is
    ("llama", GQA, 0, {}, DECODER),
    ("llama", {**SIZES, "rope_theta": 500000.0}, 0, {}, {**MHA, "bias": "none", "causal": True,
     "rotary": "half", "rotary_theta": 500000.0}),
    ("llama", {**GQA, "rope_scaling": LLAMA3}, 0, {}, {**DECODER, "rotary_scaling": "llama3",
     "rotary_factor": 8.0, "rotary_original_len": 8192}),
    ("llama", {**GQA, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}, 0, {}, {**DECODER,
     "rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_original_len": 8192, "rotary_theta":
     500000.0}),
    ("llama", {**GQA, "rope_scaling": {"type": "linear", "factor": 2}}, 0, {}, {**DECODER,
     "rotary_scaling": "linear", "rotary_factor": 2.0}),
    ("llama", {**GQA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 0, {}, {**DECODER,
     "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 4096}),
    ("llama", {**GQA, "rope_scaling": {"rope_type": "default"}}, 0, {}, DECODER),
    ("llama", {**GQA, "rope_scaling": {"type": "dynamic", "factor": 3.0}}, 0, {}, {**DECODER,
     "rotary_scaling": "dynamic", "rotary_factor": 3.0, "rotary_original_len": 4096}),
    ("llama", {**GQA, "rope_scaling": {**LLAMA3, "low_freq_factor": 2, "high_freq_factor": 8}}, 0,
     {}, {**DECODER, "rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_original_len": 8192,
     "rotary_low_freq": 2.0, "rotary_high_freq": 8.0}),
    ("llama", {**GQA, "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings":
     1024, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5}}, 0, {},
     {**DECODER, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 1024,
     "rotary_beta_fast": 16.0, "rotary_beta_slow": 2.0, "rotary_truncate": False,
     "rotary_magnitude": 1.5}),
    ("llama", {**GQA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0,
     "mscale_all_dim": 1.0}}, 0, {}, {**DECODER, "rotary_scaling": "yarn", "rotary_factor": 4.0,
     "rotary_original_len": 4096, "rotary_magnitude": 1.0}),
    ("llama", {**GQA, "attention_bias": True}, 0, {}, {**DECODER, "bias": "all"}),
    ("llama", GQA, 0, {}, {**DECODER, "bias": "q,k,v"}),
    ("mistral", {**GQA, "sliding_window": 16}, 0, {}, {**DECODER, "window_left": 15}),
    ("mistral", {**GQA, "sliding_window": None}, 0, {}, DECODER),
    ("mistral", GQA, 0, {}, {**DECODER, "window_left": 4095}),
    ("qwen2", {**GQA, "sliding_window": 16}, 30, {}, {**DECODER, "bias": "q,k,v"}),
    ("qwen2", {**GQA, "sliding_window": 16, "use_sliding_window": True}, 27, {}, {**DECODER, "bias":
     "q,k,v"}),
    ("qwen2", {**GQA, "sliding_window": 16, "use_sliding_window": True}, 28, {}, {**DECODER, "bias":
     "q,k,v", "window_left": 15}),
    ("qwen3", {**GQA, "rms_norm_eps": 1e-05}, 0, {}, {**DECODER, "qk_norm": "rms", "norm_eps":
     1e-05}),
    ("qwen3", {**GQA, "layer_types": LAYER_TYPES, "use_sliding_window": True, "sliding_window": 16},
     1, {}, {**DECODER, "qk_norm": "rms", "window_left": 15}),
    ("gemma", GQA, 0, {}, DECODER),
    ("gemma2", GEMMA2, 0, {}, {**DECODER, **SIXTEENTH, "softcap": 50.0, "window_left": 15}),
    ("gemma2", GEMMA2, 1, {}, {**DECODER, **SIXTEENTH, "softcap": 50.0}),
    ("gemma2", {**GEMMA2, "attn_logit_softcapping": None, "layer_types": LAYER_TYPES}, 1, {},
     {**DECODER, **SIXTEENTH, "window_left": 15}),
    ("gemma3_text", {**GEMMA2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 4, {},
     {**GEMMA3_SPEC, "window_left": 15, "rotary_theta": 10000.0}),
    ("gemma3_text", {**GEMMA2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 5, {},
     {**GEMMA3_SPEC, "rotary_theta": 1000000.0, "rotary_scaling": "linear", "rotary_factor": 8.0}),
    ("gemma3_text", {**GEMMA2, "rope_parameters": {"full_attention": {"rope_type": "default",
     "rope_theta": 700000.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 7000.0}}},
     0, {}, {**GEMMA3_SPEC, "window_left": 15, "rotary_theta": 7000.0}),
    ("gemma3_text", {**GEMMA2, "use_bidirectional_attention": True}, 0, {}, {**GEMMA3_SPEC,
     "causal": False, "window_left": 8, "window_right": 8}),
    ("gpt_oss", {**GPT_OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}, 0,
     {}, {**DECODER, "bias": "all", "sinks": True, "window_left": 15, "rotary_theta": 150000.0}),
    ("gpt_oss", GPT_OSS, 1, {}, {**DECODER, "bias": "all", "sinks": True, "rotary_theta": 150000.0,
     "rotary_scaling": "yarn", "rotary_factor": 32.0, "rotary_original_len": 4096,
     "rotary_truncate": False}),
    ("gpt_oss", {**GPT_OSS, "rope_scaling": {"rope_type": "linear", "factor": 2}}, 1, {},
     {**DECODER, "bias": "all", "sinks": True, "rotary_theta": 150000.0, "rotary_scaling": "linear",
     "rotary_factor": 2.0}),
    ("phi3", {**GQA, "sliding_window": 2047, "partial_rotary_factor": 0.75}, 0, {}, {**DECODER,
     "window_left": 2046, "rotary_dim": 6}),
    ("falcon", {**SIZES, "multi_query": True, "bias": False}, 0, {}, {**MHA, "bias": "none",
     "num_kv_heads": 1, "causal": True, "rotary": "half"}),
    ("falcon", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 3}, 0, {}, {**MHA,
     "num_kv_heads": 3, "causal": True, "rotary": "half"}),
    ("falcon", {**SIZES, "multi_query": False}, 0, {}, {**MHA, "causal": True, "rotary": "half"}),
    ("gpt2", {"n_embd": 24, "n_head": 6}, 0, {}, {**MHA, "causal": True, "scale": 0.5}),
    ("gpt2", {"n_embd": 24, "n_head": 6, "scale_attn_by_inverse_layer_idx": True}, 3, {}, {**MHA,
     "causal": True, "scale": 0.125}),
    ("gpt2", {"n_embd": 24, "n_head": 6, "scale_attn_weights": False}, 0, {}, {**MHA, "causal":
     True, "scale": 1.0}),
    ("gpt_neox", {"hidden_size": 24, "num_attention_heads": 3}, 0, {}, {**MHA, "num_heads": 3,
     "causal": True, "rotary": "half", "rotary_dim": 2}),
    ("gpt_neox", {**SIZES, "rotary_pct": 1.0, "rotary_emb_base": 5000}, 0, {}, {**MHA, "causal":
     True, "rotary": "half", "rotary_theta": 5000.0}),
    ("bloom", {"n_embed": 24, "n_head": 6}, 0, {}, {**MHA, "causal": True, "alibi": True}),
    ("bloom", SIZES, 0, {}, {**MHA, "causal": True, "alibi": True}),
    ("bert", SIZES, 0, {}, MHA),
    ("roberta", {**SIZES, "is_decoder": True}, 0, {}, {**MHA, "causal": True}),
    ("t5", T5_SIZES, 0, {"causal": False}, {**T5_SPEC, **BUCKETS}),
    ("t5", T5_SIZES, 0, {"causal": True}, {**T5_SPEC, **BUCKETS, "causal": True}),
    ("t5", T5_SIZES, 0, {"cross": True}, {**T5_SPEC, "cross": True}),
    ("whisper", SIDES, 0, {"causal": False}, {"embed_dim": 24, "num_heads": 6, "bias": "q,v,out"}),
    ("whisper", SIDES, 0, {"causal": True}, {"embed_dim": 24, "num_heads": 4, "bias": "q,v,out",
     "causal": True}),
    ("mt5", {**T5_SIZES, "num_heads": 6}, 0, {"causal": False}, {**T5_SPEC, **BUCKETS}),
    ("mbart", SIDES, 0, {"causal": True}, {"embed_dim": 24, "num_heads": 4, "causal": True}),
    ("clip_vision_model", SIZES, 0, {}, MHA),
    ("vit", SIZES, 0, {}, MHA),
    ("vit", {**SIZES, "qkv_bias": False}, 0, {}, {**MHA, "bias": "out"}),
    ("modernbert", {**SIZES, "local_attention": 6}, 1, {}, {**MHA, "bias": "none", "rotary": "half",
     "window_left": 3, "window_right": 3}),
    ("modernbert", SIZES, 3, {}, {**MHA, "bias": "none", "rotary": "half", "rotary_theta":
     160000.0}),
    ("bart", SIDES, 0, {"cross": True}, {"embed_dim": 24, "num_heads": 4, "cross": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "keys", "layer", "which", "fields"), ROWS,
    ids=[f"{row[0]}-{number}" for number, row in enumerate(ROWS)],
)  # fmt: skip
def test_a_config_says_what_the_attention_is(family, keys, layer, which, fields, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **keys}))
    spec = spec_of_config(tmp_path, layer, which)
    said, expected = spec.to_dict(), AttentionSpec.from_dict(fields).to_dict()
    scale = said.pop("scale", spec.softmax_scale)
    assert scale == pytest.approx(AttentionSpec.from_dict(fields).softmax_scale)
    expected.pop("scale", None)
    if FAMILIES[family].bias is None and FAMILIES[family].bias_key not in {
        **FAMILIES[family].defaults,
        **keys,
    }:
        assert said["bias"] == FAMILIES[family].usual_bias
        expected["bias"] = said["bias"]  # the config does not say
    assert said == expected
    assert spec_of_config(path, layer, which) == spec


AGAINST_MODELS = {
    "cohere", "clip_text_model", "deepseek_v2", "deepseek_v3", "distilbert",
    "electra", "gpt_bigcode", "gptj", "granite",
    "mixtral", "modernbert", "mpt", "opt", "qwen3_moe", "smollm3", "starcoder2", "xlm-roberta",
}  # fmt: skip
"""Families of which layers are compared with those of saved models of transformers."""


def test_every_family_of_the_table_is_tested():
    taken = {name for name, family in FAMILIES.items() if not family.refused}
    assert {row[0] for row in ROWS} | AGAINST_MODELS == taken


def llama(folder, **keys):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **GQA, **keys}))
    return folder


def test_a_model_with_pictures_keeps_its_text_in_text_config(tmp_path):
    config = {"model_type": "gemma3", "text_config": GEMMA2, "vision_config": {"hidden_size": 7}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert spec_of_config(tmp_path).window_left == 15


def test_fields_change_what_the_config_says(tmp_path):
    changes = {"cache": "append", "attn_mask": "bool[B,1,1,S]"}
    assert spec_of_config(llama(tmp_path), 0, changes) == AttentionSpec.from_dict(
        {**DECODER, **changes}
    )
    assert not spec_of_config(tmp_path, fields={"causal": False}).causal
    assert spec_of_config(tmp_path, fields={"head_dim": 4}).head_dim == 4
    with pytest.raises(SpecError, match="unknown key 'cach'"):
        spec_of_config(tmp_path, fields={"cach": "append"})


def test_a_subject_of_a_config_has_weights_of_a_seed(tmp_path):
    first, same, other = (
        Subject.from_config(llama(tmp_path), seed=seed, cache="append") for seed in (1, 1, 2)
    )
    assert first.spec.cache == "append"
    weights = [subject.module.q_proj.weight for subject in (first, same, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


@pytest.mark.parametrize(
    ("keys", "layer", "fields", "message"),
    [
        ({"model_type": "shiny"}, 0, {}, r"model_type 'shiny'.*--module PATH.py:FUNCTION"),
        ({"model_type": "deberta"}, 0, {}, "disentangled attention.*--module PATH.py:FUNCTION"),
        ({"num_hidden_layers": 4}, 4, {}, "num_hidden_layers 4, so there is no layer 4"),
        ({"num_hidden_layers": 4}, -1, {}, "so there is no layer -1"),
        ({"model_type": "t5", "num_layers": 2, "num_decoder_layers": 6}, 2, {"causal": False},
         "num_layers 2, so there is no layer 2"),
        ({"model_type": "whisper", "num_hidden_layers": 8, "decoder_layers": 2}, 5,
         {"causal": True}, "decoder_layers 2, so there is no layer 5"),
        ({"hidden_size": None}, 0, {}, "no 'hidden_size'"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_suffice_is_refused(keys, layer, fields, message, tmp_path):
    with pytest.raises(WeightsError, match=message):
        spec_of_config(llama(tmp_path, **keys), layer, fields)


def test_a_config_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "config.json", tmp_path):
        with pytest.raises(WeightsError, match=r"config\.json does not exist; check the path"):
            spec_of_config(path)
