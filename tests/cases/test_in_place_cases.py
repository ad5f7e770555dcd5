"""Cases of a cache in place: lengths of batch elements differ, and contents have their effect."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import interface_of, small_spec

from attn_export.cases.mask_patterns import UNUSED_FACTOR, padding_of
from attn_export.cases.plan import plan_cases
from attn_export.export.subject import Subject
from attn_export.results import BASE, Case
from attn_export.spec import AttentionSpec

MASKS = ["bool[B,1,1,S]", "float[B,1,1,S]", "bool[B,H,L,S]"]


def cases_of(**changes: object) -> dict[str, Case]:
    spec = small_spec(cache="in-place", **changes)
    plan = plan_cases(interface_of(spec))
    return {case.name: case for case in plan.cases}


def cases_with(content: str, **changes: object) -> list[Case]:
    found = [case for case in cases_of(**changes).values() if content in case.contents]
    assert len(found) >= 2
    return found


def lengths_of(case: Case) -> np.ndarray:
    """Return the number of keys of each row, including the new ones."""
    found: np.ndarray = case.inputs["past_length"] + case.sizes["query_len"]
    return found


@pytest.mark.parametrize("changes", [{}, {"rotary": "half"}, {"window_left": 40}], ids=str)
def test_new_keys_fit_into_every_row(changes):
    for case in cases_of(**changes).values():
        lengths = lengths_of(case)
        assert lengths.dtype == np.int64
        assert lengths.shape == (case.sizes["batch"],)
        assert (lengths >= case.sizes["query_len"]).all()
        assert (lengths <= case.sizes["capacity"]).all()
        assert case.inputs["past_key"].shape[2] == case.sizes["capacity"]


def test_rows_differ_and_buffers_are_full_or_not():
    shapes = [case for case in cases_of().values() if case.name != "beyond_length"]
    differ = [case for case in shapes if len(set(lengths_of(case).tolist())) > 1]
    full = [case for case in shapes if lengths_of(case).max() == case.sizes["capacity"]]
    left = [case for case in shapes if lengths_of(case).max() < case.sizes["capacity"]]
    assert min(len(differ), len(full), len(left)) >= 6
    assert any(case.sizes["past_len"] and (lengths_of(case) == 1).any() for case in shapes)


def test_a_batch_of_one_fills_its_buffer():
    assert any(case.sizes["batch"] == 1 for case in cases_with("empty_and_full"))


def test_rows_of_the_base_differ_and_all_of_them_change():
    cases = cases_of()
    base, changed = (cases[n].inputs["past_length"] for n in (BASE, "changed_past_length"))
    assert len(set(base.tolist())) == len(base)
    assert (base != changed).all()
    assert base.max() < cases[BASE].sizes["past_len"], "there is a rest behind every row"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["left_padding", "right_padding"])
def test_padding_hides_keys_that_a_row_holds(mask, name):
    for case in cases_with(name, attn_mask=mask):
        values = case.inputs["attn_mask"]
        shown = values if values.dtype == np.bool_ else values > -np.inf
        held = lengths_of(case)
        for row, (end, padding) in enumerate(zip(held, padding_of(held), strict=True)):
            wanted = np.ones(case.sizes["capacity"], np.bool_)
            side = slice(None, padding) if name == "left_padding" else slice(end - padding, end)
            wanted[side] = 0
            assert (shown[row] == wanted).all()
            assert end == 1 or shown[row][..., :end].any()


def test_positions_count_from_the_end_of_the_padding_in_each_row():
    for case in cases_with("left_padding", rotary="half", position_ids=True):
        held, padding = case.inputs["past_length"], padding_of(lengths_of(case))
        L = case.sizes["query_len"]
        wanted = np.maximum((held - padding)[:, None] + np.arange(L), 0)
        np.testing.assert_array_equal(case.inputs["position_ids"], wanted)


@pytest.mark.parametrize("mask", MASKS)
def test_the_changed_key_of_the_mask_is_one_that_row_0_holds(mask):
    cases = cases_of(attn_mask=mask)
    before, after = (cases[n].inputs["attn_mask"] for n in (BASE, "changed_attn_mask"))
    (key,) = {int(place) for place in np.argwhere(before != after)[:, -1]}
    assert key == cases[BASE].inputs["past_length"][0] + 1


def test_elements_beyond_the_keys_of_a_row_are_large():
    for case in cases_with("beyond_length"):
        lengths = case.inputs["past_length"]
        assert len(set(lengths.tolist())) > 1 or case.sizes["batch"] == 1
        for name in ("past_key", "past_value"):
            for row, held in enumerate(lengths):
                rest, kept = case.inputs[name][row][:, held:], case.inputs[name][row][:, :held]
                assert not rest.size or np.abs(rest).max() > UNUSED_FACTOR / 2
                assert not kept.size or np.abs(kept).max() < 1e5
                assert np.isfinite(rest).all()
                assert name == "past_key" or (np.abs(rest) == np.finfo(np.float32).max).all()


def test_scores_of_keys_beyond_the_length_are_above_any_number_for_minus_infinity_and_finite():
    for case in cases_with("beyond_length"):
        rest = np.abs(case.inputs["past_key"]).max()
        assert 1e20 < rest < np.finfo(np.float32).max / 1e6


def test_the_far_case_has_all_of_the_past():
    spec = AttentionSpec(
        embed_dim=32, num_heads=4, causal=True, cache="in-place", window_left=40, attn_mask="none"
    )
    plan = plan_cases(interface_of(spec))
    (far,) = (case for case in plan.cases if case.name == "far_keys")
    assert far.inputs["past_length"].tolist() == [42]
    assert far.sizes["capacity"] == 44
    assert not any("window" in note for note in plan.notes)


def test_the_past_of_a_subject_fits_at_every_size_that_it_draws():
    subject = Subject.from_spec(small_spec(cache="in-place"))
    assert subject.relations == {}
    example = {"batch": 2, "query_len": 5, "past_len": 7, "capacity": 12}
    assert subject.example_sizes == example
    for changed in ({}, {"query_len": 13}, {"past_len": 0}, {"batch": 7}):
        sizes = subject.sizes_with(changed)
        assert sizes["capacity"] == sizes["past_len"] + sizes["query_len"]
        drawn = subject.draw(sizes, "capacity")
        assert int(drawn["past_length"].max()) <= sizes["past_len"]
        subject.call(subject.module, drawn)


@pytest.mark.parametrize("one_query", [True, False])
def test_a_row_without_a_past_sees_its_own_key_alone_with_a_score_far_below_zero(one_query):
    """Check that no finite number in place of -inf hides the other keys of such a row."""
    spec = AttentionSpec(embed_dim=32, num_heads=4, head_dim=8, cache="in-place")
    subject = Subject.from_spec(spec)
    cases = [
        case
        for case in subject.plan().cases
        if {"large_logits", "empty_and_full"} <= set(case.contents)
        and (case.sizes["query_len"] == 1) == one_query
    ]
    lowest = []
    for case in cases:
        empty = case.inputs["past_length"] == 0
        x = torch.from_numpy(case.inputs["query"][empty][:, :1])
        with torch.no_grad():
            q, k = (subject.module.get_submodule(f"{name}_proj")(x) for name in "qk")
        scores = (q * k).unflatten(-1, (4, 8)).sum(-1)
        if bool((case.inputs["past_length"] > 0).any()):
            lowest.append(float(scores.min()) / 8**0.5)
    assert min(lowest) < -1e9
