"""Every feature, alone, with the cache, with padding, causal: export, checks, judge."""

from __future__ import annotations

from pathlib import Path

import pytest
from combined import FEATURES, IN_PLACE, MASKS, SENSELESS, TABLE

from attn_export import AttentionSpec, build
from attn_export.errors import SpecError


@pytest.mark.parametrize("name", sorted(TABLE.keys() - SENSELESS))
def test_a_feature_passes_in_every_company(name: str, tmp_path: Path):
    spec = AttentionSpec(embed_dim=16, num_heads=2, num_kv_heads=1, **TABLE[name])
    # Every feature in all dialects once: a dialect changes the attention node, not the company.
    dialects = ["all"] if name.endswith("cache, causal") else ["standard"]
    report = build(spec, tmp_path / "b", runtimes=["ort-cpu"], dialects=dialects)
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]


@pytest.mark.parametrize("features", IN_PLACE, ids=" + ".join)
def test_features_pass_with_a_cache_that_is_written_in_place(
    features: tuple[str, ...], tmp_path: Path
):
    fields: dict[str, object] = {"cache": "in-place"}
    for part in (*(FEATURES[name] for name in features), *(MASKS[m] for m in IN_PLACE[features])):
        fields |= part
    spec = AttentionSpec(embed_dim=16, num_heads=2, num_kv_heads=1, **fields)
    report = build(spec, tmp_path / "b", runtimes=["ort-cpu"])
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]


def test_every_feature_is_built_with_a_cache_that_is_written_in_place():
    assert sorted(name for features in IN_PLACE for name in features) == sorted(FEATURES)


@pytest.mark.parametrize("name", sorted(SENSELESS))
def test_a_company_that_makes_no_sense_is_refused_with_rule_and_values(name: str):
    with pytest.raises(SpecError, match="window_right = 2 with causal = true"):
        AttentionSpec(embed_dim=16, num_heads=2, **TABLE[name])
