"""Specs from a config.json of every family."""

from __future__ import annotations

import json

import pytest
from checkpoints import (
    BERT,
    FALCON,
    GEMMA3,
    GPT2,
    LLAMA,
    MODERN,
    NEOX,
    OUT_PROJ,
    PHI3,
    T5,
    VIT,
    equal,
    random_weights,
    save,
    spec_of,
    t5,
    under,
)  # fmt: skip
from configs import (
    BUCKETS,
    DECODER,
    FALCON_AT,
    GEMMA2,
    GEMMA3_SPEC,
    GPT_OSS,
    GQA,
    LAYER_TYPES,
    LLAMA3,
    MHA,
    NEOX_AT,
    SELF,
    SIDES,
    SIXTEENTH,
    SIZES,
    T5_SIZES,
    T5_SPEC,
    llama,
    torch_close,
)

from attn_export.errors import SpecError
from attn_export.spec import AttentionSpec
from attn_export.weights.checkpoint import load_checkpoint
from attn_export.weights.from_config import FAMILIES

ROWS = [
    # family, keys, prefix, layer, layout, what the spec is
    ("llama", GQA, SELF, 0, LLAMA, DECODER),
    ("llama", {**SIZES, "rope_theta": 500000.0}, SELF, 0, LLAMA,
     {**MHA, "bias": "none", "causal": True, "rotary": "half", "rotary_theta": 500000.0}),
    ("llama", {**GQA, "rope_scaling": LLAMA3}, SELF, 0, LLAMA,
     {**DECODER, "rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_original_len": 8192}),
    ("llama", {**GQA, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, SELF, 0, LLAMA,
     {**DECODER, "rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_original_len": 8192,
      "rotary_theta": 5e5}),
    ("llama", {**GQA, "rope_scaling": {"type": "linear", "factor": 2}}, SELF, 0, LLAMA,
     {**DECODER, "rotary_scaling": "linear", "rotary_factor": 2.0}),
    ("llama", {**GQA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, SELF, 0, LLAMA,
     {**DECODER, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 4096}),
    ("llama", {**GQA, "rope_scaling": {"rope_type": "default"}}, SELF, 0, LLAMA, DECODER),
    ("llama", {**GQA, "rope_scaling": {"type": "dynamic", "factor": 3.0}}, SELF, 0, LLAMA,
     {**DECODER, "rotary_scaling": "dynamic", "rotary_factor": 3.0, "rotary_original_len": 4096}),
    ("llama", {**GQA, "rope_scaling": {**LLAMA3, "low_freq_factor": 2, "high_freq_factor": 8}},
     SELF, 0, LLAMA,
     {**DECODER, "rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_original_len": 8192,
      "rotary_low_freq": 2.0, "rotary_high_freq": 8.0}),
    ("llama", {**GQA, "rope_scaling": {
        "rope_type": "yarn", "original_max_position_embeddings": 1024, "beta_fast": 16,
        "beta_slow": 2, "truncate": False, "attention_factor": 1.5}}, SELF, 0, LLAMA,
     {**DECODER, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 1024,
      "rotary_beta_fast": 16.0, "rotary_beta_slow": 2.0, "rotary_truncate": False,
      "rotary_magnitude": 1.5}),
    ("llama", {**GQA, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}}, SELF, 0, LLAMA,
     {**DECODER, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 4096,
      "rotary_magnitude": 1.0}),
    ("llama", {**GQA, "attention_bias": True}, SELF, 0, LLAMA, {**DECODER, "bias": "all"}),
    ("llama", GQA, SELF, 0, LLAMA, {**DECODER, "bias": "q,k,v"}),
    ("mistral", {**GQA, "sliding_window": 16}, SELF, 0, LLAMA, {**DECODER, "window_left": 15}),
    ("mistral", {**GQA, "sliding_window": None}, SELF, 0, LLAMA, DECODER),
    ("mistral", GQA, SELF, 0, LLAMA, {**DECODER, "window_left": 4095}),
    ("qwen2", {**GQA, "sliding_window": 16}, SELF, 30, LLAMA, {**DECODER, "bias": "q,k,v"}),
    ("qwen2", {**GQA, "sliding_window": 16, "use_sliding_window": True}, SELF, 27, LLAMA,
     {**DECODER, "bias": "q,k,v"}),
    ("qwen2", {**GQA, "sliding_window": 16, "use_sliding_window": True}, SELF, 28, LLAMA,
     {**DECODER, "bias": "q,k,v", "window_left": 15}),
    ("qwen3", {**GQA, "rms_norm_eps": 1e-5}, SELF, 0, LLAMA,
     {**DECODER, "qk_norm": "rms", "norm_eps": 1e-5}),
    ("qwen3", {**GQA, "layer_types": LAYER_TYPES, "use_sliding_window": True,
               "sliding_window": 16}, SELF, 1, LLAMA,
     {**DECODER, "qk_norm": "rms", "window_left": 15}),
    ("gemma", GQA, SELF, 0, LLAMA, DECODER),
    ("gemma2", GEMMA2, SELF, 0, LLAMA,
     {**DECODER, **SIXTEENTH, "softcap": 50.0, "window_left": 15}),
    ("gemma2", GEMMA2, SELF, 1, LLAMA, {**DECODER, **SIXTEENTH, "softcap": 50.0}),
    ("gemma2", {**GEMMA2, "attn_logit_softcapping": None, "layer_types": LAYER_TYPES}, SELF, 1,
     LLAMA, {**DECODER, **SIXTEENTH, "window_left": 15}),
    ("gemma3_text", {**GEMMA2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, SELF, 4,
     GEMMA3, {**GEMMA3_SPEC, "window_left": 15, "rotary_theta": 10000.0}),
    ("gemma3_text", {**GEMMA2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, SELF, 5,
     GEMMA3,
     {**GEMMA3_SPEC, "rotary_theta": 1e6, "rotary_scaling": "linear", "rotary_factor": 8.0}),
    ("gemma3_text", {**GEMMA2, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 7e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7e3}}}, SELF, 0,
     GEMMA3, {**GEMMA3_SPEC, "window_left": 15, "rotary_theta": 7e3}),
    ("gemma3_text", {**GEMMA2, "use_bidirectional_attention": True}, SELF, 0, GEMMA3,
     {**GEMMA3_SPEC, "causal": False, "window_left": 8, "window_right": 8}),
    ("gpt_oss", {**GPT_OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
     SELF, 0, LLAMA,
     {**DECODER, "bias": "all", "sinks": True, "window_left": 15, "rotary_theta": 150000.0}),
    ("gpt_oss", GPT_OSS, SELF, 1, LLAMA,
     {**DECODER, "bias": "all", "sinks": True, "rotary_theta": 150000.0,
      "rotary_scaling": "yarn", "rotary_factor": 32.0, "rotary_original_len": 4096,
      "rotary_truncate": False}),
    ("gpt_oss", {**GPT_OSS, "rope_scaling": {"rope_type": "linear", "factor": 2}}, SELF, 1, LLAMA,
     {**DECODER, "bias": "all", "sinks": True, "rotary_theta": 150000.0,
      "rotary_scaling": "linear", "rotary_factor": 2.0}),
    ("phi3", {**GQA, "sliding_window": 2047, "partial_rotary_factor": 0.75}, SELF, 0, PHI3,
     {**DECODER, "window_left": 2046, "rotary_dim": 6}),
    ("falcon", {**SIZES, "multi_query": True, "bias": False}, FALCON_AT, 0, FALCON,
     {**MHA, "bias": "none", "num_kv_heads": 1, "causal": True, "rotary": "half"}),
    ("falcon", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 3}, FALCON_AT, 0,
     FALCON, {**MHA, "num_kv_heads": 3, "causal": True, "rotary": "half"}),
    ("falcon", {**SIZES, "multi_query": False}, FALCON_AT, 0, NEOX,
     {**MHA, "causal": True, "rotary": "half"}),
    ("gpt2", {"n_embd": 24, "n_head": 6}, "h.{}.attn.", 0, GPT2,
     {**MHA, "causal": True, "scale": 0.5}),
    ("gpt2", {"n_embd": 24, "n_head": 6, "scale_attn_by_inverse_layer_idx": True}, "h.{}.attn.", 3,
     GPT2, {**MHA, "causal": True, "scale": 0.125}),
    ("gpt2", {"n_embd": 24, "n_head": 6, "scale_attn_weights": False}, "h.{}.attn.", 0, GPT2,
     {**MHA, "causal": True, "scale": 1.0}),
    ("gpt_neox", {"hidden_size": 24, "num_attention_heads": 3}, NEOX_AT, 0, NEOX,
     {**MHA, "num_heads": 3, "causal": True, "rotary": "half", "rotary_dim": 2}),
    ("gpt_neox", {**SIZES, "rotary_pct": 1.0, "rotary_emb_base": 5000}, NEOX_AT, 0, NEOX,
     {**MHA, "causal": True, "rotary": "half", "rotary_theta": 5000.0}),
    ("bloom", {"n_embed": 24, "n_head": 6}, "h.{}.self_attention.", 0, NEOX,
     {**MHA, "causal": True, "alibi": True}),
    ("bloom", SIZES, "h.{}.self_attention.", 0, NEOX, {**MHA, "causal": True, "alibi": True}),
    ("bert", SIZES, "bert.encoder.layer.{}.attention.", 0, BERT, MHA),
    ("roberta", {**SIZES, "is_decoder": True}, "roberta.encoder.layer.{}.attention.", 0, BERT,
     {**MHA, "causal": True}),
    ("t5", T5_SIZES, "encoder.block.{}.layer.0.SelfAttention.", 0, t5, {**T5_SPEC, **BUCKETS}),
    ("t5", T5_SIZES, "decoder.block.{}.layer.0.SelfAttention.", 0, t5,
     {**T5_SPEC, **BUCKETS, "causal": True}),
    ("t5", T5_SIZES, "decoder.block.{}.layer.1.EncDecAttention.", 0, T5,
     {**T5_SPEC, "cross": True}),
    ("whisper", SIDES, "model.encoder.layers.{}.self_attn.", 0, OUT_PROJ,
     {"embed_dim": 24, "num_heads": 6, "bias": "q,v,out"}),
    ("whisper", SIDES, "model.decoder.layers.{}.self_attn.", 0, OUT_PROJ,
     {"embed_dim": 24, "num_heads": 4, "bias": "q,v,out", "causal": True}),
    ("mt5", {**T5_SIZES, "num_heads": 6}, "encoder.block.{}.layer.0.SelfAttention.", 0, t5,
     {**T5_SPEC, **BUCKETS}),
    ("mbart", SIDES, "model.decoder.layers.{}.self_attn.", 0, OUT_PROJ,
     {"embed_dim": 24, "num_heads": 4, "causal": True}),
    ("clip_vision_model", SIZES, "vision_model.encoder.layers.{}.self_attn.", 0, OUT_PROJ, MHA),
    ("vit", SIZES, "vit.encoder.layer.{}.attention.", 0, VIT, MHA),
    ("vit", {**SIZES, "qkv_bias": False}, "vit.encoder.layer.{}.attention.", 0, VIT,
     {**MHA, "bias": "out"}),
    ("modernbert", {**SIZES, "local_attention": 6}, "layers.{}.attn.", 1, MODERN,
     {**MHA, "bias": "none", "rotary": "half", "window_left": 3, "window_right": 3}),
    ("modernbert", SIZES, "model.layers.{}.attn.", 3, MODERN,
     {**MHA, "bias": "none", "rotary": "half", "rotary_theta": 160000.0}),
    ("bart", SIDES, "model.decoder.layers.{}.encoder_attn.", 0, OUT_PROJ,
     {"embed_dim": 24, "num_heads": 4, "cross": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "keys", "prefix", "layer", "write", "fields"), ROWS,
    ids=[f"{row[0]}-{number}" for number, row in enumerate(ROWS)],
)  # fmt: skip
def test_a_config_says_what_the_attention_is(family, keys, prefix, layer, write, fields, tmp_path):
    spec = AttentionSpec.from_dict(fields)
    weights = random_weights(spec)
    stored = under(prefix.format(layer), write(spec, weights))
    path = save(tmp_path, stored, {"model_type": family, **keys})
    loaded = load_checkpoint(path, layer=str(layer))
    said = loaded.spec.to_dict()
    expected = spec.to_dict()
    assert said.pop("scale", spec.softmax_scale) == pytest.approx(spec.softmax_scale)
    expected.pop("scale", None)
    assert said == expected
    if write is GEMMA3:
        weights = {n: weights[n] - 1 + 1 if "_norm" in n else t for n, t in weights.items()}
    assert equal(loaded.weights, weights)


@pytest.mark.parametrize(
    ("family", "keys", "prefix", "layer", "write", "fields"), ROWS,
    ids=[f"{row[0]}-{number}" for number, row in enumerate(ROWS)],
)  # fmt: skip
def test_a_config_alone_says_the_same(family, keys, prefix, layer, write, fields, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **keys}))
    loaded = load_checkpoint(tmp_path, layer=prefix.format(layer))
    said, expected = loaded.spec.to_dict(), AttentionSpec.from_dict(fields).to_dict()
    scale = said.pop("scale", loaded.spec.softmax_scale)
    assert scale == pytest.approx(AttentionSpec.from_dict(fields).softmax_scale)
    expected.pop("scale", None)
    if FAMILIES[family].bias is None and FAMILIES[family].bias_key not in {
        **FAMILIES[family].defaults,
        **keys,
    }:
        assert said["bias"] == FAMILIES[family].usual_bias
        expected["bias"] = said["bias"]  # tensors would decide
    assert said == expected
    assert loaded.weights is None
    assert load_checkpoint(path, layer=prefix.format(layer)) == loaded


AGAINST_MODELS = {
    "cohere", "clip_text_model", "deepseek_v2", "deepseek_v3", "distilbert",
    "electra", "gpt_bigcode", "gptj", "granite",
    "mixtral", "modernbert", "mpt", "opt", "qwen3_moe", "smollm3", "starcoder2", "xlm-roberta",
}  # fmt: skip
"""Families of which layers are compared with those of saved models of transformers."""


def test_every_family_of_the_table_is_tested():
    taken = {name for name, family in FAMILIES.items() if not family.refused}
    assert {row[0] for row in ROWS} | AGAINST_MODELS == taken


def test_a_model_with_pictures_keeps_its_text_in_text_config(tmp_path):
    spec = AttentionSpec.from_dict({**GEMMA3_SPEC, "window_left": 15})
    weights = random_weights(spec)
    vision = spec_of(num_kv_heads=6, bias="all")
    stored = under("language_model.model.layers.0.self_attn.", GEMMA3(spec, weights)) | under(
        "vision_tower.vision_model.encoder.layers.0.self_attn.",
        OUT_PROJ(vision, random_weights(vision)),
    )
    config = {"model_type": "gemma3", "text_config": GEMMA2, "vision_config": {"hidden_size": 7}}
    loaded = load_checkpoint(save(tmp_path, stored, config))
    assert loaded.spec.window_left == 15
    assert torch_close(loaded.weights, weights)


def test_fields_change_what_the_config_says(tmp_path):
    path = llama(tmp_path)
    spec = load_checkpoint(path, fields={"cache": "append", "attn_mask": "bool[B,1,1,S]"}).spec
    assert spec == AttentionSpec.from_dict(
        {**DECODER, "cache": "append", "attn_mask": "bool[B,1,1,S]"}
    )
    assert not load_checkpoint(path, fields={"causal": False}).spec.causal
    narrow = AttentionSpec.from_dict({**DECODER, "head_dim": 4})
    other = llama(tmp_path / "narrow", spec=narrow)
    assert load_checkpoint(other, fields={"head_dim": 4}).spec == narrow
    with pytest.raises(SpecError, match="unknown key 'cach'"):
        load_checkpoint(path, fields={"cach": "append"})


def test_fields_change_a_given_spec_too(tmp_path):
    path = llama(tmp_path)
    spec = AttentionSpec.from_dict(DECODER)
    assert load_checkpoint(path, spec=spec, fields={"cache": "append"}).spec.cache == "append"


def test_tensors_decide_about_biases_where_the_config_is_silent(tmp_path):
    spec = AttentionSpec.from_dict({**DECODER, "bias": "q,k,v"})
    loaded = load_checkpoint(llama(tmp_path, spec=spec))
    assert loaded.spec.bias == "q,k,v"
    assert any("which biases there are: q,k,v" in note for note in loaded.notes)
