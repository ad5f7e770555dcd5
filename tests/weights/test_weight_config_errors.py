"""Errors for a config.json that a spec cannot express."""

from __future__ import annotations

import json

import pytest
from configs import GEMMA2, GQA

from attn_export.errors import UsageError, WeightsError
from attn_export.weights.from_config import spec_of_config


def config(folder, family, **keys):
    (folder / "config.json").write_text(json.dumps({"model_type": family, **keys}))
    return folder


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
    with pytest.raises(UsageError) as error:
        spec_of_config(config(tmp_path, family, **{**GQA, **keys}))
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
    said = ""
    try:
        spec_of_config(config(tmp_path, **{"family": "gemma3_text", **GEMMA2, key: value}))
    except UsageError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000, ""])
def test_a_config_that_is_not_json_is_an_error(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(WeightsError, match=r"config\.json (is not JSON|holds no JSON object)"):
        spec_of_config(tmp_path)


def test_the_config_is_not_needed_to_be_complete_where_its_class_has_defaults(tmp_path):
    # As published with google/gemma-3-4b-it: heads and widths are those of the class.
    found = spec_of_config(config(tmp_path, "gemma2", hidden_size=16, sliding_window=8))
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (8, 4, 256)
    assert found.scale == 256**-0.5
