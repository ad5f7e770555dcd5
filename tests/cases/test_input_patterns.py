"""Input patterns of cases: each changes only the inputs that it describes, as it describes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from conftest import small_spec
from hypothesis import given
from hypothesis import strategies as st

from attn_export.cases.draw import add_sums, draw_inputs, generator
from attn_export.cases.input_patterns import (
    EQUAL_KEYS,
    FUTURE,
    HUGE,
    LARGE,
    LARGE_FLOAT16,
    LESS_LARGE,
    OUTLIER,
    OUTLIER_RATIO,
    PAIR_DIFFERENCE,
    SMALL,
    SMALLER,
    UNEVEN,
    VALUES,
    DrawnCase,
    InputPattern,
    is_mask,
)
from attn_export.cases.mask_patterns import (
    BIASES,
    BLOCK_KEYS,
    LARGE_BIASES,
    LENGTHS,
    LOWEST,
    MASKS,
    padding_of,
)
from attn_export.interface import Input, Traits
from attn_export.tensorfile import ArrayDict

ALL = (*VALUES, *MASKS, *LENGTHS, EQUAL_KEYS, FUTURE, LARGE_BIASES, LOWEST)
CONTENTS = {content.name: content for content in ALL}
SIZES = {"batch": 3, "query_len": 4, "past_len": 6}
VALUE_INPUTS = {"query", "past_key", "past_value"}


def changed(
    name: str, sizes: Mapping[str, int] = SIZES, **changes: object
) -> tuple[ArrayDict, ArrayDict]:
    """Return the inputs of a small layer before and after a change."""
    spec = small_spec(**changes)
    sizes = {n: size for n, size in sizes.items() if n != "past_len" or spec.has_cache}
    sizes = add_sums(sizes, spec.sums)
    before, after = (draw_inputs(spec.inputs(), sizes, seed_words=("test",)) for _ in range(2))
    CONTENTS[name].change(DrawnCase(after, spec.inputs(), spec.traits, sizes, generator("test")))
    for one, array in after.items():
        assert (array.shape, array.dtype) == (before[one].shape, before[one].dtype)
    return before, after


def differing(before: ArrayDict, after: ArrayDict) -> set[str]:
    return {name for name in before if before[name].tobytes() != after[name].tobytes()}


def shown(mask: np.ndarray) -> np.ndarray:
    return mask if mask.dtype == np.bool_ else mask > -np.inf


# -- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [content.name for content in VALUES])
@pytest.mark.parametrize("mask", ["bool[B,1,1,S]", "float[B,1,1,S]"])
def test_values_change_every_input_but_the_mask(name, mask):
    before, after = changed(name, attn_mask=mask)
    assert differing(before, after) == VALUE_INPUTS
    assert all(np.isfinite(after[one]).all() for one in VALUE_INPUTS)


@pytest.mark.parametrize("name", [content.name for content in VALUES])
def test_values_of_few_bits_stay_finite_and_are_not_all_zero(name):
    _, after = changed(name, dtype="float16")
    for one in VALUE_INPUTS:
        assert np.isfinite(after[one]).all()
        assert after[one].any()


@pytest.mark.parametrize(
    ("changes", "factors"),
    [({}, (SMALL, *SMALLER)), ({"dtype": "float16"}, 4 * (SMALL,))],
    ids=str,
)
def test_small_inputs_reach_from_thresholds_of_1e_3_to_those_below_1e_14(changes, factors):
    before, after = changed("small_inputs", {**SIZES, "batch": 4}, **changes)
    for one in VALUE_INPUTS:
        for row, factor in enumerate(factors):
            np.testing.assert_allclose(after[one][row], before[one][row] * factor, rtol=2e-3)


def test_tiny_values_are_numbers_that_a_flush_at_1e_30_takes_for_0():
    _, after = changed("tiny_values")
    assert all(0 < np.abs(after[one]).max() < 1e-29 for one in VALUE_INPUTS)
    assert all(np.abs(after[one]).max() > np.finfo(np.float32).tiny for one in VALUE_INPUTS)


def test_there_is_one_outlier_in_each_row_of_the_batch_of_two_sizes():
    _, after = changed("outliers")
    for one in VALUE_INPUTS:
        largest = np.sort(np.abs(after[one]).reshape(SIZES["batch"], -1), axis=1)
        np.testing.assert_allclose(largest[:, -1], [OUTLIER, OUTLIER / OUTLIER_RATIO, OUTLIER])
        assert (largest[:, -2] < 20).all()


def test_rows_of_the_batch_are_loud_in_four_ways():
    before, after = changed("large_logits", {**SIZES, "batch": 5})
    factors = {
        one: [after[one][row] / before[one][row] for row in range(5)] for one in VALUE_INPUTS
    }
    for one in ("query", "past_key", "past_value"):
        for row in (0, 4):
            np.testing.assert_allclose(factors[one][row], LARGE, rtol=1e-5)
        np.testing.assert_allclose(factors[one][1], HUGE, rtol=1e-5)
    np.testing.assert_allclose(factors["past_value"][2], LESS_LARGE, rtol=1e-5)
    np.testing.assert_allclose(factors["past_value"][3], UNEVEN, rtol=1e-5)
    for one in ("query", "past_key"):
        tokens = after[one][2]
        np.testing.assert_allclose(
            tokens[..., 1::2, :], tokens[..., :-1:2, :], rtol=2 * PAIR_DIFFERENCE
        )
    scores = factors["query"][3].max() * factors["past_key"][3].max()
    np.testing.assert_allclose(scores, 1, rtol=1e-5)
    assert factors["query"][3].max() > 1000


def test_a_module_of_the_users_is_loud_in_one_way():
    inputs, sizes = {"x": Input(("batch", "frames", 4))}, {"batch": 4, "frames": 5}
    before, after = (draw_inputs(inputs, sizes, seed_words=("test",)) for _ in range(2))
    drawn = DrawnCase(after, inputs, Traits(), sizes, generator("test"))
    CONTENTS["large_logits"].change(drawn)
    np.testing.assert_allclose(drawn.inputs["x"], before["x"] * LARGE, rtol=1e-5)


def test_one_hot_rows_hold_a_power_of_2_each():
    _, after = changed("one_hot_rows")
    for one in VALUE_INPUTS:
        assert (np.count_nonzero(after[one], axis=-1) == 1).all()
        mantissa, _ = np.frexp(np.abs(after[one]).max(axis=-1))
        assert (mantissa == 0.5).all()


def test_the_causal_future_is_loud_in_all_queries_but_the_first():
    before, after = changed("causal_future")
    assert differing(before, after) == {"query"}
    np.testing.assert_array_equal(after["query"][:, 0], before["query"][:, 0])
    np.testing.assert_array_equal(
        after["query"][:, 1:], before["query"][:, 1:] * np.float32(LARGE_FLOAT16)
    )


@pytest.mark.parametrize("content", [*VALUES, *MASKS, LOWEST], ids=lambda content: content.name)
@pytest.mark.parametrize("sizes", [(1, 1, 0), (1, 1, 1), (2, 1, 0), (1, 3, 0)], ids=str)
@pytest.mark.parametrize("mask", ["bool[B,1,1,S]", "float[L,S]", "bool[B,H,L,S]"])
def test_patterns_fit_the_smallest_sizes(content: InputPattern, sizes, mask):
    named = dict(zip(SIZES, sizes, strict=True))
    changed(content.name, named, attn_mask=mask)


# -- masks ------------------------------------------------------------------------------------

SHAPES = [
    "bool[B,1,1,S]", "float[B,1,1,S]", "bool[B,H,L,S]", "float[B,H,L,S]", "bool[L,S]",
    "float[H,1,S]", "bool[1,1,L,S]", "bool[1,S]",
]  # fmt: skip


@pytest.mark.parametrize("name", [content.name for content in MASKS])
@pytest.mark.parametrize("mask", SHAPES)
def test_masks_change_the_mask_and_little_else(name, mask):
    before, after = changed(name, attn_mask=mask)
    if name != "one_visible_key":
        assert differing(before, after) <= {"attn_mask"}
    assert not np.isnan(after["attn_mask"].astype(float)).any()


@pytest.mark.parametrize("mask", SHAPES)
def test_fully_masked_rows_are_the_first_the_middle_and_the_last(mask):
    before, after = (shown(m["attn_mask"]) for m in changed("fully_masked_rows", attn_mask=mask))
    rows = after.shape[:-1]
    wanted = np.zeros(rows, bool)
    for place in ([0] * len(rows), [n // 2 for n in rows], [n - 1 for n in rows]):
        wanted[tuple(place)] = True
    np.testing.assert_array_equal(~after.any(axis=-1), wanted)
    np.testing.assert_array_equal(after[~wanted], before[~wanted])


@pytest.mark.parametrize("mask", SHAPES)
def test_one_key_is_visible_in_each_row_the_last_in_the_first(mask):
    _, after = changed("one_visible_key", attn_mask=mask)
    rows = shown(after["attn_mask"]).reshape(-1, after["attn_mask"].shape[-1])
    assert (rows.sum(axis=-1) == 1).all()
    assert rows[0, -1]
    assert len(rows) == 1 or not rows[:, -1].all()


def test_values_are_huge_where_one_key_is_visible():
    before, after = changed("one_visible_key")
    for one in VALUE_INPUTS:
        np.testing.assert_allclose(after[one], before[one] * HUGE, rtol=1e-5)


@pytest.mark.parametrize("mask", SHAPES)
@pytest.mark.parametrize("name", ["left_padding", "right_padding"])
def test_padding_hides_keys_at_one_side_of_each_row_of_the_batch(mask, name):
    _, after = changed(name, attn_mask=mask)
    rows = shown(after["attn_mask"]).reshape(-1, after["attn_mask"].shape[-1])
    if name == "right_padding":
        rows = rows[:, ::-1]
    hidden = (~rows).sum(axis=-1)
    assert ((hidden > 0) & (hidden < rows.shape[-1])).all()
    np.testing.assert_array_equal(rows, np.arange(rows.shape[-1]) >= hidden[:, None])
    if mask.split("[")[1].startswith("B"):
        assert len(set(hidden.tolist())) == SIZES["batch"]


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=20).map(np.array))
def test_padding_is_some_keys_and_not_all_where_there_are_two(held):
    padding = padding_of(held)
    several = held > 1
    assert (padding[several] > 0).all()
    assert (padding[several] < held[several]).all()
    assert (padding <= 1)[~several].all()


def test_positions_count_from_the_end_of_the_padding():
    _, after = changed("left_padding", rotary="half", position_ids=True)
    hidden = (~after["attn_mask"]).sum(axis=-1).reshape(-1, 1)
    P, L = SIZES["past_len"], SIZES["query_len"]
    np.testing.assert_array_equal(after["position_ids"], np.maximum(P - hidden + np.arange(L), 0))


@pytest.mark.parametrize("mask", ["float[B,1,1,S]", "float[B,H,L,S]", "float[L,S]"])
def test_the_lowest_float_is_low_everywhere_in_the_first_row_and_masks_nothing(mask):
    before, after = changed("lowest_float", attn_mask=mask)
    assert differing(before, after) == {"attn_mask"}
    first = after["attn_mask"].reshape(-1, after["attn_mask"].shape[-1])[0]
    assert (first == np.finfo(np.float32).min).all()


@pytest.mark.parametrize(
    ("name", "input_", "expected"),
    [
        ("attn_mask", Input(("batch", "keys"), "bool", first=True), True),
        ("padding", Input(("batch", "keys"), "bool", first=False), True),
        ("attention_mask", Input(("batch", "keys"), "int64", 0, 1), True),
        ("bias", Input(("batch", "keys"), hides=True), True),
        ("flags", Input(("batch", "keys"), "bool", first=None), False),
        ("input_ids", Input(("batch", "keys"), "int64", 0, 99), False),
        ("x", Input(("batch", "keys", 4)), False),
        ("use", Input(("batch",), "bool", first=True), False),
    ],
)
def test_inputs_of_a_users_module_are_masks_by_what_they_hold(name, input_, expected):
    assert is_mask(name, input_) == expected


@pytest.mark.parametrize(
    ("wanted", "hidden"),
    [
        (Input(("batch", "keys"), "bool", first=True), False),
        (Input(("batch", "keys"), "bool", first=False), True),
        (Input(("batch", "keys"), "int64", 0, 1), 0),
        (Input(("batch", "keys"), hides=True), -np.inf),
    ],
)  # fmt: skip
def test_masks_of_a_users_module_hide_keys_in_their_own_way(wanted, hidden):
    inputs = {"mask": wanted, "x": Input(("batch", "keys", 4))}
    sizes = {"batch": 2, "keys": 5}
    drawn = draw_inputs(inputs, sizes, seed_words=("test",))
    CONTENTS["all_keys_masked"].change(DrawnCase(drawn, inputs, Traits(), sizes, generator("test")))
    assert (drawn["mask"] == hidden).all()
    CONTENTS["left_padding"].change(DrawnCase(drawn, inputs, Traits(), sizes, generator("test")))
    assert (drawn["mask"][:, 0] == hidden).all()
    assert (drawn["mask"][:, -1] != hidden).all()


LONG = {"batch": 2, "query_len": 3, "past_len": BLOCK_KEYS - 3}


@pytest.mark.parametrize("mask", ["bool[B,1,1,S]", "float[B,1,L,S]", "bool[1,S]"])
def test_blocks_of_16_32_and_64_keys_are_hidden_between_visible_ones(mask):
    _, after = changed("hidden_blocks", LONG, attn_mask=mask)
    rows = shown(after["attn_mask"]).reshape(-1, BLOCK_KEYS)
    for row in rows:
        edges = np.flatnonzero(np.diff(row.astype(int)))  # each block begins and ends within
        assert sorted(edges[1::2] - edges[::2]) == [16, 32, 64]
        assert row[0]
        assert row[-1]


def test_one_batch_element_sees_all_keys_and_the_others_none():
    _, after = changed("one_visible_element")
    assert shown(after["attn_mask"]).all(axis=(1, 2, 3)).tolist() == [False, False, True]
    assert not shown(after["attn_mask"])[:2].any()


def test_biases_are_large_low_and_mixed_and_hide_nothing():
    _, after = changed("large_biases", LONG, attn_mask="float[B,1,L,S]")
    rows = after["attn_mask"].reshape(-1, BLOCK_KEYS)
    assert np.isfinite(rows).all()
    assert set(rows[0].tolist()) == set(BIASES)
    assert (rows[1] > 6).all()
    assert rows[1].max() > 30
    assert (rows[2] < -16).all()
    assert (rows[3] < -900).all()


def test_some_tokens_of_each_input_are_0_others_in_the_next_batch_element():
    _, after = changed("zero_tokens")
    for name in VALUE_INPUTS:
        is_zero = (after[name] == 0).all(-1)
        assert 0 < is_zero.mean() < 0.6
        assert (is_zero[0] != is_zero[1]).any()


def test_keys_are_equal_where_their_values_are_not():
    _, after = changed("equal_keys")
    keys, values = after["past_key"], after["past_value"]
    assert (keys[:, :, :4] == keys[:, :, :1]).all()
    assert (keys[:, :, 4:] != keys[:, :, :1]).all()
    assert (values[:, :, 1:4] != values[:, :, :1]).all()
