"""Refusals of a spec, with the rule and the values, and valid combinations."""

from __future__ import annotations

import math

import pytest
from specs import make, refuses

from attn_export.errors import SpecError
from attn_export.spec import AttentionSpec

LONGROPE = {
    "rotary": "half", "rotary_scaling": "longrope", "rotary_short_factors": [1.0] * 4,
    "rotary_long_factors": [2.0] * 4,
}  # fmt: skip

REFUSED = [
    # changes, and what the message has to say
    ({"num_heads": 5}, ["embed_dim 32", "does not divide by num_heads 5", "head_dim"]),
    ({"num_heads": 8, "num_kv_heads": 3}, ["num_heads 8", "num_kv_heads 3", "1, 2, 4, 8"]),
    ({"num_kv_heads": 8}, ["num_heads 4", "num_kv_heads 8", "1, 2, 4"]),
    ({"num_heads": 0}, ["num_heads must be at least 1", "0"]),
    ({"embed_dim": 0}, ["embed_dim must be at least 1", "0"]),
    ({"embed_dim": -32}, ["embed_dim must be at least 1", "-32"]),
    ({"num_kv_heads": 0}, ["num_kv_heads must be at least 1", "0"]),
    ({"num_kv_heads": -2}, ["num_kv_heads must be at least 1", "-2"]),
    ({"head_dim": 0}, ["head_dim must be at least 1", "0"]),
    ({"v_head_dim": 0}, ["v_head_dim must be at least 1", "0"]),
    ({"cross": True, "kdim": 0}, ["kdim must be at least 1", "0"]),
    ({"cross": True, "vdim": -7}, ["vdim must be at least 1", "-7"]),
    ({"kdim": 16}, ["kdim 16", "embed_dim 32", "cross = true"]),
    ({"vdim": 12}, ["vdim 12", "embed_dim 32", "cross = true"]),
    ({"cross": True, "causal": True}, ["causal = true", "cross = true", "attn_mask"]),
    (
        {"cross": True, "cache": "in-place"},
        ["cache = 'in-place'", "cross = true", 'cache = "none"'],
    ),
    ({"cross": True, "cache": "append"}, ["cache = 'append'", "cross = true", 'cache = "none"']),
    ({"scale": 0}, ["scale must be positive and finite", "0"]),
    ({"scale": -0.5}, ["scale must be positive and finite", "-0.5"]),
    ({"scale": math.inf}, ["scale must be positive and finite", "inf"]),
    ({"scale": math.nan}, ["scale must be positive and finite", "nan"]),
    ({"dropout": 1.0}, ["dropout must be at least 0 and less than 1", "1.0"]),
    ({"dropout": -0.1}, ["dropout must be at least 0 and less than 1", "-0.1"]),
    ({"dropout": math.nan}, ["dropout must be at least 0 and less than 1", "nan"]),
    ({"cache": "static"}, ["cache must be one of none, append, in-place, state", "'static'"]),
    ({"cache": "state"}, ["cache = 'state'", "kind = 'softmax'", "none or append or in-place"]),
    ({"kind": "linear", "cache": "append"}, ["cache = 'append'", "'linear'", "none or state"]),
    (
        {"kind": "linear", "softcap": 2.0},
        ["kind = 'linear' with softcap = 2.0: linear attention has none; leave it out"],
    ),
    ({"kind": "linear", "conv_width": 1}, ["conv_width = 1", "at least 2, or 0"]),
    ({"conv_width": 4}, ["conv_width = 4 with kind = 'softmax'"]),
    ({"kind": "linear", "update_rule": "rwkv"}, ["linear, gated, delta, gated_delta", "'rwkv'"]),
    ({"dtype": "float64"}, ["dtype must be one of float32", "'float64'"]),
    ({"dtype": "two\nlines"}, ["dtype must be one of float32", "two"]),
    # types
    ({"num_heads": True}, ["num_heads must be of type int", "True"]),
    ({"num_heads": 4.0}, ["num_heads must be of type int", "4.0"]),
    ({"num_heads": "4"}, ["num_heads must be of type int", "'4'"]),
    ({"embed_dim": None}, ["embed_dim must be of type int", "None"]),
    ({"causal": "yes"}, ["causal must be of type bool", "'yes'"]),
    ({"scale": True}, ["scale must be of type float", "True"]),
    ({"scale": "1"}, ["scale must be of type float", "'1'"]),
    ({"dropout": None}, ["dropout must be of type float", "None"]),
    ({"dropout": False}, ["dropout must be of type float", "False"]),
    ({"attn_mask": True}, ["attn_mask must be of type str", "True"]),
    ({"attn_mask": None}, ["attn_mask must be of type str", "None"]),
    ({"cache": ["append"]}, ["cache must be of type str", "['append']"]),
    # keys
    ({"num_head": 4}, ["unknown key 'num_head'", "did you mean 'num_heads'?"]),
    ({"neox": "rotary"}, ["unknown key 'neox'", "known:", "attn_mask", "vdim"]),
    ({"qqq\nq": 1}, ["unknown key", "qqq"]),
    # masks
    ({"attn_mask": ""}, ["a dtype and a shape", "''"]),
    ({"attn_mask": "causal"}, ["a dtype and a shape", "'causal'"]),
    ({"attn_mask": "int[B,1,1,S]"}, ["a dtype and a shape", "'int[B,1,1,S]'"]),
    ({"attn_mask": "bool[S]"}, ["a dtype and a shape", "'bool[S]'"]),
    ({"attn_mask": "bool[1,B,1,1,S]"}, ["a dtype and a shape", "'bool[1,B,1,1,S]'"]),
    ({"attn_mask": "bool[B,1,1,S"}, ["a dtype and a shape", "'bool[B,1,1,S'"]),
    ({"attn_mask": "bool[B,1,1,L]"}, ["the last axis of attn_mask is S", "'bool[B,1,1,L]'"]),
    ({"attn_mask": "bool[B,S]"}, ["axis 'B' must be 'L' or '1'", "'bool[B,S]'"]),
    ({"attn_mask": "bool[B,L,S]"}, ["axis 'B' must be 'H' or '1'", "'bool[B,L,S]'"]),
    ({"attn_mask": "float[H,B,L,S]"}, ["axis 'H' must be 'B' or '1'", "'float[H,B,L,S]'"]),
    ({"attn_mask": "float[B,H,S,S]"}, ["axis 'S' must be 'L' or '1'", "'float[B,H,S,S]'"]),
    ({"attn_mask": "bool[B,,1,S]"}, ["axis ''", "'bool[B,,1,S]'"]),
    ({"attn_mask": "bool[2,1,1,S]"}, ["axis '2' must be 'B' or '1'", "'bool[2,1,1,S]'"]),
]


REFUSED_FEATURES = [
    # choices
    ({"qk_norm": "l2"}, ["qk_norm must be one of none, rms, layer", "'l2'"]),
    ({"rotary": "neox"}, ["rotary must be one of none, half, interleaved", "'neox'"]),
    ({"rotary": "half", "rotary_scaling": "ntk"},
     ["rotary_scaling must be one of none, linear, dynamic, llama3, yarn, longrope", "'ntk'"]),
    ({"rotary": "half", "rotary_scaling": "longrope"},
     ["rotary_short_factors has 0 numbers", "rotary_dim / 2 = 4"]),
    (LONGROPE | {"rotary_long_factors": [1.0] * 3},
     ["rotary_long_factors has 3 numbers", "rotary_dim / 2 = 4"]),
    (LONGROPE | {"rotary_long_factors": [1.0, 2.0, 0.0, 1.0]},
     ["rotary_long_factors must be positive and finite", "0.0"]),
    (LONGROPE | {"rotary_long_factors": [1.0, True, 2.0, 1.0]},
     ["rotary_long_factors must be of type list of numbers", "True"]),
    (LONGROPE | {"rotary_long_factors": "1,2,3,4"},
     ["rotary_long_factors must be of type list of numbers", "1,2,3,4"]),
    (LONGROPE | {"rotary_original_len": 1}, ["rotary_original_len 1", "at least 2"]),
    ({"rotary": "half", "rotary_scaling": "dynamic", "rotary_dim": 2},
     ["rotary_dim 2", "'dynamic'", "at least 4"]),
    ({"rotary": "half", "rotary_scaling": "llama3", "rotary_low_freq": 4.0},
     ["rotary_low_freq 4.0", "less than rotary_high_freq 4.0"]),
    ({"rotary": "half", "rotary_scaling": "yarn", "rotary_beta_slow": 64.0},
     ["rotary_beta_slow 64.0", "less than rotary_beta_fast 32.0"]),
    ({"position_ids": True}, ["position_ids = true", "rotary = 'none'"]),
    ({"packed_qkv": True, "bias": "q,v"}, ["packed_qkv = true", "bias = 'q,v'"]),
    ({"packed_qkv": True, "cross": True, "causal": False}, ["packed_qkv = true", "cross = true"]),
    # numbers
    *[
        ({name: value}, [f"{name} must be positive and finite", str(value)])
        for name in ("softcap", "norm_eps", "rotary_theta", "rotary_factor")
        for value in (0, -0.5, math.inf, math.nan)
    ],
    ({"rotary_original_len": 0}, ["rotary_original_len must be at least 1", "0"]),
    ({"relative_max_distance": -1}, ["relative_max_distance must be at least 1", "-1"]),
    ({"window_left": -1}, ["window_left must be at least 0", "-1"]),
    ({"window_right": -3}, ["window_right must be at least 0", "-3"]),
    ({"relative_buckets": -4}, ["relative_buckets must be at least 0", "-4"]),
    # positions
    *[
        ({"cross": True} | feature, [f"{next(iter(feature))} = ", "with cross = true", "no common"])
        for feature in (
            {"rotary": "half"}, {"alibi": True}, {"window_left": 0}, {"window_right": 2},
            {"relative_buckets": 32},
        )
    ],
    ({"rotary": "half", "rotary_dim": 3}, ["rotary_dim 3", "even", "head_dim 8"]),
    ({"rotary": "interleaved", "rotary_dim": 10}, ["rotary_dim 10", "at most head_dim 8"]),
    ({"rotary": "half", "rotary_dim": 0}, ["rotary_dim 0", "head_dim 8"]),
    ({"rotary": "half", "rotary_dim": -2}, ["rotary_dim -2", "head_dim 8"]),
    ({"rotary": "half", "head_dim": 5}, ["rotary_dim 5 must be even", "head_dim 5"]),
    *[
        ({"rotary_scaling": scaling}, [f"rotary_scaling = '{scaling}'", "rotary = 'none'"])
        for scaling in ("linear", "llama3", "yarn")
    ],
    ({"alibi_falcon": True}, ["alibi_falcon = true", "alibi = false", "set alibi = true"]),
    ({"relative_buckets": 3}, ["relative_buckets must be 0 or at least 4", "3"]),
    ({"relative_buckets": 128}, ["relative_max_distance 128", "more than relative_buckets 128"]),
    ({"relative_buckets": 8, "relative_max_distance": 8}, ["relative_max_distance 8"]),
    ({"causal": True, "window_right": 0}, ["window_right = 0", "causal = true"]),
    # quantised weights
    ({"weights_dtype": "int8", "dtype": "float16"}, ["'int8'", "dtype = 'float16'", "float32"]),
    *[
        ({"weights_dtype": text}, ["weights_dtype must be one of none, int8, int4", repr(text)])
        for text in ("int2", "", "q", "q=int4", "q,v=int4 out=int8")
    ],
    # what left
    ({"kv_dtype": "int8", "cache": "in-place"}, ["kv_dtype = 'int8' was removed in 0.3.0"]),
    ({"kv_dtype": "float16"}, ["kv_dtype = 'float16' was removed", "--kv-dtype float16"]),
    ({"kv_scale": "per-channel"}, ["kv_scale = 'per-channel' was removed in 0.3.0"]),
    ({"kv_scales_from": "file"}, ["kv_scales_from = 'file' was removed in 0.3.0"]),
    ({"activations": "dynamic-int8"}, ["activations = 'dynamic-int8' was removed in 0.3.0"]),
    ({"weights_dtype": "int4", "block_size": 64}, ["block_size = '64' was removed in 0.3.0"]),
    ({"weights_dtype": "int4", "block_size": 0}, ["block_size = '0' was removed in 0.3.0"]),
    ({"weights_dtype": "int8", "block_size": 32}, ["block_size = '32' was removed in 0.3.0"]),
    ({"weights_dtype": "int8", "scheme": "asymmetric"}, ["scheme = 'asymmetric' was removed"]),
    # bias
    *[
        ({"bias": bias}, ['bias is "all", "none" or some of q, k, v, out', repr(bias)])
        for bias in ("", "qkv", "q,x", "q;v", "all,q", "none,q", "q,", ["q", "o"], ["q,v"], [True],
                     1, 0, 0.5, None, {"q": True}, "q\nx")
    ],
    # types
    ({"qk_norm": None}, ["qk_norm must be of type str", "None"]),
    ({"qk_norm": True}, ["qk_norm must be of type str", "True"]),
    ({"rotary_dim": 4.0}, ["rotary_dim must be of type int", "4.0"]),
    ({"rotary_original_len": 8192.0}, ["rotary_original_len must be of type int", "8192.0"]),
    ({"rotary_theta": "1e4"}, ["rotary_theta must be of type float", "'1e4'"]),
    ({"rotary_factor": None}, ["rotary_factor must be of type float", "None"]),
    ({"window_left": True}, ["window_left must be of type int", "True"]),
    ({"window_right": 1.5}, ["window_right must be of type int", "1.5"]),
    ({"softcap": True}, ["softcap must be of type float", "True"]),
    ({"alibi": 1}, ["alibi must be of type bool", "1"]),
    ({"sinks": "yes"}, ["sinks must be of type bool", "'yes'"]),
    ({"relative_buckets": False}, ["relative_buckets must be of type int", "False"]),
]  # fmt: skip
REFUSED += REFUSED_FEATURES


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=[str(row[0]) for row in REFUSED])
def test_refuses_and_names_the_rule_and_the_values(changes: dict, says: list[str]) -> None:
    with pytest.raises(SpecError) as error:
        make(**changes)
    refuses(error, says)


BIASES = [
    # what is given, and the text that it becomes
    (True, "all"), (False, "none"), ("all", "all"), (" none ", "none"), (["all"], "all"),
    ("q,v", "q,v"), (" v , q ", "q,v"), ("out", "out"), ("q,q", "q"), ("out,v,k,q", "all"),
    (["v", "q"], "q,v"), (("k", "out"), "k,out"), ([], "none"), (["q", "k", "v", "out"], "all"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), BIASES, ids=str)
def test_bias_becomes_one_text_and_says_which_projections(given: object, text: str) -> None:
    spec = make(bias=given)
    assert spec.bias == text
    assert spec == make(bias=text)
    assert hash(spec) == hash(make(bias=text))
    named = {"all": "q,k,v,out", "none": ""}.get(text, text).split(",")
    for projection in ("q", "k", "v", "out"):
        assert spec.has_bias(projection) == (projection in named)


POSITIONS = [
    {"rotary": "half", "rotary_dim": 2},
    {"rotary": "interleaved", "rotary_scaling": "yarn", "rotary_factor": 4},
    {"window_left": 0, "window_right": 0},
    {"causal": True, "window_left": 5},
    {"relative_buckets": 4, "relative_max_distance": 5},
    {"alibi": True, "relative_buckets": 32, "rotary": "half", "causal": True},
    {"cross": True, "qk_norm": "rms", "softcap": 50, "sinks": True},
    {"cross": True, "relative_max_distance": 1},
]


@pytest.mark.parametrize("changes", POSITIONS, ids=str)
def test_features_that_go_together_are_taken(changes: dict) -> None:
    spec = make(**changes)
    assert {name: getattr(spec, name) for name in changes} == changes
    # Features are in the weights or the graph: they change neither inputs nor outputs.
    plain = make(cross=spec.cross)
    assert (spec.input_shapes(), spec.output_shapes()) == (
        plain.input_shapes(), plain.output_shapes(),
    )  # fmt: skip


@pytest.mark.parametrize("key", ["embed_dim", "num_heads"])
def test_refuses_a_spec_without_its_sizes(key: str) -> None:
    values = {"embed_dim": 32, "num_heads": 4}
    del values[key]
    with pytest.raises(SpecError) as error:
        AttentionSpec.from_dict(values)
    refuses(error, [f"no '{key}'", f"add {key} = N"])
