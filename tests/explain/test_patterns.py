"""Conditions on sizes, which must separate all failing from all passing cases."""

from __future__ import annotations

import pytest

from attn_export.explain.pattern import separating_conditions


def cases(axis: str, sizes: list[int]) -> list[dict[str, int]]:
    return [{axis: size} for size in sizes]


@pytest.mark.parametrize(
    ("failed", "passed", "says"),
    [
        ([4, 5, 9], [1, 2, 3], ["from batch 4 up (batch 3 passes)"]),
        ([1, 2], [3, 8], ["up to batch 2 (batch 3 passes)"]),
        ([0], [1, 9], ["where batch is 0"]),
        ([1], [2, 3], ["where batch is 1"]),
        ([4], [1, 9], ["where batch is 4"]),
        ([4, 8], [1, 9], ["with batch 4 to 8"]),
        ([16, 32], [1, 17, 33], ["where batch is a multiple of 16"]),
        ([1, 9], [2, 4, 16], ["where batch is no multiple of 2"]),
        ([1, 4], [2, 9], []),
        ([4, 5], [3, 4], []),
        ([1, 2], [], []),
    ],
)
def test_the_pattern_of_an_axis(failed: list[int], passed: list[int], says: list[str]):
    assert list(separating_conditions(cases("batch", failed), cases("batch", passed))) == says


def test_a_sum_of_axes_is_named_only_where_neither_of_them_tells():
    failed = [{"past_len": 4, "total_len": 5}, {"past_len": 8, "total_len": 9}]
    passed = [{"past_len": 0, "total_len": 1}]
    assert list(separating_conditions(failed, passed)) == ["from past_len 4 up (past_len 0 passes)"]
    passed = [{"past_len": 4, "total_len": 4}]
    assert list(separating_conditions(failed, passed)) == [
        "from total_len 5 up (total_len 4 passes)"
    ]


def test_two_axes_together_are_named_where_no_axis_does_alone():
    failed = [{"past_len": 3, "query_len": 2}]
    passed = [{"past_len": 0, "query_len": 2}, {"past_len": 3, "query_len": 1}]
    assert list(separating_conditions(failed, passed)) == ["with a past and several queries"]
