"""Semantic probes: which ones a spec has, and that each changes what it says and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import small_spec

from attn_export.cases.probes import BASE, CHANGED, LARGE, PROBE_SIZES, SHARP, SMALL, probe_cases
from attn_export.cases.sizes import with_sums
from attn_export.nouns import Case
from attn_export.spec import Input

PLAIN = {"attn_mask": "none", "cache": "none"}
CROSS = {"cross": True, "causal": False, "cache": "none"}
IN_PLACE = {"cache": "in-place"}
PADDING = {"left_padding", "right_padding"}
MASK = {"fully_masked_rows", "one_visible_key"}


def probes_of(**changes: object) -> dict[str, Case]:
    spec = small_spec(**changes)
    cases = probe_cases(spec.inputs(), spec, spec.sums)
    assert len({case.name for case in cases}) == len(cases)
    return {case.name: case for case in cases}


def changed_inputs(probes: dict[str, Case], name: str) -> set[str]:
    base, probe = probes[BASE].inputs, probes[name].inputs
    assert list(probe) == list(base)
    for one in base:
        assert (probe[one].shape, probe[one].dtype) == (base[one].shape, base[one].dtype)
    return {one for one in base if probe[one].tobytes() != base[one].tobytes()}


# -- which there are --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "inputs", "further"),
    [
        ({}, "query attn_mask past_key past_value",
         {"kv_head_blocks", "causal_future", *MASK, *PADDING}),
        ({"num_kv_heads": 4}, "query attn_mask past_key past_value",
         {"causal_future", *MASK, *PADDING}),
        ({"num_kv_heads": 1, "causal": False}, "query attn_mask past_key past_value",
         {"kv_head_blocks", *MASK, *PADDING}),
        ({"attn_mask": "none"}, "query past_key past_value", {"kv_head_blocks", "causal_future"}),
        ({**PLAIN, "causal": False, "num_kv_heads": 4}, "query", set()),
        ({"attn_mask": "float[L,S]"}, "query attn_mask past_key past_value",
         {"kv_head_blocks", "causal_future", *MASK, "lowest_float"}),
        ({"attn_mask": "float[B,H,L,S]"}, "query attn_mask past_key past_value",
         {"kv_head_blocks", "causal_future", *MASK, *PADDING, "lowest_float"}),
        ({"attn_mask": "bool[1,1,L,S]"}, "query attn_mask past_key past_value",
         {"kv_head_blocks", "causal_future", *MASK}),
        ({**CROSS, "attn_mask": "none"}, "query key value", {"kv_head_blocks"}),
        (CROSS, "query key value attn_mask", {"kv_head_blocks", *MASK, *PADDING}),
        (IN_PLACE, "query attn_mask past_key past_value past_length",
         {"kv_head_blocks", "causal_future", *MASK, *PADDING, "beyond_length", "empty_and_full"}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_spec_has_the_probes_that_apply_to_it(changes, inputs, further):
    general = {BASE, "large_logits", "small_inputs", *(CHANGED + name for name in inputs.split())}
    assert set(probes_of(**changes)) == general | further


def test_a_module_of_unknown_meaning_has_the_general_probes():
    inputs = {"x": Input(("batch", "frames", 4)), "gate": Input(("batch", 4))}
    cases = probe_cases(inputs, None, {})
    assert [case.name for case in cases] == [
        BASE, "changed_x", "changed_gate", "large_logits", "small_inputs",
    ]  # fmt: skip
    assert cases[0].sizes == {"batch": PROBE_SIZES["batch"], "frames": 3}
    assert cases[0].inputs["x"].shape == (2, 3, 4)


# -- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"attn_mask": "none"}, CROSS, {"cache": "none"}])
def test_all_probes_of_a_spec_have_the_same_small_sizes(changes):
    spec = small_spec(**changes)
    for case in probes_of(**changes).values():
        assert case.kind == "probe"
        assert case.about
        assert all(size == PROBE_SIZES[name] for name, size in case.sizes.items())
        for name, shape in spec.input_shapes().items():
            wanted = [case.sizes[axis] if isinstance(axis, str) else axis for axis in shape]
            assert list(case.inputs[name].shape) == wanted


def test_probe_sizes_tell_batch_queries_past_and_keys_apart():
    assert with_sums(PROBE_SIZES, small_spec().relations) == PROBE_SIZES
    assert len(set(PROBE_SIZES.values())) >= 4
    assert PROBE_SIZES["batch"] > 1
    assert PROBE_SIZES["key_len"] != PROBE_SIZES["query_len"]


def test_probes_are_the_same_every_time():
    first, second = probes_of(), probes_of()
    for name, case in first.items():
        assert all(
            case.inputs[n].tobytes() == second[name].inputs[n].tobytes() for n in case.inputs
        )


# -- what each changes ------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["bool[B,1,1,S]", "float[L,S]", "bool[H,L,S]"])
def test_a_changed_input_is_the_only_one_that_changed(mask):
    probes = probes_of(attn_mask=mask)
    for name in probes[BASE].inputs:
        assert changed_inputs(probes, CHANGED + name) == {name}


@pytest.mark.parametrize(
    ("mask", "changes"),
    [
        ("bool[B,1,1,S]", {}), ("bool[1,S]", {"cache": "none"}), ("bool[1,1,1,S]", {}),
        ("bool[L,S]", CROSS), ("float[B,H,L,S]", {}), ("float[1,S]", CROSS),
        pytest.param(
            "float[1,S]", {"cache": "none"},
        ),
    ],
)  # fmt: skip
def test_a_changed_mask_shows_or_hides_some_key(mask, changes):
    probes = probes_of(attn_mask=mask, **changes)
    before, after = (
        array if array.dtype == bool else np.isfinite(array)
        for array in (probes[name].inputs["attn_mask"] for name in (BASE, "changed_attn_mask"))
    )  # fmt: skip
    assert (before != after).any()
    assert after[..., 0].all()


@pytest.mark.parametrize(
    ("name", "factor"),
    [("large_logits", LARGE), ("small_inputs", SMALL), ("kv_head_blocks", SHARP)],
)
@pytest.mark.parametrize("mask", ["bool[B,1,1,S]", "float[B,1,1,S]"])
def test_scaled_probes_multiply_every_input_but_the_mask(name, factor, mask):
    probes = probes_of(attn_mask=mask)
    assert changed_inputs(probes, name) == {"query", "past_key", "past_value"}
    for one in ("query", "past_key", "past_value"):
        np.testing.assert_allclose(
            probes[name].inputs[one], probes[BASE].inputs[one] * factor, rtol=1e-6
        )


def test_the_causal_probe_makes_all_queries_but_the_first_loud():
    probes = probes_of()
    assert changed_inputs(probes, "causal_future") == {"query"}
    before, after = (probes[name].inputs["query"] for name in (BASE, "causal_future"))
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
    np.testing.assert_array_equal(after[:, 1:], before[:, 1:] * np.float32(LARGE))


def masks_of(name: str, mask: str) -> tuple[np.ndarray, np.ndarray]:
    """Which keys the base case shows, and which the probe."""
    probes = probes_of(attn_mask=mask)
    assert changed_inputs(probes, name) == {"attn_mask"}
    found = []
    for case in (BASE, name):
        values = probes[case].inputs["attn_mask"]
        assert values.dtype == bool or not np.isnan(values).any()
        found.append(values if values.dtype == bool else values > -np.inf)
    return found[0], found[1]


MASKS = ["bool[B,1,1,S]", "float[B,1,1,S]", "bool[B,H,L,S]", "float[B,H,L,S]"]


@pytest.mark.parametrize(
    ("mask", "first"),
    [
        *((mask, (0, slice(None), slice(None))) for mask in MASKS[:2]),
        *((mask, (0, 0, 0)) for mask in MASKS[2:]),
        ("bool[L,S]", (0,)), ("float[H,1,S]", (0, 0)), ("bool[1,1,L,S]", (0, 0, 0)),
        ("bool[1,S]", (0,)),
    ],
)  # fmt: skip
def test_fully_masked_rows_are_the_first_and_no_others(mask, first):
    before, after = masks_of("fully_masked_rows", mask)
    hidden = ~after.any(axis=-1)
    wanted = np.zeros_like(hidden)
    wanted[first] = True
    np.testing.assert_array_equal(hidden, wanted)
    np.testing.assert_array_equal(after[~hidden], before[~hidden])


@pytest.mark.parametrize("mask", MASKS)
def test_one_visible_key_is_the_first(mask):
    _, after = masks_of("one_visible_key", mask)
    assert after[..., 0].all()
    assert not after[..., 1:].any()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("left_padding", [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
        ("right_padding", [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),
    ],
)
def test_padding_hides_keys_at_one_side_differently_in_each_row(mask, name, rows):
    _, after = masks_of(name, mask)
    for batch, row in enumerate(rows):
        np.testing.assert_array_equal(
            after[batch], np.broadcast_to(np.array(row, bool), after[batch].shape)
        )


@pytest.mark.parametrize("mask", ["float[B,1,1,S]", "float[B,H,L,S]", "float[L,S]"])
def test_the_lowest_float_is_low_everywhere_in_the_first_row_and_masks_nothing(mask):
    probes = probes_of(attn_mask=mask)
    assert changed_inputs(probes, "lowest_float") == {"attn_mask"}
    values = probes["lowest_float"].inputs["attn_mask"]
    first = values.reshape(-1, values.shape[-1])[0]
    assert (first == np.finfo(np.float32).min).all()
