"""Every feature, with others, with the cache, with padding, causal: export, checks, judge."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from combined import CACHES, FEATURES, GROUPS, IN_PLACE, MASKS, SENSELESS, TABLE, fields_of
from shared import extended

from attn_export import AttentionSpec, build
from attn_export.errors import SpecError

BOTH = ["ort-cpu", "onnx-reference"]
IN_BOTH = {("cache", "padding"), ("no cache", "no mask")}
"""Companies of every feature that are run in a second engine, which is slow."""
IN_ALL = ("cache", "causal")
"""The company of every feature that is run in all dialects."""

DEFAULT = [
    (features, *company)
    for number, features in enumerate(GROUPS)
    for company in (IN_ALL, sorted(IN_BOTH)[number % 2])
]
"""Companies of the default tests: every feature in all dialects, and in a second engine."""


def named(company: tuple[tuple[str, ...], str, str]) -> str:
    features, cache, mask = company
    return f"{' + '.join(features)}, {cache}, {mask}"


@pytest.mark.parametrize(
    "company",
    extended([c for c in TABLE if c not in SENSELESS], lambda company: company in DEFAULT),
    ids=named,
)
@pytest.mark.every(4)
def test_features_pass_in_every_company(company: tuple[tuple[str, ...], str, str], tmp_path: Path):
    features, cache, mask = company
    fields = fields_of(features, {"cache": CACHES[cache]}, MASKS[mask])
    # Every feature in all dialects once: a dialect changes the attention node, not the company.
    dialects = ["all"] if (cache, mask) == IN_ALL else ["standard"]
    if features == ("symmetric window",) and (cache, mask) == ("cache", "padding"):
        dialects = ["all"]  # it makes no sense with causal
    assert_builds(fields, tmp_path, dialects, BOTH if (cache, mask) in IN_BOTH else BOTH[:1])


@pytest.mark.parametrize("features", IN_PLACE, ids=" + ".join)
@pytest.mark.every(4)
def test_features_pass_with_a_cache_that_is_written_in_place(
    features: tuple[str, ...], tmp_path: Path
):
    masks = (MASKS[name] for name in IN_PLACE[features])
    assert_builds(fields_of(features, {"cache": "in-place"}, *masks), tmp_path, ["all"], BOTH[:1])


def assert_builds(
    fields: dict[str, object], tmp_path: Path, dialects: list[str], runtimes: list[str]
) -> None:
    spec = AttentionSpec(embed_dim=16, num_heads=2, num_kv_heads=1, **fields)
    report = build(spec, tmp_path / "b", runtimes=runtimes, dialects=dialects)
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    ran = [{v.case for v in report.verdicts if v.runtime == name} for name in runtimes]
    assert all(ran)
    assert ran[0] == ran[-1]


@pytest.mark.parametrize("groups", [GROUPS, IN_PLACE], ids=["in every company", "in place"])
def test_every_feature_is_in_one_group(groups: Iterable[tuple[str, ...]]):
    assert sorted(name for features in groups for name in features) == sorted(FEATURES)


@pytest.mark.parametrize("company", SENSELESS, ids=named)
def test_a_company_that_makes_no_sense_is_refused_with_rule_and_values(
    company: tuple[tuple[str, ...], str, str],
):
    features, cache, mask = company
    with pytest.raises(SpecError, match="window_right = 2 with causal = true"):
        AttentionSpec(
            embed_dim=16, num_heads=2, **fields_of(features, {"cache": CACHES[cache]}, MASKS[mask])
        )
