"""Cases that are whole decodes: specs that have one, and its length."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import interface_of, small_spec

from attn_export.cases.fixed_cases import LONG_BYTES, TOKENS
from attn_export.cases.plan import GOLDEN_BYTES, Plan, plan_cases
from attn_export.results import WHOLE_DECODE, Case
from attn_export.spec import AttentionSpec


def plan_of(spec: AttentionSpec) -> Plan:
    return plan_cases(interface_of(spec))


def decodes_of(plan: Plan) -> list[Case]:
    return [case for case in plan.cases if case.kind == WHOLE_DECODE]


def wide(embed_dim: int, **changes: object) -> AttentionSpec:
    return small_spec(cache="in-place", embed_dim=embed_dim, attn_mask="none", **changes)


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_a_causal_cache_that_is_written_in_place_gets_a_decode_of_300_tokens(heads: int):
    plan = plan_of(small_spec(cache="in-place", num_kv_heads=heads))
    (case,) = decodes_of(plan)
    assert case.name == "decode_300"
    assert case.sizes == {"batch": 2, "query_len": 300, "past_len": 0, "capacity": 300}
    assert not any("decode" in note for note in plan.notes)
    assert case.inputs["query"].shape == (2, 300, 32)
    assert case.inputs["past_key"].shape == (2, heads, 300, 8)
    assert case.inputs["past_length"].tolist() == [0, 0]


def test_its_mask_hides_keys_but_never_the_first():
    (case,) = decodes_of(plan_of(small_spec(cache="in-place")))
    mask = case.inputs["attn_mask"]
    assert mask.shape == (2, 1, 1, 300)
    assert mask[..., 0].all()
    assert 0.6 < mask.mean() < 0.8
    assert (mask[0] != mask[1]).any()


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"cache": "none"}, {"cache": "in-place", "causal": False},
        {"cache": "in-place", "rotary": "half", "rotary_scaling": "dynamic",
         "rotary_factor": 2.0, "rotary_original_len": 20},
    ],
    ids=["append", "no cache", "not causal", "dynamic"],
)  # fmt: skip
def test_others_get_none_and_no_note(changes: dict[str, object]):
    plan = plan_of(small_spec(**changes))
    assert decodes_of(plan) == []
    assert plan.notes == ()


def test_it_takes_a_quarter_of_the_golden_vectors_at_most():
    assert LONG_BYTES == GOLDEN_BYTES // 4
    for width, tokens in ((1024, 300), (1280, 200), (2048, 100)):
        spec = wide(width, num_heads=16, num_kv_heads=2, head_dim=8)
        (case,) = decodes_of(plan_of(spec))
        assert case.sizes["query_len"] == tokens
        sizes = case.sizes
        taken = sum(array.nbytes for array in case.inputs.values())
        taken += sum(
            2 * 4 * int(np.prod([sizes.get(str(axis), axis) for axis in shape]))
            for shape in spec.output_shapes().values()
        )
        assert LONG_BYTES // 2 < taken <= LONG_BYTES


def test_a_decode_that_is_too_large_is_a_note():
    plan = plan_of(wide(8192, num_heads=16, num_kv_heads=2, head_dim=8))
    assert decodes_of(plan) == []
    (note,) = (note for note in plan.notes if "decodes" in note)
    assert f"{TOKENS[-1]} tokens would take more than 8 MiB" in note
