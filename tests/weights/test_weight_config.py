"""What a config.json of every family says, and what it cannot say."""

from __future__ import annotations

import json
import math

import pytest
from checkpoints import (
    BERT,
    FALCON,
    GEMMA3,
    GPT2,
    LLAMA,
    NEOX,
    OUT_PROJ,
    PHI3,
    T5,
    equal,
    random_weights,
    save,
    spec_of,
    t5,
    under,
)  # fmt: skip

from attn_export.errors import SpecError, UsageError, WeightsError
from attn_export.spec import AttentionSpec
from attn_export.weights import load_checkpoint
from attn_export.weights.families import FAMILIES

SIZES = {"hidden_size": 24, "num_attention_heads": 6}
GQA = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096}
DECODER = {"embed_dim": 24, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "bias": "none",
           "causal": True, "rotary": "half"}  # fmt: skip
MHA = {"embed_dim": 24, "num_heads": 6, "bias": "all"}
SELF = "model.layers.{}.self_attn."
LAYER_TYPES = ["full_attention", "sliding_attention"]
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GEMMA2 = {**GQA, "sliding_window": 16, "query_pre_attn_scalar": 64}
SIXTEENTH = {"scale": 0.125}
GEMMA3_SPEC = {**DECODER, **SIXTEENTH, "qk_norm": "rms"}
GPT_OSS = {**GQA, "attention_bias": True, "sliding_window": 16}
FALCON_AT, NEOX_AT = "transformer.h.{}.self_attention.", "gpt_neox.layers.{}.attention."
T5_SIZES = {"d_model": 24, "num_heads": 6, "d_kv": 5, "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20}  # fmt: skip
T5_SPEC = {"embed_dim": 24, "num_heads": 6, "head_dim": 5, "bias": "none", "scale": 1.0}
BUCKETS = {"relative_buckets": 8, "relative_max_distance": 20}
SIDES = {"d_model": 24, "encoder_attention_heads": 6, "decoder_attention_heads": 4}

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


def test_every_family_of_the_table_is_tested():
    assert {row[0] for row in ROWS} == set(FAMILIES)


def llama(tmp_path, keys=GQA, *, spec=None, family="llama"):
    """A Llama whose tensors are as its config says, if it is not told otherwise."""
    spec = spec or AttentionSpec.from_dict(DECODER)
    stored = under(SELF.format(0), LLAMA(spec, random_weights(spec)))
    return save(tmp_path, stored, {"model_type": family, **keys})


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


def torch_close(ours, theirs):
    return all(((ours[name] - theirs[name]).abs() < 1e-6).all() for name in theirs)


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


# -- contradictions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": 1, "head_dim": 16}, "num_heads is 3 in the spec and 6"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3 in the spec and 2"),
        ({"head_dim": 4}, "head_dim is 4 in the spec and 8"),
        ({"rotary_theta": 500000.0}, "rotary_theta is 500000.0 in the spec and 10000.0"),
        ({"rotary_theta": 10000.1}, "rotary_theta is 10000.1 in the spec and 10000.0"),
        ({"rotary": "interleaved"}, "rotary is 'interleaved' in the spec and 'half'"),
        ({"rotary": "none"}, "rotary is 'none' in the spec and 'half'"),
        ({"rotary_dim": 4}, "rotary_dim is 4 in the spec and 8"),
        ({"rotary_scaling": "linear"}, "rotary_scaling is 'linear' in the spec and 'none'"),
        ({"add_zero_attn": True}, "add_zero_attn is True in the spec and False"),
        ({"softcap": 50.0}, "softcap is 50.0 in the spec and None"),
        ({"window_left": 7}, "window_left is 7 in the spec and None"),
        ({"qk_norm": "rms"}, "qk_norm is 'rms' in the spec and 'none'"),
        ({"sinks": True}, "sinks is True in the spec and False"),
        ({"alibi": True}, "alibi is True in the spec and False"),
        ({"relative_buckets": 8}, "relative_buckets is 8 in the spec and 0"),
        ({"bias": "all"}, "bias is 'all' in the spec and 'none'"),
        ({"scale": 1.0}, "scale is 1.0 in the spec and 0.35"),
        ({"causal": False}, "causal is False in the spec and True"),
    ],
)
def test_a_spec_that_contradicts_the_config_is_an_error_with_both_values(
    changes, message, tmp_path
):
    path = llama(tmp_path, {**GQA, "attention_bias": False})
    with pytest.raises(WeightsError) as error:
        load_checkpoint(path, spec=AttentionSpec.from_dict({**DECODER, **changes}))
    assert message in str(error.value)
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_magnitude": 1.0}, "rotary_magnitude is 1.0 in the spec and 1.138"),
        ({"rotary_magnitude": 0.1 * math.log(4) + 1}, None),
        ({"rotary_low_freq": 2.0}, None),
        ({"rotary_beta_fast": 16.0}, "rotary_beta_fast is 16.0 in the spec and 32.0"),
        ({"rotary_truncate": False}, "rotary_truncate is False in the spec and True"),
        ({"rotary_original_len": 7}, "rotary_original_len is 7 in the spec and 4096"),
        ({"rotary_factor": 2.0}, "rotary_factor is 2.0 in the spec and 4.0"),
        ({"rotary_scaling": "linear"}, "rotary_scaling is 'linear' in the spec and 'yarn'"),
    ],
)
def test_constants_of_a_scaling_are_compared_where_they_are_used(changes, message, tmp_path):
    path = llama(tmp_path, {**GQA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    yarn = {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 4096}
    spec = AttentionSpec.from_dict({**DECODER, **yarn, **changes})
    if message is None:
        assert load_checkpoint(path, spec=spec).spec == spec
        return
    with pytest.raises(WeightsError) as error:
        load_checkpoint(path, spec=spec)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"packed_qkv": True, "position_ids": True},
        {"cache": "append", "attn_weights": True, "dropout": 0.1, "attn_mask": "bool[B,1,1,S]"},
        {"scale": 8**-0.5},
        {"norm_eps": 1e-3, "rotary_factor": 3.0, "rotary_original_len": 7},
        {"rotary_theta": 10000},
    ],
)
def test_a_spec_may_say_what_the_config_does_not(changes, tmp_path):
    spec = AttentionSpec.from_dict({**DECODER, **changes})
    assert load_checkpoint(llama(tmp_path), spec=spec).spec == spec


def test_a_causal_model_may_take_its_mask_from_outside_and_the_note_says_so(tmp_path):
    spec = AttentionSpec.from_dict({**DECODER, "causal": False, "attn_mask": "bool[B,1,L,S]"})
    loaded = load_checkpoint(llama(tmp_path), spec=spec)
    assert (
        "the model is causal and the spec is not: attn_mask has to hide later keys" in loaded.notes
    )


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"num_key_value_heads": 3},
         ["k_proj.weight is [16, 24], expected [24, 24] (num_key_value_heads 3 * head_dim 8"]),
        ({"head_dim": 4},
         ["q_proj.weight is [48, 24], expected [24, 24] (num_attention_heads 6 * head_dim 4",
          "o_proj.weight is [24, 48], expected [24, 24]"]),
        ({"hidden_size": 32}, ["q_proj.weight is [48, 24], expected [48, 32]", "hidden_size 32"]),
        ({"attention_bias": True}, ["q_proj.bias [48] is missing", "o_proj.bias [24] is missing"]),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_the_tensors_is_an_error_with_the_key(keys, parts, tmp_path):
    with pytest.raises(WeightsError) as error:
        load_checkpoint(llama(tmp_path, {**GQA, **keys}))
    for part in (*parts, "config.json"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


# -- what it cannot say --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ("llama", {"rope_scaling": {"type": "su", "factor": 4}}, "rope_type = 'su'"),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type"),
        ("llama", {"rope_scaling": {"rope_type": "none"}}, "rope_type = 'none'"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}, "max_position_embeddings": None},
         "'max_position_embeddings'; it has to be"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling has to be an object"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 4}}, "in Phi-3 it means LongRoPE"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("falcon", {"alibi": True}, "alibi = True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("gemma2", {"layer_types": ["chunked_attention"]}, "layer_types = 'chunked_attention'"),
        ("gemma2", {"layer_types": []}, "layer_types has to be a list with an entry for layer 0"),
        ("gemma2", {"layer_types": "full_attention"}, "layer_types has to be a list"),
        ("mixtral", {}, "model_type 'mixtral'; known: llama, mistral"),
        (None, {}, "model_type ''"),
        ("llama", {"hidden_size": None}, "'hidden_size'; it has to be a whole number"),
        ("llama", {"num_attention_heads": 0}, "num_heads has to be at least 1"),
        ("llama", {"num_attention_heads": "6"}, "num_attention_heads has to be a whole number"),
        ("llama", {"num_attention_heads": True}, "num_attention_heads has to be a whole number"),
        ("llama", {"hidden_size": 10**9}, "at most"),
        ("llama", {"rope_theta": -1}, "rope_theta has to be a positive number; got -1"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta has to be a positive number"),
        ("llama", {"rope_theta": 10**400}, "rope_theta has to be a positive number"),
        ("llama", {"attention_bias": "yes"}, "attention_bias has to be true or false; got 'yes'"),
        ("mistral", {"sliding_window": 3.5}, "sliding_window has to be a whole number"),
        ("mistral", {"sliding_window": -3}, "window_left has to be at least 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar has to be a positive"),
    ],
)  # fmt: skip
def test_a_config_that_our_attention_cannot_be_is_refused_by_name(family, keys, message, tmp_path):
    folder = {"falcon": (FALCON_AT, FALCON), "bert": ("encoder.layer.{}.attention.", BERT)}
    prefix, write = folder.get(family, (SELF, PHI3 if family == "phi3" else LLAMA))
    spec = spec_of()
    stored = under(prefix.format(0), write(spec, random_weights(spec)))
    path = save(tmp_path, stored, {"model_type": family, **GQA, **keys})
    with pytest.raises(UsageError) as error:
        load_checkpoint(path)
    assert message in str(error.value)
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value", [None, "x", -1, 0, 1.5, [], {}, True, 10**400, float("inf")], ids=range(10)
)
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window",
        "rope_theta", "rope_scaling", "rope_parameters", "query_pre_attn_scalar", "layer_types",
        "attn_logit_softcapping", "rms_norm_eps", "sliding_window_pattern", "text_config",
        "partial_rotary_factor", "model_type", "rope_local_base_freq", "attention_bias",
    ],
)  # fmt: skip
def test_no_value_of_any_key_is_more_than_a_line_of_error(key, value, tmp_path):
    spec = AttentionSpec.from_dict({**GEMMA3_SPEC, "window_left": 15})
    stored = under(SELF.format(0), GEMMA3(spec, random_weights(spec)))
    path = save(tmp_path, stored, {"model_type": "gemma3_text", **GEMMA2, key: value})
    said = ""
    try:
        load_checkpoint(path)
    except UsageError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000


# -- with and without it -------------------------------------------------------------------------


def test_without_spec_and_config_the_error_says_what_to_give(tmp_path):
    path = save(tmp_path, LLAMA(spec_of(), random_weights(spec_of())))
    with pytest.raises(WeightsError, match=r"give SPEC\.toml, or put the model's config\.json"):
        load_checkpoint(path)


def test_a_config_of_another_kind_of_model_is_noted_where_there_is_a_spec(tmp_path):
    spec = spec_of()
    stored = under(SELF.format(0), LLAMA(spec, random_weights(spec)))
    path = save(tmp_path, stored, {"model_type": "mixtral", "hidden_size": 7})
    loaded = load_checkpoint(path, spec=spec)
    assert "config.json was not compared: its model_type 'mixtral' is not known" in loaded.notes


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000, ""])
def test_a_config_that_is_not_json_is_an_error(text, tmp_path):
    path = llama(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(WeightsError, match=r"config\.json (is not JSON|holds no JSON object)"):
        load_checkpoint(path)


def test_the_config_is_not_needed_to_be_complete_where_its_class_has_defaults(tmp_path):
    # As published with google/gemma-3-4b-it: heads and widths are those of the class.
    spec = AttentionSpec.from_dict({
        "embed_dim": 16, "num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "bias": "none",
    })  # fmt: skip
    stored = under(SELF.format(0), LLAMA(spec, random_weights(spec)))
    path = save(tmp_path, stored, {"model_type": "gemma2", "hidden_size": 16, "sliding_window": 8})
    loaded = json.loads(json.dumps(load_checkpoint(path).spec.to_dict()))
    assert (loaded["num_heads"], loaded["num_kv_heads"], loaded["head_dim"]) == (8, 4, 256)
    assert loaded["scale"] == 256**-0.5
