"""Cases of fixed sizes: each input changes alone, and what is not finite is in one row."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import interface_of, small_spec

from attn_export.cases.draw import Interface, add_sums
from attn_export.cases.fixed_cases import NON_FINITE, fixed_cases, pattern_case
from attn_export.cases.influence import PROBE_SIZES
from attn_export.cases.input_patterns import VALUES
from attn_export.interface import Input
from attn_export.results import BASE, CHANGED, Case

CROSS = {"cross": True, "causal": False, "cache": "none"}
IN_PLACE = {"cache": "in-place"}
NAN = {"nan_in_rows", "nan_in_rows_one_query"}
SPOILT = NAN | {"inf_in_rows", "inf_in_rows_one_query"}
INF = {"inf_in_masked_key", "inf_in_masked_key_one_query"}


def cases_of(**changes: object) -> dict[str, Case]:
    spec = small_spec(**changes)
    cases = fixed_cases(interface_of(spec))
    assert len({case.name for case in cases}) == len(cases)
    return {case.name: case for case in cases}


def changed_inputs(cases: dict[str, Case], name: str) -> set[str]:
    base, case = cases[BASE].inputs, cases[name].inputs
    assert list(case) == list(base)
    for one in base:
        assert (case[one].shape, case[one].dtype) == (base[one].shape, base[one].dtype)
    return {one for one in base if case[one].tobytes() != base[one].tobytes()}


@pytest.mark.parametrize(
    ("changes", "inputs", "spoilt"),
    [
        ({}, "query attn_mask past_key past_value", SPOILT | INF),
        ({"attn_mask": "none"}, "query past_key past_value", SPOILT),
        (CROSS, "query key value attn_mask", SPOILT | INF),
        ({"cache": "none"}, "query attn_mask", SPOILT | {"inf_in_masked_key"}),
        (IN_PLACE, "query attn_mask past_key past_value past_length", SPOILT | INF),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_spec_has_a_base_a_change_of_each_input_and_rows_that_are_not_finite(
    changes, inputs, spoilt
):
    assert set(cases_of(**changes)) == {BASE, *(CHANGED + n for n in inputs.split())} | spoilt


def test_a_module_of_the_users_has_no_key_that_is_known_to_be_masked():
    inputs = {"x": Input(("batch", "frames", 4)), "gate": Input(("batch", 4))}
    cases = fixed_cases(Interface(inputs, {"y": ("batch", "frames", 4)}))
    spoilt = ["nan_in_rows", "inf_in_rows"]
    assert [case.name for case in cases] == [BASE, "changed_x", "changed_gate", *spoilt]
    assert cases[0].sizes == {"batch": PROBE_SIZES["batch"], "frames": 3}
    assert cases[0].inputs["x"].shape == (2, 3, 4)


@pytest.mark.parametrize("shape", [("frames", "batch"), (4, "batch")])
def test_rows_are_no_rows_of_a_batch_where_outputs_have_it_elsewhere(shape):
    cases = fixed_cases(Interface({"x": Input(("batch", "frames"))}, {"y": shape}))
    assert [case.name for case in cases] == [BASE, "changed_x"]


@pytest.mark.parametrize("changes", [{}, {"attn_mask": "none"}, CROSS, {"cache": "none"}])
def test_the_base_and_its_changes_have_the_same_small_sizes(changes):
    spec = small_spec(**changes)
    for case in cases_of(**changes).values():
        assert case.kind == "probe"
        assert case.about
        if not case.ignored_rows:
            assert all(size == PROBE_SIZES[name] for name, size in case.sizes.items())
        for name, shape in spec.input_shapes().items():
            wanted = [case.sizes[axis] if isinstance(axis, str) else axis for axis in shape]
            assert list(case.inputs[name].shape) == wanted


def test_probe_sizes_tell_batch_queries_past_and_keys_apart():
    assert add_sums(PROBE_SIZES, small_spec().relations) == PROBE_SIZES
    assert len(set(PROBE_SIZES.values())) >= 4
    assert PROBE_SIZES["batch"] > 1
    assert PROBE_SIZES["key_len"] != PROBE_SIZES["query_len"]


@pytest.mark.parametrize("mask", ["bool[B,1,1,S]", "float[L,S]", "bool[H,L,S]"])
def test_a_changed_input_is_the_only_one_that_changed(mask):
    cases = cases_of(attn_mask=mask)
    for name in cases[BASE].inputs:
        assert changed_inputs(cases, CHANGED + name) == {name}


@pytest.mark.parametrize(
    ("mask", "changes"),
    [
        ("bool[B,1,1,S]", {}), ("bool[1,S]", {"cache": "none"}), ("bool[1,1,1,S]", {}),
        ("bool[L,S]", CROSS), ("float[B,H,L,S]", {}), ("float[1,S]", CROSS),
        ("float[1,S]", {"cache": "none"}),
    ],
)  # fmt: skip
def test_a_changed_mask_shows_or_hides_some_key(mask, changes):
    cases = cases_of(attn_mask=mask, **changes)
    before, after = (
        array if array.dtype == bool else np.isfinite(array)
        for array in (cases[name].inputs["attn_mask"] for name in (BASE, "changed_attn_mask"))
    )
    assert (before != after).any()
    assert after[..., 0].all()


@pytest.mark.parametrize("name", sorted(SPOILT))
@pytest.mark.parametrize("changes", [{}, CROSS, IN_PLACE, {"attn_mask": "float[B,H,L,S]"}])
def test_one_row_is_not_finite_in_all_inputs_and_others_in_one_number_of_each(name, changes):
    case = cases_of(**changes)[name]
    assert (case.sizes["query_len"] == 1) == name.endswith("one_query")
    arrays = {n: a for n, a in case.inputs.items() if a.dtype == np.float32 and n != "attn_mask"}
    assert case.ignored_rows == tuple(range(1, 2 + len(arrays)))
    assert case.sizes["batch"] == 3 + len(arrays)
    is_spoilt = np.isnan if name in NAN else np.isposinf
    for row, array in enumerate(arrays.values(), NON_FINITE + 1):
        spoilt = is_spoilt(array)
        assert spoilt[NON_FINITE].all()
        assert np.flatnonzero(spoilt[row]).tolist() == [0]
        assert np.isfinite(np.delete(array, [NON_FINITE, row], axis=0)).all()
    assert not np.isnan(case.inputs.get("attn_mask", np.zeros(1))).any()


@pytest.mark.parametrize("name", sorted(INF))
@pytest.mark.parametrize("changes", [{}, CROSS, IN_PLACE, {"attn_mask": "float[B,H,L,S]"}])
def test_infinity_is_in_one_key_that_is_masked(name, changes):
    case = cases_of(**changes)[name]
    mask = case.inputs["attn_mask"]
    assert not (mask if mask.dtype == bool else np.isfinite(mask))[..., 0].any()
    infinite = {n: np.isposinf(a) for n, a in case.inputs.items() if a.dtype == np.float32}
    assert sum(array.any() for array in infinite.values()) == 2
    for array in infinite.values():
        assert not np.delete(array, NON_FINITE, axis=0).any()


@pytest.mark.parametrize("content", VALUES, ids=lambda content: content.name)
def test_a_content_alone_is_a_change_of_the_base(content):
    spec = small_spec()
    base = cases_of()[BASE]
    case = pattern_case(content, interface_of(spec))
    assert (case.name, case.sizes, case.about) == (content.name, base.sizes, content.about)
    assert changed_inputs({BASE: base, "it": case}, "it") == {"query", "past_key", "past_value"}
