"""Every feature, alone, with the cache, with padding, causal: export, checks, judge."""

from __future__ import annotations

from pathlib import Path

import pytest
from combined import SENSELESS, TABLE

from attn_export import AttentionSpec, build
from attn_export.errors import SpecError


@pytest.mark.parametrize("name", sorted(TABLE.keys() - SENSELESS))
def test_a_feature_passes_in_every_company(name: str, tmp_path: Path):
    spec = AttentionSpec(embed_dim=16, num_heads=2, num_kv_heads=1, **TABLE[name])
    report = build(spec, tmp_path / "b", runtimes=["ort-cpu"])
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]


@pytest.mark.parametrize("name", sorted(SENSELESS))
def test_a_company_that_makes_no_sense_is_refused_with_rule_and_values(name: str):
    with pytest.raises(SpecError, match="window_right = 2 with causal = true"):
        AttentionSpec(embed_dim=16, num_heads=2, **TABLE[name])
