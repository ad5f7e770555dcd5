"""Location of an error in a message and in an error map, for outputs written by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from made_golden import made_golden

from attn_export.error_maps import ErrorMap
from attn_export.judge.judge import judge, name_output_axes
from attn_export.judge.replay import CELLS, Worst
from attn_export.results import Golden
from attn_export.schema import Tolerance

WEIGHTS = ("batch", 3, "query_len", "total_len")
RNG = np.random.default_rng(0)


def look(worst: Worst, golden: Golden, **outputs: np.ndarray) -> None:
    worst.update(judge("r", "g", golden, outputs), golden, outputs)


def map_of(reference: np.ndarray, got: np.ndarray, shape: tuple[int | str, ...] = ()) -> ErrorMap:
    worst = Worst()
    look(worst, made_golden({"y": reference}), y=got)
    (found,) = worst.error_maps({"y": shape})
    return found


def test_one_wrong_weight_is_found_in_batch_head_query_and_key():
    reference = RNG.random((2, 3, 4, 5), np.float32) + 1
    got = reference.copy()
    got[1, 2, 3, 0] += 0.5
    found = map_of(reference, got, WEIGHTS)
    assert found.axes == ("batch", "head", "query_len", "total_len")
    assert (found.index, found.shape) == ((1, 2, 3, 0), (2, 3, 4, 5))
    assert float(found.actual) == pytest.approx(float(found.expected) + 0.5)
    assert found.cell == (3, 0)
    assert np.argwhere(found.difference).tolist() == [[3, 0]]
    assert np.array(found.truth) == pytest.approx(reference[1, 2], rel=0.05)
    assert np.array(found.runtime) == pytest.approx(got[1, 2], rel=0.05)
    places = {profile.axis: np.flatnonzero(profile.values).tolist() for profile in found.profiles}
    assert places == {"batch": [1], "head": [2], "query_len": [3]}


def test_its_largest_row_is_the_verdicts_own_figure():
    reference = RNG.standard_normal((2, 4, 6)).astype(np.float32)
    got = reference * (
        1 + np.float32(1e-4) * RNG.standard_normal(reference.shape).astype(np.float32)
    )
    golden = made_golden({"y": reference}, tolerance=Tolerance(whole=1.5e-3, row=1e-3))
    (verdict,) = judge("r", "g", golden, {"y": got})
    worst = Worst()
    look(worst, golden, y=got)
    (found,) = worst.error_maps({})
    assert found.relative_to == "row"
    largest = max(found.profiles[0].values)
    assert largest == pytest.approx(verdict.worst, rel=0.05)


def test_it_is_at_the_place_that_the_message_names():
    reference = np.array([[300.0, 400.0], [0.3, 0.4]], np.float32)
    for got, by in (
        ([[300, 440], [0.3, 0.45]], "whole"),
        ([[300, 400], [0.3, 0.45]], "row"),
        ([[300, 400], [np.nan, np.nan]], "kind"),
    ):
        array = np.array(got, np.float32)
        (verdict,) = judge("r", "g", made_golden({"y": reference}), {"y": array})
        found = map_of(reference, array)
        assert found.relative_to == by
        assert f"at {list(found.index)}: actual" in verdict.message


def test_rows_that_are_not_compared_are_not_drawn():
    reference = np.ones((2, 3, 2), np.float32)
    golden = made_golden({"y": reference})
    case = dataclasses.replace(golden.case, ignored_rows=(1,))
    got = reference.copy()
    got[1] = np.nan
    got[0, 2, 0] = 2.0
    worst = Worst()
    look(worst, dataclasses.replace(golden, case=case), y=got)
    (found,) = worst.error_maps({"y": ()})
    assert (found.actual, found.index) == ("2", (0, 2, 0))
    assert found.profiles[0].values[1] == 0.0


def test_a_nan_is_no_number_and_nothing_else_is_hidden_by_it():
    reference = np.ones((2, 3, 2), np.float32)
    got = reference.copy()
    got[1, 0, 1] = np.nan
    found = map_of(reference, got)
    assert (found.actual, found.index, found.relative_to) == ("nan", (1, 0, 1), "kind")
    assert [profile.values for profile in found.profiles] == [(0.0, None), (None, 0.0, 0.0)]
    assert found.difference == ((0.0, None), (0.0, 0.0), (0.0, 0.0))
    assert found.runtime[0] == (1.0, None)


@pytest.mark.parametrize(
    ("reference", "got", "index", "cells"),
    [
        pytest.param(3.0, 4.0, (), (1, 1), id="no axes"),
        pytest.param([3.0, 4.0], [3.0, 5.0], (1,), (1, 2), id="one axis"),
        pytest.param([[3.0, 4.0]], [[9.0, 4.0]], (0, 0), (1, 2), id="two axes"),
        pytest.param([3, 4], [3, 5], (1,), (1, 2), id="integers"),
        pytest.param([[0.0, 0.0], [1.0, 0.0]], [[0.0, 1e-9], [1.0, 0.0]], (0, 1), (2, 2),
                     id="a row that has to be 0"),
        pytest.param([[True, False]], [[True, True]], (0, 1), (1, 2), id="bool"),
    ],
)  # fmt: skip
def test_any_count_of_axes_and_any_type(reference, got, index, cells):
    array = np.array(
        reference, None if isinstance(np.array(reference).flat[0].item(), int) else np.float32
    )
    found = map_of(array, np.array(got, array.dtype))
    assert found.index == index
    assert (len(found.truth), len(found.difference[0])) == cells


def test_many_elements_share_a_cell_which_shows_the_largest():
    reference = np.ones((1, 100, 1000), np.float32)
    got = reference.copy()
    got[0, 99, 777] = 2
    found = map_of(reference, got)
    for cells in (found.truth, found.runtime, found.difference):
        assert len(cells) <= CELLS
        assert len(cells[0]) <= CELLS
    (profile,) = found.profiles
    assert len(profile.values) <= CELLS
    down, across = found.cell
    assert (down, across) == (99 // 3, 777 // 21)
    values = np.array(found.difference)
    assert values[down, across] == values.max() > 0
    assert np.count_nonzero(values) == 1


def test_a_failure_is_worse_than_any_error_that_passed_and_the_largest_of_each_wins():
    reference = np.ones((1, 2, 4), np.float32)
    worst = Worst()
    for name, error in (("small", 1e-5), ("larger", 5e-4), ("least", 1e-6)):
        golden = made_golden({"y": reference}, case=name)
        look(worst, golden, y=reference + np.float32(error))
    assert worst.error_maps({})[0].case == "larger"
    look(worst, made_golden({"y": reference}, case="failed"), y=reference + np.float32(0.5))
    look(worst, made_golden({"y": reference}, case="nan"), y=reference * np.float32(np.nan))
    look(worst, made_golden({"y": reference}, case="also"), y=reference + np.float32(0.9))
    assert worst.error_maps({})[0].case == "nan"


def test_the_attention_weights_of_the_worst_case_have_a_map_too():
    weights = np.tril(np.ones((1, 2, 3, 3), np.float32))
    weights /= weights.sum(-1, keepdims=True)
    weights[0, 0, 0] = 0  # a query whose keys are all masked
    for other, count in ((weights, 2), (weights * 2, 1), (weights - 1, 1)):
        worst = Worst()
        golden = made_golden({"y": np.ones((1, 3, 4), np.float32), "w": other})
        look(worst, golden, y=np.full((1, 3, 4), 2, np.float32), w=other)
        assert [found.output for found in worst.error_maps({})] == ["y", "w"][:count]


def test_an_output_of_another_shape_has_no_map():
    worst = Worst()
    assert worst.error_maps({}) == ()
    reference = np.ones((2, 2), np.float32)
    look(worst, made_golden({"y": reference}))
    look(worst, made_golden({"y": reference}), y=reference[:1])
    look(worst, made_golden({"y": reference}), y=reference.astype(np.float64))
    look(worst, made_golden({"y": reference[:0]}), y=reference[:0])
    assert worst.error_maps({}) == ()


def test_axes_are_called_as_far_as_they_are_known():
    cache = name_output_axes(("batch", 2, "total_len", 64), 4)
    assert cache == ("batch", "head", "total_len", "element")
    assert name_output_axes(("batch", "query_len", 512), 3) == ("batch", "query_len", "element")
    assert name_output_axes((2, "n", 3), 3) == ("axis 0", "n", "element")
    assert name_output_axes((), 2) == ("axis 0", "axis 1")
