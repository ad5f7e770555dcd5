"""Every feature, with others, with each cache, with padding, causal: export, checks, judge."""

from __future__ import annotations

import itertools
from collections import ChainMap
from pathlib import Path

import pytest
from features import CACHES, COMPANY, FEATURES, GROUPS, GROWING, SEEING_AHEAD
from shared import extended

from attn_export import AttentionSpec, build

ALL = FEATURES | GROWING | SEEING_AHEAD
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
def test_features_pass_in_every_company(company: tuple[int, str, str], tmp_path: Path):
    number, cache, mask = company
    fields = ChainMap({"cache": CACHES[cache]}, COMPANY[mask], *(ALL[n] for n in GROUPS[number]))
    spec = AttentionSpec(**{"embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, **fields})
    runtimes = ["ort-cpu", "onnx-reference"] if number == 0 else ["ort-cpu"]
    report = build(spec, tmp_path / "b", runtimes=runtimes)
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    assert {v.runtime for v in report.verdicts if v.status == "passed"} == {*runtimes}


def test_every_kind_of_feature_is_in_one_group():
    grouped = [name for group in GROUPS for name in group]
    assert len(grouped) == len({*grouped})
    fields = {field for name in grouped for field in ALL[name]}
    assert {field for feature in ALL.values() for field in feature} <= fields | {"causal"}
