"""Errors for a config.json that contradicts a spec, or that a spec cannot express."""

from __future__ import annotations

import json
import math

import pytest
from checkpoints import (
    BERT,
    FALCON,
    GEMMA3,
    LLAMA,
    PHI3,
    random_weights,
    save,
    spec_of,
    under,
)  # fmt: skip
from configs import (
    DECODER,
    FALCON_AT,
    GEMMA2,
    GEMMA3_SPEC,
    GQA,
    SELF,
    llama,
)

from attn_export.errors import UsageError, WeightsError
from attn_export.spec import AttentionSpec
from attn_export.weights.checkpoint import load_checkpoint

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
        {"weights_dtype": "int4", "block_size": 0, "scheme": "asymmetric"},
    ],
)
def test_a_spec_may_say_what_the_config_does_not(changes, tmp_path):
    spec = AttentionSpec.from_dict({**DECODER, **changes})
    assert load_checkpoint(llama(tmp_path), spec=spec).spec == spec


def test_a_causal_model_may_take_its_mask_from_outside_and_the_note_says_so(tmp_path):
    spec = AttentionSpec.from_dict({**DECODER, "causal": False, "attn_mask": "bool[B,1,L,S]"})
    loaded = load_checkpoint(llama(tmp_path), spec=spec)
    assert "the model is causal and the spec is not: attn_mask must hide later keys" in loaded.notes


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
        ("llama", {"rope_scaling": {"type": "su", "factor": 4}}, "rope_type = 'su'"),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type"),
        ("llama", {"rope_scaling": {"rope_type": "none"}}, "rope_type = 'none'"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}, "max_position_embeddings": None},
         "'max_position_embeddings'; it must be"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ("phi3", {"rope_scaling": {"type": "linear"}}, "Phi-3 knows longrope only"),
        ("phi3", {"rope_scaling": {"type": "yarn"}}, "rope_scaling.short_factor"),
        ("llama", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}},
         "no 'rope_scaling.long_factor'; it must be a list of numbers"),
        ("llama", {"rope_scaling": {"type": "longrope", "short_factor": ["x"]}},
         "rope_scaling.short_factor must be a positive number; got 'x'"),
        ("llama", {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
         "rotary_short_factors has 1 numbers"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("deberta-v2", {}, "disentangled attention has scores between contents and relative "
         "positions, which a spec cannot say; give the model's own code by --module"),
        ("mpt", {"d_model": 24, "n_heads": 6, "attn_config": {"clip_qkv": 8}},
         "attn_config.clip_qkv = 8 is not supported: give the model's own code by --module"),
        ("mpt", {"d_model": 24, "n_heads": 6, "attn_config": {"softmax_scale": 0}},
         "attn_config.softmax_scale must be a positive number"),
        ("mpt", {"d_model": 24, "n_heads": 6, "attn_config": [1]},
         "attn_config must be an object"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("gemma2", {"layer_types": ["chunked_attention"]}, "layer_types = 'chunked_attention'"),
        ("gemma2", {"layer_types": []}, "layer_types must be a list with an entry for layer 0"),
        ("gemma2", {"layer_types": "full_attention"}, "layer_types must be a list"),
        ("mamba", {}, "the model's own code by --module PATH.py:FUNCTION"),
        ("cohere", {**GQA, "use_qk_norm": True}, "use_qk_norm = True is not supported"),
        ("gpt_bigcode", {"multi_query": False}, "multi_query = False is not supported"),
        ("smollm3", {**GQA, "no_rope_layers": []}, "must be a list with an entry for layer 0"),
        ("mamba", {}, "model_type 'mamba', which is not in the table"),
        (None, {}, "model_type ''"),
        ("llama", {"hidden_size": None}, "'hidden_size'; it must be a whole number"),
        ("llama", {"num_attention_heads": 0}, "num_heads must be at least 1"),
        ("llama", {"num_attention_heads": "6"}, "num_attention_heads must be a whole number"),
        ("llama", {"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ("llama", {"hidden_size": 10**9}, "at most"),
        ("llama", {"rope_theta": -1}, "rope_theta must be a positive number; got -1"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta must be a positive number"),
        ("llama", {"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false; got 'yes'"),
        ("mistral", {"sliding_window": 3.5}, "sliding_window must be a whole number"),
        ("mistral", {"sliding_window": -3}, "window_left must be at least 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive"),
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
    path = save(tmp_path, stored, {"model_type": "mamba", "hidden_size": 7})
    loaded = load_checkpoint(path, spec=spec)
    assert "config.json was not compared: its model_type 'mamba' is not known" in loaded.notes


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
