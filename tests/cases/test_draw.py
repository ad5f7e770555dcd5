"""Random inputs: equal for equal seed words, and without fully masked rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_export.cases.draw import concrete_shape, draw_inputs, generator, limits, may_try
from attn_export.cases.plan import covering_sizes
from attn_export.interface import Input
from attn_export.seeded_tensors import VISIBLE

QUERY = Input(("batch", "query_len", 8))
MASK = ("batch", 1, "query_len", "key_len")
SIZES = {"batch": 2, "query_len": 3, "key_len": 5}

FIRST_NUMBERS = [0.5579357149483289, 0.4319667353418992, 0.5755541956063166]
FIRST_QUERY = [-1.1768031120300293, 0.13896523416042328, 0.4044288992881775]


def draw(*words: str | int, mask: str = "bool", **sizes: int) -> dict[str, np.ndarray]:
    inputs = {"query": QUERY, "attn_mask": Input(MASK, mask)}
    return draw_inputs(inputs, SIZES | sizes, seed_words=words)


def test_the_numbers_are_those_that_golden_files_were_made_with():
    assert generator("a", 1).random(3).tolist() == pytest.approx(FIRST_NUMBERS)
    assert draw("pinned")["query"].ravel()[:3].tolist() == pytest.approx(FIRST_QUERY, rel=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_floats_are_standard_normal_in_their_type(dtype):
    drawn = draw_inputs({"x": Input((200, 50), dtype)}, {}, seed_words=())["x"]
    assert drawn.dtype.name == dtype
    assert drawn.shape == (200, 50)
    assert abs(drawn.astype(np.float64).mean()) < 0.05
    assert abs(drawn.astype(np.float64).std() - 1) < 0.05


@settings(deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.sampled_from(["bool", "float32"])
)
def test_key_0_is_visible_in_every_row_of_a_mask(batch, query_len, key_len, dtype):
    mask = draw(mask=dtype, batch=batch, query_len=query_len, key_len=key_len)["attn_mask"]
    assert mask.shape == (batch, 1, query_len, key_len)
    assert (mask[..., 0] if dtype == "bool" else np.isfinite(mask[..., 0])).all()


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_about_70_percent_of_the_keys_are_visible(dtype):
    mask = draw(mask=dtype, query_len=200, key_len=200)["attn_mask"]
    visible = mask if dtype == "bool" else np.isfinite(mask)
    assert visible.mean() == pytest.approx(VISIBLE, abs=0.02)
    if dtype != "bool":
        assert (mask[~visible] == -np.inf).all()


def test_only_a_mask_has_infinities():
    drawn = draw_inputs({"bias": Input((200, 50))}, {}, seed_words=())["bias"]
    assert np.isfinite(drawn).all()


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_integers_fill_their_range_to_both_ends(dtype):
    drawn = draw_inputs({"ids": Input((200, 5), dtype, 3, 6)}, {}, seed_words=())["ids"]
    assert drawn.dtype == dtype
    assert set(drawn.ravel().tolist()) == {3, 4, 5, 6}


def test_integers_reach_the_size_that_bounds_them():
    wanted = Input((200,), "int64", 2, "key_len")
    drawn = draw_inputs({"ids": wanted}, SIZES, seed_words=())["ids"]
    assert set(drawn.tolist()) == {2, 3, 4, 5}
    assert limits(wanted, SIZES) == (wanted.low, SIZES["key_len"])
    assert limits(Input((1,), "int64", 0, 7), SIZES) == (0, 7)


@pytest.mark.parametrize(("shape", "found"), [((50, 1), {True, False}), ((50, "key_len"), {True})])
def test_a_single_bool_may_be_false_where_it_is_no_number_of_keys(shape, found):
    drawn = draw_inputs({"flag": Input(shape, "bool")}, {"key_len": 1}, seed_words=())["flag"]
    assert set(drawn.ravel().tolist()) == found


def test_a_type_that_cannot_be_drawn_is_named():
    with pytest.raises(ValueError, match="cannot draw values for spectrum of type complex64"):
        draw_inputs({"spectrum": Input(("batch",), "complex64")}, SIZES, seed_words=())


@pytest.mark.parametrize(
    ("shape", "sizes"), [(("batch", 4, "query_len"), (2, 4, 3)), ((), ()), ((7,), (7,))]
)
def test_a_shape_gets_the_sizes_of_its_names(shape, sizes):
    assert concrete_shape(shape, SIZES) == sizes


def test_an_empty_axis_gives_an_empty_array():
    inputs = {"past_key": Input(("batch", 2, "past_len", 8))}
    drawn = draw_inputs(inputs, {"batch": 2, "past_len": 0}, seed_words=())
    assert drawn["past_key"].shape == (2, 2, 0, 8)


def test_a_float_mask_of_any_name_hides_keys_but_the_first():
    drawn = draw_inputs({"bias": Input((200, 9), hides=True)}, {}, seed_words=())["bias"]
    assert np.isfinite(drawn[:, 0]).all()
    assert np.isneginf(drawn[:, 1:]).mean() == pytest.approx(1 - VISIBLE, abs=0.05)


def test_the_tokens_of_a_grid_are_too_many_to_try():
    sums = {"tokens": "side*side"}
    sizes = [{"batch": 2, "side": side, "tokens": side**2} for side in (32, 128)]
    assert [may_try(0, each, sums) for each in sizes] == [True, False]
    assert may_try(0, {"batch": 2, "side": 128}, {})
    planned = covering_sizes(["batch", "side", "tokens"], sums, {})
    assert all(may_try(0, each, sums) for each in planned)
