"""Cases of a cache that is written in place: rows differ, and the probes mean what they say."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import small_spec

from attn_export.cases.in_place import FAR_APART, LOUD
from attn_export.cases.plan import plan_cases
from attn_export.cases.probes import BASE
from attn_export.nouns import Case
from attn_export.spec import AttentionSpec
from attn_export.subject import Subject

MASKS = ["bool[B,1,1,S]", "float[B,1,1,S]", "bool[B,H,L,S]"]


def cases_of(**changes: object) -> dict[str, Case]:
    spec = small_spec(cache="in-place", **changes)
    plan = plan_cases(spec.inputs(), spec.output_shapes(), spec, spec.sums)
    return {case.name: case for case in plan.cases}


def lengths_of(case: Case) -> np.ndarray:
    """How many keys each row has, the new ones included."""
    found: np.ndarray = case.inputs["past_length"] + case.sizes["query_len"]
    return found


@pytest.mark.parametrize("changes", [{}, {"rotary": "half"}, {"window_left": 40}], ids=str)
def test_every_row_has_room_for_its_new_keys(changes):
    for case in cases_of(**changes).values():
        lengths = lengths_of(case)
        assert lengths.dtype == np.int64
        assert lengths.shape == (case.sizes["batch"],)
        assert (lengths >= case.sizes["query_len"]).all()
        assert (lengths <= case.sizes["capacity"]).all()
        assert case.inputs["past_key"].shape[2] == case.sizes["capacity"]


def test_shapes_hold_rows_that_differ_buffers_that_are_full_and_rooms_that_are_left():
    shapes = [case for case in cases_of().values() if case.kind == "shape"]
    differ = [case for case in shapes if len(set(lengths_of(case).tolist())) > 1]
    full = [case for case in shapes if lengths_of(case).max() == case.sizes["capacity"]]
    left = [case for case in shapes if lengths_of(case).max() < case.sizes["capacity"]]
    assert min(len(differ), len(full), len(left)) >= 8
    assert any(case.sizes["past_len"] and (lengths_of(case) == 1).any() for case in shapes)
    one_full = [c for c in full if c.sizes["batch"] == 1 and c.sizes["past_len"]]
    assert one_full, "a batch of one that fills its buffer"


def test_rows_of_the_base_differ_and_all_of_them_change():
    cases = cases_of()
    base, changed = (cases[n].inputs["past_length"] for n in (BASE, "changed_past_length"))
    assert len(set(base.tolist())) == len(base)
    assert (base != changed).all()
    assert base.max() < cases[BASE].sizes["past_len"], "there is a rest behind every row"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["left_padding", "right_padding"])
def test_padding_hides_keys_that_a_row_holds(mask, name):
    case = cases_of(attn_mask=mask)[name]
    values = case.inputs["attn_mask"]
    shown = values if values.dtype == np.bool_ else values > -np.inf
    for row, (end, padding) in enumerate(zip(lengths_of(case), (2, 1), strict=True)):
        wanted = np.ones(case.sizes["capacity"], np.bool_)
        wanted[slice(None, padding) if name == "left_padding" else slice(end - padding, end)] = 0
        assert (shown[row] == wanted).all()
        assert shown[row][..., :end].any()


def test_positions_count_from_the_end_of_the_padding_in_each_row():
    case = cases_of(rotary="half", position_ids=True)["left_padding"]
    held, padding = case.inputs["past_length"], np.array([2, 1])
    wanted = np.maximum((held - padding)[:, None] + np.arange(3), 0)
    np.testing.assert_array_equal(case.inputs["position_ids"], wanted)


@pytest.mark.parametrize("mask", MASKS)
def test_the_changed_key_of_the_mask_is_one_that_row_0_holds(mask):
    cases = cases_of(attn_mask=mask)
    before, after = (cases[n].inputs["attn_mask"] for n in (BASE, "changed_attn_mask"))
    (key,) = {int(place) for place in np.argwhere(before != after)[:, -1]}
    assert key == cases[BASE].inputs["past_length"][0] + 1


def test_the_rest_behind_each_row_is_loud_and_nothing_else():
    cases = cases_of()
    base, loud = cases[BASE], cases["beyond_length"]
    assert loud.inputs["past_length"].tolist() == [0, 1]
    for name in ("past_key", "past_value"):
        for row, held in enumerate(loud.inputs["past_length"]):
            before, after = (case.inputs[name][row] for case in (base, loud))
            np.testing.assert_array_equal(after[:, :held], before[:, :held])
            np.testing.assert_array_equal(after[:, held:], before[:, held:] * np.float32(LOUD))
    assert (lengths_of(loud) < loud.sizes["capacity"]).all()


def test_rows_are_empty_and_full():
    case = cases_of()["empty_and_full"]
    assert case.inputs["past_length"].tolist() == [0, FAR_APART]
    assert case.sizes == {
        "batch": 2, "query_len": 3, "past_len": FAR_APART, "capacity": FAR_APART + 3,
    }  # fmt: skip


def test_the_far_case_has_all_of_the_past():
    spec = AttentionSpec(
        embed_dim=32, num_heads=4, causal=True, cache="in-place", window_left=40, attn_mask="none"
    )
    plan = plan_cases(spec.inputs(), spec.output_shapes(), spec, spec.sums)
    (far,) = (case for case in plan.cases if case.name == "far_keys")
    assert far.inputs["past_length"].tolist() == [42]
    assert far.sizes["capacity"] == 44
    assert plan.notes == ()


def test_a_subject_has_room_for_its_past_at_every_size_that_it_draws():
    subject = Subject.from_spec(small_spec(cache="in-place"))
    assert subject.relations == {}
    example = {"batch": 2, "query_len": 5, "past_len": 7, "capacity": 12}
    assert subject.example_sizes == example
    for changed in ({}, {"query_len": 13}, {"past_len": 0}, {"batch": 7}):
        sizes = subject.sizes_with(changed)
        assert sizes["capacity"] == sizes["past_len"] + sizes["query_len"]
        drawn = subject.draw(sizes, "room")
        assert int(drawn["past_length"].max()) <= sizes["past_len"]
        subject.call(subject.module, drawn)
