"""Distances from the reference, and elements that do not count."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from attn_export.measures import element_errors, eps, measure, zero_rows
from attn_export.tensorfile import is_floating

NAN, INF = np.nan, np.inf

# Magnitudes whose squares are neither 0 nor infinite.
numbers = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)
shapes = arrays.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4)
pairs = shapes.flatmap(
    lambda shape: st.tuples(*[arrays.arrays(np.float32, shape, elements=numbers)] * 2)
)


@pytest.mark.parametrize(
    ("x", "reference", "whole", "row"),
    [
        pytest.param([[3, 4]], [[3, 4]], 0, 0, id="equal"),
        pytest.param([[3, 5]], [[3, 4]], 0.2, 0.2, id="one row is the whole"),
        pytest.param([[30, 40], [1, 2]], [[30, 40], [1, 1]], 1 / 2502**0.5, 0.5**0.5,
                     id="a small row shows as a row only"),
        pytest.param([[3, 4], [9, 9]], [[3, 4], [0, 0]], 162**0.5 / 5, 0,
                     id="a row that has to be 0 is no row to measure"),
        pytest.param([[1, 2]], [[0, 0]], 0, 0, id="nothing to be relative to"),
        pytest.param([[3, NAN]], [[3, NAN]], 0, 0, id="NaN in both"),
        pytest.param([[3, 7]], [[3, NAN]], 0, 0, id="NaN in the reference"),
        pytest.param([[4, INF]], [[3, 4]], 1 / 3, 1 / 3, id="infinity in the other is left out"),
        pytest.param([[4, -INF]], [[3, INF]], 1 / 3, 1 / 3, id="infinities of both signs"),
        pytest.param([[-INF, INF]], [[-INF, INF]], 0, 0, id="nothing finite"),
        pytest.param(5, 4, 0.25, 0.25, id="a number without axes"),
        pytest.param([5, 4], [4, 4], 1 / 32**0.5, 1 / 32**0.5, id="one axis is one row"),
        pytest.param(np.zeros((0, 3)), np.zeros((0, 3)), 0, 0, id="no rows"),
        pytest.param(np.zeros((3, 0)), np.zeros((3, 0)), 0, 0, id="empty rows"),
    ],
)  # fmt: skip
def test_measure_is_relative_to_the_norms_of_the_whole_and_of_rows(x, reference, whole, row):
    found = measure(np.array(x, np.float32), np.array(reference, np.float32))
    assert found.whole == pytest.approx(whole)
    assert found.row == pytest.approx(row)


def test_errors_of_elements_are_infinite_where_one_array_is_not_finite():
    r = np.array([1.0, NAN, NAN, 2.0, INF, INF, -INF, 3.0, 1e308])
    t = np.array([1.5, NAN, 1.0, NAN, INF, 4.0, INF, 3.0, -1e308])
    errors = element_errors(r, t)
    np.testing.assert_array_equal(errors, [0.5, 0, INF, INF, 0, INF, INF, 0, INF])


def test_squares_of_float32_neither_overflow_nor_vanish():
    for size in (1e-44, 1e38):
        reference = np.full((2, 3), size, np.float32)
        assert measure(reference / 2, reference).whole == pytest.approx(0.5, rel=0.2)


@settings(deadline=None, max_examples=60)
@given(pairs, st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]))
def test_measures_do_not_depend_on_the_unit(pair, factor):
    x, reference = (array.astype(np.float64) for array in pair)
    assert measure(x * factor, reference * factor) == measure(x, reference)


@settings(deadline=None, max_examples=60)
@given(pairs)
def test_the_whole_is_no_further_than_its_worst_row(pair):
    """Compare measures with zero rows at 0: other rows belong to another check."""
    x, reference = (array.astype(np.float64) for array in pair)
    x = np.where(zero_rows(reference)[..., None], 0, x)
    found = measure(x, reference)
    assert found.whole <= found.row * (1 + 1e-12)


@settings(deadline=None, max_examples=60)
@given(pairs, st.data())
def test_infinities_and_nan_are_measured_as_0_in_both(pair, data):
    x, reference = pair
    index = data.draw(st.tuples(*(st.integers(0, size - 1) for size in x.shape)))
    zeroed = [array.copy() for array in pair]
    for array in zeroed:
        array[index] = 0
    spoiled = reference.copy()
    spoiled[index] = data.draw(st.sampled_from([NAN, INF, -INF]))
    assert measure(x, spoiled) == measure(*zeroed)


@pytest.mark.parametrize(
    ("reference", "zero"),
    [
        pytest.param([[0, 0], [0, 1]], [True, False], id="only a row of nothing but 0"),
        pytest.param([[-0.0, 0], [NAN, 0]], [True, False], id="minus 0 is 0, NaN is not"),
        pytest.param(0, True, id="a number without axes"),
        pytest.param(np.zeros((2, 0)), [True, True], id="empty rows"),
        pytest.param(np.zeros((0, 2)), np.zeros(0), id="no rows"),
    ],
)
def test_zero_rows(reference, zero):
    assert np.array_equal(zero_rows(np.array(reference)), zero)


@pytest.mark.parametrize(
    ("dtype", "step"),
    [
        (np.float64, 2**-52),
        (np.float32, 2**-23),
        (np.float16, 2**-10),
        (ml_dtypes.bfloat16, 2**-7),
    ],
)
def test_eps_is_the_distance_from_1_to_the_next_number(dtype, step):
    assert eps(np.dtype(dtype)) == step
    assert is_floating(np.dtype(dtype))


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int64, np.uint8])
def test_integers_and_bools_are_not_floating(dtype):
    assert not is_floating(np.dtype(dtype))
