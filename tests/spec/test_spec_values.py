"""`AttentionSpec` and `MaskSpec`: derived values, variants, specs of models."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from conftest import ROOT
from specs import make, refuses

from attn_export.errors import SpecError
from attn_export.spec import VARIANTS, AttentionSpec
from attn_export.spec.rules import MaskSpec

MODELS = sorted((ROOT / "models").glob("*.toml"))


DERIVED = {
    "mha": ({}, {
        "num_kv_heads": 4, "q_per_kv": 1, "head_dim": 8, "v_head_dim": 8, "kdim": 32, "vdim": 32,
        "softmax_scale": 1 / math.sqrt(8), "has_cache": False, "key_axis": "query_len",
        "mask": None, "relations": {}, "bias": "all", "dtype": "float32", "rotary_dim": 8,
        "has_rotary": False,
    }),
    "mqa": ({"num_kv_heads": 1}, {"num_kv_heads": 1, "q_per_kv": 4, "head_dim": 8}),
    "gqa": ({"num_kv_heads": 2}, {"num_kv_heads": 2, "q_per_kv": 2, "head_dim": 8}),
    "one head": ({"num_heads": 1}, {"num_kv_heads": 1, "q_per_kv": 1, "head_dim": 32}),
    "head_dim": ({"head_dim": 5}, {
        "head_dim": 5, "v_head_dim": 5, "softmax_scale": 1 / math.sqrt(5),
    }),
    "head_dim where E does not divide by H": ({"num_heads": 5, "head_dim": 3}, {
        "num_kv_heads": 5, "head_dim": 3, "embed_dim": 32,
    }),
    "v_head_dim": ({"v_head_dim": 3}, {
        "head_dim": 8, "v_head_dim": 3, "softmax_scale": 1 / math.sqrt(8),
    }),
    "scale": ({"scale": 0.25, "head_dim": 5}, {"softmax_scale": 0.25}),
    "whole scale": ({"scale": 1}, {"softmax_scale": 1}),
    "cross": ({"cross": True}, {"kdim": 32, "vdim": 32, "key_axis": "key_len", "relations": {}}),
    "cross, kdim": ({"cross": True, "kdim": 16}, {"kdim": 16, "vdim": 16}),
    "cross, vdim": ({"cross": True, "vdim": 12}, {"kdim": 32, "vdim": 12}),
    "cross, both": ({"cross": True, "kdim": 16, "vdim": 12}, {"kdim": 16, "vdim": 12}),
    "kdim that is E": ({"kdim": 32, "vdim": 32}, {"kdim": 32, "cross": False}),
    "cache": ({"cache": "append"}, {
        "has_cache": True, "key_axis": "total_len",
        "relations": {"total_len": "past_len + query_len"},
        "sums": {"total_len": "past_len + query_len"}, "in_place": False,
    }),
    "cache in place": ({"cache": "in-place"}, {
        "has_cache": True, "in_place": True, "key_axis": "capacity", "relations": {},
        "sums": {"capacity": "past_len + query_len"},
    }),
    "cache in place, added keys": (
        {"cache": "in-place", "add_bias_kv": True, "attn_weights": True},
        {
            "relations": {"weights_len": "capacity + 1"},
            "sums": {
                "capacity": "past_len + query_len", "weights_len": "past_len + query_len + 1",
            },
        },
    ),
    "mask": ({"attn_mask": " bool[B, 1,1 ,S]"}, {
        "attn_mask": "bool[B,1,1,S]", "mask": MaskSpec("bool", ("B", "1", "1", "S")),
    }),
    "no mask": ({"attn_mask": "none"}, {"mask": None}),
    "dropout": ({"dropout": 0}, {"dropout": 0}),
    "rotary": ({"rotary": "half", "head_dim": 6}, {"has_rotary": True, "rotary_dim": 6}),
    "rotary_dim": ({"rotary": "half", "rotary_dim": 4}, {"rotary_dim": 4, "head_dim": 8}),
    "window": ({"window_left": 0}, {"window_left": 0, "window_right": None}),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "derived"), DERIVED.values(), ids=DERIVED)
def test_derives_missing_fields(changes: dict, derived: dict) -> None:
    spec = make(**changes)
    assert {name: getattr(spec, name) for name in derived} == derived


SHAPES = {
    "self": ({}, {"query": ("batch", "query_len", 32)}, {"output": ("batch", "query_len", 32)}),
    "cross": (
        {"cross": True, "kdim": 16, "vdim": 12, "attn_mask": "bool[B,1,1,S]", "num_kv_heads": 2},
        {
            "query": ("batch", "query_len", 32),
            "key": ("batch", "key_len", 16),
            "value": ("batch", "key_len", 12),
            "attn_mask": ("batch", 1, 1, "key_len"),
        },
        {"output": ("batch", "query_len", 32)},
    ),
    "everything": (
        {
            "num_kv_heads": 2, "cache": "append", "attn_mask": "float[B,H,L,S]",
            "v_head_dim": 3, "attn_weights": True,
        },
        {
            "query": ("batch", "query_len", 32),
            "attn_mask": ("batch", 4, "query_len", "total_len"),
            "past_key": ("batch", 2, "past_len", 8),
            "past_value": ("batch", 2, "past_len", 3),
        },
        {
            "output": ("batch", "query_len", 32),
            "present_key": ("batch", 2, "total_len", 8),
            "present_value": ("batch", 2, "total_len", 3),
            "attn_weights": ("batch", 4, "query_len", "total_len"),
        },
    ),
    "a cache in place": (
        {
            "num_kv_heads": 2, "cache": "in-place", "attn_mask": "bool[B,1,1,S]", "v_head_dim": 3,
            "attn_weights": True, "rotary": "half", "position_ids": True,
        },
        {
            "query": ("batch", "query_len", 32),
            "attn_mask": ("batch", 1, 1, "capacity"),
            "past_key": ("batch", 2, "capacity", 8),
            "past_value": ("batch", 2, "capacity", 3),
            "past_length": ("batch",),
            "position_ids": ("batch", "query_len"),
        },
        {
            "output": ("batch", "query_len", 32),
            "present_key": ("batch", 2, "capacity", 8),
            "present_value": ("batch", 2, "capacity", 3),
            "attn_weights": ("batch", 4, "query_len", "capacity"),
        },
    ),
    "weights without a cache": (
        {"attn_weights": True, "attn_mask": "bool[L,S]", "head_dim": 5},
        {"query": ("batch", "query_len", 32), "attn_mask": ("query_len", "query_len")},
        {
            "output": ("batch", "query_len", 32),
            "attn_weights": ("batch", 4, "query_len", "query_len"),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "inputs", "outputs"), SHAPES.values(), ids=SHAPES)
def test_names_inputs_and_outputs_in_order(changes: dict, inputs: dict, outputs: dict) -> None:
    spec = make(**changes)
    assert list(spec.input_shapes().items()) == list(inputs.items())
    assert list(spec.output_shapes().items()) == list(outputs.items())


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        ("bool[1,S]", (1, "query_len")),
        ("bool[H,1,S]", (4, 1, "query_len")),
        ("float[1,L,S]", (1, "query_len", "query_len")),
        ("float[1,H,1,S]", (1, 4, 1, "query_len")),
    ],
)
def test_mask_axes_become_sizes_and_names(mask: str, shape: tuple) -> None:
    assert make(attn_mask=mask).input_shapes()["attn_mask"] == shape


def test_is_a_value() -> None:
    spec = make()
    assert spec == make(num_kv_heads=4, head_dim=8)
    assert hash(spec) == hash(make(num_kv_heads=4, head_dim=8))
    assert spec != make(bias=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.num_heads = 8  # type: ignore[misc]


# -- variants and the models in the repository -----------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_its_model_file(name: str) -> None:
    assert AttentionSpec.variant(name) == AttentionSpec.from_toml(ROOT / f"models/{name}.toml")


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads"),
    [("mha", 8, 8), ("mqa", 8, 1), ("gqa", 8, 2), ("mha", 16, 16), ("mqa", 16, 1), ("gqa", 16, 4),
     ("gqa", 4, 2), ("gqa", 14, 2)],
)  # fmt: skip
def test_variant_chooses_key_value_heads(name: str, heads: int, kv_heads: int) -> None:
    spec = AttentionSpec.variant(name, num_heads=heads, head_dim=4)
    assert (spec.embed_dim, spec.num_heads, spec.num_kv_heads) == (512, heads, kv_heads)
    assert (spec.causal, spec.attn_mask, spec.cache) == (True, "bool[B,1,1,S]", "append")


@pytest.mark.parametrize(
    ("name", "changes"),
    [("mqa", {"num_kv_heads": 2}), ("mla", {"kv_latent_dim": 0, "bias": "all"}),
     ("gqa", {"num_kv_heads": 8}), ("gqa", {"num_kv_heads": 1}),
     ("mha", {"num_kv_heads": 4}), ("gqa", {"num_heads": 2})],
)  # fmt: skip
def test_variant_refuses_what_makes_it_another_variant(name: str, changes: dict) -> None:
    with pytest.raises(SpecError, match=f"^{name} with num_heads"):
        AttentionSpec.variant(name, **changes)


@pytest.mark.parametrize("name", ["MHA", "mlp", "", None])
def test_refuses_an_unknown_variant(name: str) -> None:
    with pytest.raises(SpecError) as error:
        AttentionSpec.variant(name)
    refuses(error, [f"unknown variant {name!r}", "mha, mqa, gqa"])


@pytest.mark.parametrize("path", MODELS, ids=[path.stem for path in MODELS])
def test_model_file_is_a_spec(path: Path) -> None:
    assert AttentionSpec.from_toml(path).embed_dim % 64 == 0
