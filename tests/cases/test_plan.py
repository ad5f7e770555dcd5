"""Plans: cases that meet all conditions together, or a note on conditions that none meets."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from conftest import interface_of, small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_export.cases import plan as plan_module
from attn_export.cases.conditions import free_axes, met_by_patterns, met_by_sizes, size_conditions
from attn_export.cases.draw import TRACED_SIZES, Interface, add_sums, axis_names
from attn_export.cases.fixed_cases import fixed_cases
from attn_export.cases.plan import (
    CASE_BYTES,
    GOLDEN_BYTES,
    Groups,
    Plan,
    covering_sizes,
    plan_cases,
)
from attn_export.interface import Input
from attn_export.results import Case
from attn_export.spec import AttentionSpec

CROSS = {"cross": True, "causal": False, "cache": "none"}
SPECS = {
    "cached, masked": {},
    "cached, no mask": {"attn_mask": "none"},
    "cached, a mask without batch": {"attn_mask": "float[L,S]"},
    "cached in place, masked": {"cache": "in-place"},
    "no cache, masked": {"cache": "none"},
    "no cache, no mask": {"cache": "none", "attn_mask": "none"},
    "cross, masked": CROSS,
    "cross, no mask": {**CROSS, "attn_mask": "none"},
    "attention weights of one head": {"attn_weights": True, "num_heads": 1, "num_kv_heads": 1},
}

LLAMA = {
    "embed_dim": 4096, "num_heads": 32, "num_kv_heads": 8, "bias": False, "causal": True,
    "attn_mask": "bool[B,1,1,S]", "cache": "append",
}  # fmt: skip

unknown_names = st.lists(
    st.text("abcdefgh_", min_size=1, max_size=6).filter(lambda name: name not in TRACED_SIZES),
    min_size=1, max_size=5, unique=True,
)  # fmt: skip


@functools.cache
def plan_of(spec: AttentionSpec) -> Plan:
    weights = 2 * spec.embed_dim * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    return plan_cases(interface_of(spec), weights=weights)


def free_of(spec: AttentionSpec) -> list[str]:
    return free_axes(axis_names(spec.inputs(), spec.sums), list(spec.sums))


def bytes_of(plan: Plan, spec: AttentionSpec) -> int:
    """Return the size of the golden vectors: inputs, and float32 outputs of reference and eager."""
    total = 0
    for case in plan.cases:
        total += sum(array.nbytes for array in case.inputs.values())
        for shape in spec.output_shapes().values():
            sizes = [case.sizes[axis] if isinstance(axis, str) else axis for axis in shape]
            total += 2 * 4 * int(np.prod(sizes))
    return total


@pytest.fixture(scope="module", params=SPECS.values(), ids=SPECS.keys())
def planned(request) -> tuple[AttentionSpec, Plan]:
    spec = small_spec(**request.param)
    return spec, plan_of(spec)


# -- small layers -----------------------------------------------------------------------------


QUADRATIC = ("cached, a mask without batch", "attention weights of one head")
"""Specs with inputs or outputs of a size for each query and key."""


@pytest.mark.parametrize("name", [name for name in SPECS if name not in QUADRATIC])
def test_a_small_layer_meets_all_conditions_without_a_note(name):
    spec = small_spec(**SPECS[name])
    plan = plan_of(spec)
    axes = free_of(spec)
    met = {
        condition
        for case in plan.cases
        for found in (met_by_sizes(case.sizes, axes), met_by_patterns(case.contents, case.sizes))
        for condition in found
    }
    wanted = Groups.of(interface_of(spec)).pattern_conditions(axes)
    assert size_conditions(axes).keys() <= met
    assert set(wanted) <= met
    assert plan.notes == ()


def test_a_plan_has_as_many_cases_as_it_needs(planned):
    _, plan = planned
    assert 30 <= len(plan.cases) <= 210


def test_all_cases_of_fixed_sizes_are_there(planned):
    spec, plan = planned
    fixed = fixed_cases(interface_of(spec))
    assert {case.name for case in fixed} < {case.name for case in plan.cases}


def test_every_axis_of_inputs_and_outputs_has_a_size(planned):
    spec, plan = planned
    shapes = (*spec.input_shapes().values(), *spec.output_shapes().values())
    named = {axis for shape in shapes for axis in shape if isinstance(axis, str)}
    assert all(named <= set(case.sizes) for case in plan.cases)


def test_sizes_add_up(planned):
    spec, plan = planned
    assert all(case.sizes == add_sums(case.sizes, spec.sums) for case in plan.cases)


def test_the_first_call_is_small_and_single_queries_come_again_later(planned):
    _, plan = planned
    first, *others = plan.cases
    assert (first.kind, first.sizes["batch"], first.sizes["query_len"]) == ("shape", 1, 1)
    single = [number for number, case in enumerate(others) if case.sizes["query_len"] == 1]
    assert min(single) < 10 < 20 < max(single)


def test_many_cases_have_one_query(planned):
    _, plan = planned
    single = [case for case in plan.cases if case.sizes["query_len"] == 1]
    assert len(single) >= 10
    assert len({case.contents for case in single}) >= 5


@pytest.mark.parametrize(
    ("name", "low"),
    [
        ("cached, masked", {"query_len": 16, "past_len": 16}),
        ("cached, masked", {"batch": 7, "query_len": 4}),
        ("cached, masked", {"batch": 7, "past_len": 16}),
        ("cached, masked", {"total_len": 1025}),
        ("no cache, masked", {"query_len": 1025}),
        ("cross, masked", {"key_len": 1025}),
        ("cross, masked", {"query_len": 16, "key_len": 16}),
        ("cached in place, masked", {"query_len": 16, "past_len": 16}),
    ],
)
def test_large_sizes_meet(name, low):
    cases = plan_of(small_spec(**SPECS[name])).cases
    assert any(all(case.sizes[axis] >= size for axis, size in low.items()) for case in cases)


def test_names_are_unique_and_say_the_contents_and_sizes():
    names = [case.name for case in plan_of(small_spec()).cases]
    assert len(set(names)) == len(names)
    assert names[0] == "shape_B1_P0_L1"
    assert any("left_padding_B" in name for name in names)


def test_names_of_cross_attention_say_the_number_of_keys():
    assert plan_of(small_spec(**CROSS)).cases[0].name == "shape_B1_S1_L1"


def test_inputs_have_the_sizes_of_the_case_in_the_order_of_the_graph(planned):
    spec, plan = planned
    for case in plan.cases:
        assert list(case.inputs) == list(spec.input_shapes())
        for name, shape in spec.input_shapes().items():
            wanted = [case.sizes[axis] if isinstance(axis, str) else axis for axis in shape]
            assert list(case.inputs[name].shape) == wanted


def test_cases_without_contents_are_random_and_kind_shape(planned):
    _, plan = planned
    assert all((case.kind == "shape") == case.name.startswith("shape_") for case in plan.cases)
    assert not any(case.contents for case in plan.cases if case.kind == "shape")


def test_every_random_case_has_values_of_its_own(planned):
    _, plan = planned
    random = [case.inputs["query"].tobytes() for case in plan.cases if case.kind == "shape"]
    assert len(set(random)) == len(random)


def test_the_same_spec_gives_the_same_plan():
    first, second = (plan_of.__wrapped__(small_spec()) for _ in range(2))
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


def test_a_large_layer_keeps_every_content_and_single_queries(llama, llama_plan):
    small = {name for case in plan_of(small_spec()).cases for name in case.contents}
    assert {name for case in llama_plan.cases for name in case.contents} == small
    assert sum(case.sizes["query_len"] == 1 for case in llama_plan.cases) >= 12
    assert {1, 2, 3} <= {case.sizes["batch"] for case in llama_plan.cases}


def test_a_large_layer_has_a_note_of_what_is_met_by_no_case(llama, llama_plan):
    far, note, _ = llama_plan.notes
    assert far.startswith("no case has these queries after long pasts")
    start, _, reason = note.partition(" combinations of sizes and patterns, since a build would ")
    assert start.startswith("not tested, ")
    assert reason.startswith("take too long: ")
    missed, _, wanted = start.split()[2:]
    assert 0 < int(missed) < int(wanted) / 5


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 32]), st.booleans(), st.booleans(),
    st.integers(16, 4096),
)  # fmt: skip
def test_golden_vectors_stay_within_the_budget_at_any_dimensions(heads, width, cross, weights, kib):
    changes = {"embed_dim": heads * width, "num_heads": heads, "num_kv_heads": 1, "cache": "none"}
    spec = small_spec(**changes, cross=cross, causal=False, attn_weights=weights)
    fixed = fixed_cases(interface_of(spec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "GOLDEN_BYTES", kib << 10)
        plan = plan_cases(interface_of(spec), weights=2**40)
    least = bytes_of(Plan(tuple(fixed), (), interface_of(spec)), spec)
    assert bytes_of(plan, spec) <= max(kib << 10, least)
    assert plan.notes or len(plan.cases) > len(fixed)


@pytest.mark.parametrize(
    ("fields", "hidden"),
    [
        ({"causal": True}, True),
        ({"causal": False, "window_right": 0}, True),
        ({"causal": False, "window_left": 0, "window_right": 0}, True),
        ({"causal": False, "window_right": 2}, True),
        ({"causal": False, "window_left": 3}, False),
    ],
    ids=str,
)
def test_a_layer_that_hides_later_keys_has_loud_ones(fields: dict[str, object], hidden: bool):
    spec = small_spec(attn_mask="none", **fields)
    plan = plan_cases(interface_of(spec))
    contents = {name for case in plan.cases for name in case.contents}
    assert ("causal_future" in contents) == hidden


# -- modules of the users ---------------------------------------------------------------------


def users_plan(**inputs: Input) -> Plan:
    return plan_cases(Interface(inputs, {"y": ("batch", "frames", 2)}))


def test_a_module_of_the_users_is_planned_from_its_shapes_alone():
    plan = users_plan(x=Input(("batch", "frames", 4)))
    assert plan.cases[0].name == "shape_B1_frames1"
    names = {case.name for case in plan.cases}
    assert {"base", "changed_x", "nan_in_rows"} < names
    contents = {name for case in plan.cases for name in case.contents}
    assert {"large_logits", "outliers", "tiny_values"} < contents
    assert not contents & {"left_padding", "causal_future"}


def test_a_mask_of_a_users_module_is_padded_and_hides_rows():
    mask = Input(("batch", "frames"), "int64", 0, 1)
    plan = users_plan(x=Input(("batch", "frames", 4)), padding=mask)
    contents = {name for case in plan.cases for name in case.contents}
    assert {"left_padding", "right_padding", "fully_masked_rows", "all_keys_masked"} < contents


def test_sizes_that_a_module_does_not_take_are_not_tried():
    inputs = {"x": Input(("batch", "frames", 4))}
    interface = Interface(inputs, {"y": ("batch", "frames", 2)})
    plan = plan_cases(interface, lambda sizes: sizes["frames"] < 200)
    assert max(case.sizes["frames"] for case in plan.cases) == 129
    assert plan.notes == (
        "not tested at block sizes of kernels, since the module raises there "
        "or is too large to try them: "
        "frames 255-257, 511-513, 1023-1025 where frames > 1, several sequences; "
        "frames 256, 512, 1024 where frames > 1, one sequence",
    )


def test_a_past_that_a_module_does_not_take_is_not_tried():
    inputs = {"x": Input(("batch", "query_len", 4)), "past": Input(("batch", "past_len", 4))}
    interface = Interface(inputs, {"y": ("batch", "query_len", 2)})
    plan = plan_cases(interface, lambda sizes: sizes["past_len"] < 200)
    assert max(case.sizes["past_len"] for case in plan.cases) == 129


@settings(deadline=None, max_examples=20)
@given(unknown_names)
def test_unknown_axes_get_sizes_of_their_own(names):
    shapes = covering_sizes(["batch", "query_len", *names], {}, {})
    assert all(set(sizes) == {"batch", "query_len", *names} for sizes in shapes)
    assert all(size >= 1 for sizes in shapes for size in sizes.values())
    for name in names:
        assert len({sizes[name] for sizes in shapes}) >= 10
    columns = [tuple(sizes[name] for sizes in shapes) for name in names]
    assert len(set(columns)) == len(names)


@settings(deadline=None, max_examples=20)
@given(unknown_names)
def test_a_sum_of_unknown_axes_adds_up(names):
    sums = {"the sum": " + ".join(["batch", *names])}
    for sizes in covering_sizes(["batch", "the sum", *names], sums, {}):
        assert sizes["the sum"] == sizes["batch"] + sum(sizes[name] for name in names)


@settings(deadline=None, max_examples=10)
@given(st.permutations(["batch", "query_len", "heads", "frames"]))
def test_the_order_of_the_names_does_not_matter(names):
    assert covering_sizes(names, {}, {}) == covering_sizes(sorted(names), {}, {})


def test_without_dynamic_axes_there_is_one_shape():
    assert covering_sizes([], {}, {}) == [{}]
    cases: tuple[Case, ...] = plan_cases(Interface({"x": Input((3, 4))}, {"y": (3, 4)})).cases
    assert sum(case.kind == "shape" for case in cases) == 1


def test_no_case_exceeds_its_size_limit(llama, llama_plan):
    assert all(
        bytes_of(Plan((case,), (), interface_of(llama)), llama) <= CASE_BYTES
        for case in llama_plan.cases
    )
