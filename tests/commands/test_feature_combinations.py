"""Every feature, with others, with each cache, with padding, causal: export, checks, judge."""

from __future__ import annotations

import itertools
from collections import ChainMap

import pytest
from agreement import right_graphs
from conftest import small_spec
from features import CACHES, COMPANY, EVERY, GROUPS
from shared import extended

from attn_export import AttentionSpec, Subject

TABLE = [
    company
    for company in itertools.product(range(len(GROUPS)), CACHES, COMPANY)
    if not ("symmetric window" in GROUPS[company[0]] and company[2] == "causal")
]
DEFAULT = {
    (number, list(CACHES)[number % 3], list(COMPANY)[1 + number // 3 % 2])
    for number in range(len(GROUPS))
}


def named(company: tuple[int, str, str]) -> str:
    number, *others = company
    return ", ".join([" + ".join(GROUPS[number]), *others])


@pytest.mark.parametrize("company", extended(TABLE, lambda c: c in DEFAULT), ids=named)
def test_graphs_of_features_are_right_in_every_company(company: tuple[int, str, str]):
    number, cache, mask = company
    fields = ChainMap({"cache": CACHES[cache]}, COMPANY[mask], *(EVERY[n] for n in GROUPS[number]))
    spec = AttentionSpec(**{"embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, **fields})
    right_graphs(Subject.from_spec(spec), "all")


ALONE: dict[str, dict[str, object]] = {
    "three heads, float mask, weights": {
        "embed_dim": 21, "num_heads": 3, "num_kv_heads": 3, "alibi": True, "causal": False,
        "attn_mask": "float[B,H,L,S]", "attn_weights": True, "scale": 0.5,
    },
    "widths of its own, no mask, no cache, not causal": {
        "head_dim": 6, "v_head_dim": 12, "attn_mask": "none", "cache": "none", "causal": False,
        "bias": False, "num_heads": 1, "num_kv_heads": 1,
    },
    "mla in place, latent of queries, weights": {
        "num_kv_heads": 1, "head_dim": 12, "v_head_dim": 6, "kv_latent_dim": 16, "bias": "all",
        "q_latent_dim": 10, "rotary": "half", "rotary_dim": 4, "cache": "in-place",
        "attn_weights": True,
    },
    "cross of three widths": {
        "cross": True, "cache": "none", "causal": False, "kdim": 24, "vdim": 40,
        "v_head_dim": 12, "attn_weights": True,
    },
}  # fmt: skip
"""Specs that share no bundle with the groups: dimensions, latents, two sequences."""


@pytest.mark.parametrize("name", ALONE)
def test_a_spec_of_other_sizes_has_right_graphs(name: str):
    right_graphs(Subject.from_spec(small_spec(**ALONE[name])), "all")


def test_every_kind_of_feature_is_in_one_group():
    grouped = [name for group in GROUPS for name in group]
    assert len(grouped) == len({*grouped})
    fields = {field for name in grouped for field in EVERY[name]}
    assert {field for feature in EVERY.values() for field in feature} <= fields | {"causal"}
