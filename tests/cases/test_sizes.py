"""Names and sizes of dynamic axes: those of the example, and sums of others."""

from __future__ import annotations

import pytest

from attn_export.cases.draw import TRACED_SIZES, add_sums, axis_names, bounds
from attn_export.interface import Input

SUMS = {"total_len": "past_len + query_len"}


def test_the_bound_of_an_integer_is_a_size():
    inputs = {"x": Input(("frames",), "int64", 0, "steps"), "y": Input(("batch",), "int64", 0, 5)}
    assert bounds(inputs) == {"steps"}
    assert axis_names(inputs, {}) == ["batch", "frames", "steps"]


def test_the_traced_sizes_are_distinct_at_least_2_and_add_up():
    assert len(set(TRACED_SIZES.values())) == len(TRACED_SIZES)
    assert min(TRACED_SIZES.values()) >= 2
    assert add_sums(TRACED_SIZES, SUMS) == TRACED_SIZES


@pytest.mark.parametrize(
    ("shapes", "sums", "names"),
    [
        ({"x": ("batch", 4), "y": (2, "query_len")}, {}, ["batch", "query_len"]),
        ({"x": (3, 4)}, {}, []),
        ({"x": ("past_len",), "y": ("query_len",)}, SUMS, ["past_len", "query_len", "total_len"]),
    ],
)
def test_the_names_of_axes_include_sums_that_only_outputs_have(shapes, sums, names):
    inputs = {name: Input(shape) for name, shape in shapes.items()}
    assert axis_names(inputs, sums) == names
