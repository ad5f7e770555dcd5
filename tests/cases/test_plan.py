"""The plan: all cases where they fit, fewer and smaller ones with a note where they do not."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_export.cases import plan as plan_module
from attn_export.cases.plan import GOLDEN_BYTES, Plan, plan_cases
from attn_export.cases.probes import probe_cases
from attn_export.cases.sizes import axis_names, lattice, tokens
from attn_export.spec import AttentionSpec, Input

CROSS = {"cross": True, "causal": False, "cache": "none"}

LLAMA = {
    "embed_dim": 4096, "num_heads": 32, "num_kv_heads": 8, "bias": False, "causal": True,
    "attn_mask": "bool[B,1,1,S]", "cache": "append",
}  # fmt: skip


def plan_of(spec: AttentionSpec) -> Plan:
    return plan_cases(spec.inputs(), spec.output_shapes(), spec, spec.sums)


def wanted_of(spec: AttentionSpec) -> list[dict[str, int]]:
    names = axis_names(spec.inputs(), spec.sums)
    return [dict(sizes) for sizes in lattice(names, spec.sums)]


def bytes_of(plan: Plan, spec: AttentionSpec) -> int:
    """What the golden vectors hold: inputs, and float32 outputs from the truth and from eager."""
    total = 0
    for case in plan.cases:
        total += sum(array.nbytes for array in case.inputs.values())
        for shape in spec.output_shapes().values():
            sizes = [case.sizes[axis] if isinstance(axis, str) else axis for axis in shape]
            total += 2 * 4 * int(np.prod(sizes))
    return total


# -- small layers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"attn_mask": "none"}, {"cache": "none"}, {"cache": "none", "attn_mask": "none"},
        CROSS, {"attn_weights": True}, {"attn_mask": "float[L,S]"}, {"cache": "in-place"},
    ],
    ids=str,
)  # fmt: skip
def test_a_small_layer_gets_every_shape_and_every_probe_without_a_note(changes):
    spec = small_spec(**changes)
    plan = plan_of(spec)
    shapes = [case for case in plan.cases if case.kind == "shape"]
    probes = [case.name for case in plan.cases if case.kind == "probe"]
    assert [dict(case.sizes) for case in shapes] == wanted_of(spec)
    assert probes == [p.name for p in probe_cases(spec.inputs(), spec, spec.sums)]
    assert plan.notes == ()
    assert list(plan.cases[: len(shapes)]) == shapes


def test_names_are_unique_and_say_the_sizes():
    names = [case.name for case in plan_of(small_spec()).cases]
    assert len(set(names)) == len(names)
    assert names[:2] == ["shape_B1_P0_L1", "shape_B1_P7_L1"]


def test_names_of_cross_attention_say_the_number_of_keys():
    assert plan_of(small_spec(**CROSS)).cases[0].name == "shape_B1_S1_L1"


def test_inputs_have_the_sizes_of_the_case_in_the_order_of_the_graph():
    spec = small_spec()
    for case in plan_of(spec).cases:
        assert list(case.inputs) == list(spec.input_shapes())
        for name, shape in spec.input_shapes().items():
            wanted = [case.sizes[axis] if isinstance(axis, str) else axis for axis in shape]
            assert list(case.inputs[name].shape) == wanted


def test_every_case_has_values_of_its_own():
    seen = [case.inputs["query"].tobytes() for case in plan_of(small_spec()).cases]
    same_as_the_base = [c for c in plan_of(small_spec()).cases if c.kind == "probe"]
    assert len(set(seen)) > len(seen) - len(same_as_the_base)


def test_the_same_spec_gives_the_same_plan():
    first, second = plan_of(small_spec()), plan_of(small_spec())
    assert [case.name for case in first.cases] == [case.name for case in second.cases]
    for a, b in zip(first.cases, second.cases, strict=True):
        assert all(a.inputs[name].tobytes() == b.inputs[name].tobytes() for name in a.inputs)


# -- large layers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> AttentionSpec:
    return AttentionSpec.from_dict(LLAMA)


@pytest.fixture(scope="module")
def llama_plan(llama) -> Plan:
    return plan_of(llama)


def test_a_large_layer_stays_within_32_mib(llama, llama_plan):
    assert GOLDEN_BYTES == 32 << 20
    assert GOLDEN_BYTES // 2 < bytes_of(llama_plan, llama) <= GOLDEN_BYTES


def test_a_large_layer_gets_fewer_and_smaller_shapes_in_their_order(llama, llama_plan):
    kept = [dict(case.sizes) for case in llama_plan.cases if case.kind == "shape"]
    wanted = wanted_of(llama)
    assert 10 < len(kept) < len(wanted)
    assert kept == [sizes for sizes in wanted if sizes in kept]
    left_out = [sizes for sizes in wanted if sizes not in kept]
    assert max(map(tokens, kept)) <= min(map(tokens, left_out))


def test_a_large_layer_still_gets_decoding_first_batches_and_every_probe(llama, llama_plan):
    kept = [dict(case.sizes) for case in llama_plan.cases if case.kind == "shape"]
    assert kept[0] == wanted_of(llama)[0]
    assert {1, 2, 3} <= {sizes["batch"] for sizes in kept}
    assert {0, 1} < {sizes["past_len"] for sizes in kept}
    probes = [case.name for case in llama_plan.cases if case.kind == "probe"]
    assert len(probes) == len(probe_cases(llama.inputs(), llama, llama.relations))


def test_a_large_layer_has_a_note_of_what_was_left_out(llama, llama_plan):
    kept = sum(case.kind == "shape" for case in llama_plan.cases)
    wanted = len(wanted_of(llama))
    (note,) = llama_plan.notes
    assert note.startswith(f"{wanted - kept} of {wanted} shapes left out")
    assert "32 MiB" in note


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 32]), st.booleans(), st.booleans(),
    st.integers(16, 4096),
)  # fmt: skip
def test_golden_vectors_stay_within_the_budget_at_any_dimensions(heads, width, cross, weights, kib):
    changes = {"embed_dim": heads * width, "num_heads": heads, "num_kv_heads": 1, "cache": "none"}
    spec = small_spec(**changes, cross=cross, causal=False, attn_weights=weights)
    probes = probe_cases(spec.inputs(), spec, spec.sums)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "GOLDEN_BYTES", kib << 10)
        plan = plan_of(spec)
    least = bytes_of(Plan(tuple(probes), ()), spec)
    assert bytes_of(plan, spec) <= max(kib << 10, least)
    assert bool(plan.notes) == (len(plan.cases) < len(probes) + len(wanted_of(spec)))


def test_a_module_of_the_users_is_planned_from_its_shapes_alone():
    inputs = {"x": Input(("batch", "frames", 4))}
    plan = plan_cases(inputs, {"y": ("batch", "frames", 2)}, None, {})
    assert sum(case.kind == "shape" for case in plan.cases) >= 30
    assert [case.name for case in plan.cases if case.kind == "probe"][0] == "base"  # noqa: RUF015
    assert plan.cases[0].name == "shape_B1_frames1"
