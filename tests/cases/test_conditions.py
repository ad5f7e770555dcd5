"""Conditions on cases, and the conditions that sizes and contents meet."""

from __future__ import annotations

import pytest

from attn_export.cases.conditions import (
    SMALLEST,
    corners,
    free_axes,
    met_by_patterns,
    met_by_sizes,
    pattern_conditions,
    size_conditions,
    tried_sizes,
)

CACHED = ["batch", "query_len", "past_len"]


def test_axes_that_are_known_come_first_and_sums_are_none():
    names = ["frames", "past_len", "query_len", "batch", "total_len"]
    assert free_axes(names, ["total_len"]) == [*CACHED, "frames"]


@pytest.mark.parametrize("axis", ["batch", "query_len", "past_len", "key_len", "frames"])
def test_each_axis_is_tried_at_powers_of_two_their_neighbours_and_primes(axis):
    values = tried_sizes(axis)
    assert {2, 3, 4, 5, 7, 8, 9, 17} <= set(values)
    assert (0 in values) == (axis == "past_len")
    assert max(values) >= (17 if axis == "batch" else 33)


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        (CACHED, "large query_len, large past_len"),
        (CACHED, "large batch, middle query_len"),
        (CACHED, "one query, batch 17"),
        (CACHED, "one query, small batch, large past_len"),
        (["frames"], "frames 49"),
    ],
    ids=str,
)
def test_conditions_on_sizes_hold_pairs_and_calls_with_one_query(axes, wanted):
    assert wanted in size_conditions(axes)


@pytest.mark.parametrize(
    ("sizes", "met", "not_met"),
    [
        (
            (3, 17, 16),
            ["batch 3", "query_len 17", "large query_len, large past_len"],
            ["one query, batch 3", "large batch, large query_len"],
        ),
        (
            (9, 1, 0),
            ["one query, batch 9", "one query, past_len 0", "large batch, small past_len"],
            ["batch 8"],
        ),
    ],
    ids=str,
)
def test_sizes_meet_what_they_say(sizes, met, not_met):
    found = set(met_by_sizes(dict(zip(CACHED, sizes, strict=True)), CACHED))
    assert set(met) <= found
    assert not set(not_met) & found


def test_each_condition_on_sizes_is_met_by_some_sizes_that_are_tried():
    for axes in (["batch", "query_len"], ["batch", "query_len", "key_len"], ["batch", "frames"]):
        assert size_conditions(axes).keys() <= conditions_met(axes)


def conditions_met(axes: list[str]) -> set[str]:
    """Return what all combinations of the values of two or three axes meet."""
    found: set[str] = set()
    rows: list[dict[str, int]] = [{}]
    for axis in axes:
        rows = [{**row, axis: value} for row in rows for value in tried_sizes(axis)]
    for row in rows:
        found |= set(met_by_sizes(row, axes))
    return found


def test_patterns_that_hide_faults_stand_for_single_sizes_only():
    sizes = {"batch": 7, "query_len": 1, "past_len": 16}
    found = set(met_by_sizes(sizes, CACHED, is_opaque=True))
    assert {"batch 7", "one query, past_len 16"} <= found
    assert found < set(met_by_sizes(sizes, CACHED))
    assert not any("large" in each for each in found)


@pytest.mark.parametrize(
    "wanted",
    [
        "left_padding, several queries", "left_padding, one query, a past",
        "left_padding, one query, no past", "left_padding, several queries, batch 1",
        "fully_masked_rows, one query, a past, batch 1",
        "fully_masked_rows, several queries, batch > 1",
        "one_visible_key, several queries, no past",
        "large_logits, several queries, batch 1",
        "random inputs, one query, a past, batch > 1",
    ],
)  # fmt: skip
def test_each_content_is_wanted_in_each_form_of_a_call(wanted):
    masks = ["fully_masked_rows", "left_padding", "one_visible_key"]
    assert wanted in pattern_conditions(["large_logits"], masks, [], CACHED)


def test_without_queries_there_is_one_form():
    assert pattern_conditions(["sharp"], [], [], ["frames"]) == ["sharp", SMALLEST]


@pytest.mark.parametrize(
    ("contents", "met"),
    [
        ([], ["random inputs, one query, a past, batch > 1"]),
        (
            ["sharp", "left_padding"],
            [
                "sharp, one query, a past", "left_padding, one query, a past",
                "left_padding, one query, a past, batch > 1",
            ],
        ),
        (["one_visible_key"], ["one_visible_key, one query, a past"]),
    ],
    ids=str,
)  # fmt: skip
def test_patterns_meet_what_they_say(contents, met):
    sizes = {"batch": 2, "query_len": 1, "past_len": 17}
    assert set(met) <= set(met_by_patterns(contents, sizes))


@pytest.mark.parametrize("name", ["large_logits", "left_padding", "fully_masked_rows"])
def test_few_keys_show_little_of_what_many_show(name):
    few, many = ({"batch": 8, "query_len": 1, "past_len": past} for past in (3, 17))
    assert f"{name}, one query, a past" not in set(met_by_patterns([name], few))
    assert f"{name}, one query, a past" in set(met_by_patterns([name], many))


def test_corners_are_the_least_and_the_largest_of_each_axis_together():
    found = corners(CACHED)
    assert {"batch": 17, "query_len": 49, "past_len": 33} in found
    assert {"batch": 1, "query_len": 49, "past_len": 0} in found
    assert len(found) == 8
    assert "batch 17, query_len 49, past_len 33 together" in size_conditions(CACHED)
    assert corners(["batch", "frames"]) == []
