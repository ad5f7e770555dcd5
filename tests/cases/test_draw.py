"""Random inputs: the same from the same words, no row masked by accident."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_export.cases.draw import VISIBLE, concrete, draw_inputs, generator

SHAPES = {"query": ("batch", "query_len", 8), "attn_mask": ("batch", 1, "query_len", "key_len")}
SIZES = {"batch": 2, "query_len": 3, "key_len": 5}

FIRST_NUMBERS = [0.5579357149483289, 0.4319667353418992, 0.5755541956063166]
FIRST_QUERY = [-1.1768031120300293, 0.13896523416042328, 0.4044288992881775]


def draw(*words: str | int, mask: str = "bool", **sizes: int) -> dict[str, np.ndarray]:
    dtypes = {"query": "float32", "attn_mask": mask}
    return draw_inputs(SHAPES, dtypes, SIZES | sizes, seed_words=words)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray], name: str) -> bool:
    return a[name].tobytes() == b[name].tobytes()


words = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 9)), max_size=3)


@settings(deadline=None)
@given(words)
def test_the_same_words_give_the_same_arrays(seed):
    first, second = draw(*seed), draw(*seed)
    assert all(equal(first, second, name) for name in SHAPES)


@settings(deadline=None)
@given(words, words)
def test_other_words_give_other_arrays(one, other):
    same = [(type(w), w) for w in one] == [(type(w), w) for w in other]
    assert equal(draw(*one), draw(*other), "query") == same


def test_the_numbers_are_those_that_golden_files_were_made_with():
    assert generator("a", 1).random(3).tolist() == pytest.approx(FIRST_NUMBERS)
    assert draw("pinned")["query"].ravel()[:3].tolist() == pytest.approx(FIRST_QUERY, rel=1e-6)


def test_inputs_of_one_shape_differ_from_each_other():
    shapes = {"key": ("batch", 4), "value": ("batch", 4)}
    drawn = draw_inputs(shapes, dict.fromkeys(shapes, "float32"), SIZES, seed_words=())
    assert (drawn["key"] != drawn["value"]).all()


def test_an_input_does_not_depend_on_the_others():
    alone = draw_inputs({"query": SHAPES["query"]}, {"query": "float32"}, SIZES, seed_words=("x",))
    assert equal(alone, draw("x"), "query")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_are_standard_normal_in_the_type_asked_for(dtype):
    drawn = draw_inputs({"x": (200, 50)}, {"x": dtype}, {}, seed_words=())["x"]
    assert drawn.dtype == dtype
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
    drawn = draw_inputs({"bias": (200, 50)}, {"bias": "float32"}, {}, seed_words=())["bias"]
    assert np.isfinite(drawn).all()


@pytest.mark.parametrize("dtype", ["int64", "int32", "complex64"])
def test_a_type_that_cannot_be_drawn_is_named(dtype):
    with pytest.raises(ValueError, match=f"cannot draw values for positions of type {dtype}"):
        draw_inputs({"positions": ("batch",)}, {"positions": dtype}, SIZES, seed_words=())


@pytest.mark.parametrize(
    ("shape", "sizes"), [(("batch", 4, "query_len"), (2, 4, 3)), ((), ()), ((7,), (7,))]
)
def test_a_shape_gets_the_sizes_of_its_names(shape, sizes):
    assert concrete(shape, SIZES) == sizes


def test_an_empty_axis_gives_an_empty_array():
    shapes = {"past_key": ("batch", 2, "past_len", 8)}
    sizes = {"batch": 2, "past_len": 0}
    drawn = draw_inputs(shapes, {"past_key": "float32"}, sizes, seed_words=())
    assert drawn["past_key"].shape == (2, 2, 0, 8)
