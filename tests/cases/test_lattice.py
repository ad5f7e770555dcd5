"""The lattice: enough shapes, of every kind, decode first, sums of axes respected."""

from __future__ import annotations

import pytest
from conftest import small_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_export.cases.sizes import TRACED_SIZES, axis_names, bounds, lattice, tokens, with_sums
from attn_export.spec import AttentionSpec, Input

SPECS = {
    "cached, masked": {},
    "cached, no mask": {"attn_mask": "none"},
    "cached, a mask without batch": {"attn_mask": "float[L,S]"},
    "cached in place, masked": {"cache": "in-place"},
    "no cache, masked": {"cache": "none"},
    "no cache, no mask": {"cache": "none", "attn_mask": "none"},
    "cross, masked": {"cross": True, "causal": False, "cache": "none"},
    "cross, no mask": {"cross": True, "causal": False, "cache": "none", "attn_mask": "none"},
}

RELATIONS = {"total_len": "past_len + query_len"}

unknown_names = st.lists(
    st.text("abcdefgh_", min_size=1, max_size=6).filter(lambda name: name not in TRACED_SIZES),
    min_size=1, max_size=5, unique=True,
)  # fmt: skip


def shapes_of(spec: AttentionSpec) -> list[dict[str, int]]:
    names = axis_names(spec.inputs(), spec.sums)
    return [dict(sizes) for sizes in lattice(names, spec.sums)]


@pytest.fixture(params=SPECS.values(), ids=SPECS.keys())
def spec(request) -> AttentionSpec:
    return small_spec(**request.param)


def test_every_axis_of_inputs_and_outputs_has_a_size(spec):
    shapes = (*spec.input_shapes().values(), *spec.output_shapes().values())
    named = {axis for shape in shapes for axis in shape if isinstance(axis, str)}
    assert all(named <= set(sizes) for sizes in shapes_of(spec))


def test_there_are_at_least_30_different_shapes(spec):
    shapes = shapes_of(spec)
    assert len({tuple(sorted(sizes.items())) for sizes in shapes}) == len(shapes) >= 30


def test_decoding_comes_first_and_again_later(spec):
    decodes = [index for index, sizes in enumerate(shapes_of(spec)) if sizes["query_len"] == 1]
    assert decodes[0] == 0
    assert decodes[-1] > 10


def test_every_kind_of_size_is_there(spec):
    shapes = shapes_of(spec)
    batches = {sizes["batch"] for sizes in shapes}
    lengths = {sizes["query_len"] for sizes in shapes}
    assert {1, 2} < batches
    assert any(batch % 2 and batch > 1 for batch in batches)
    assert {1, TRACED_SIZES["query_len"]} < lengths
    assert max(lengths) > TRACED_SIZES["total_len"]
    if spec.has_cache:
        pasts = {sizes["past_len"] for sizes in shapes}
        assert {0, 1} < pasts
        assert max(pasts) > TRACED_SIZES["past_len"]
    if spec.cross:
        keys = {sizes["key_len"] for sizes in shapes}
        assert 1 in keys
        assert max(keys) > TRACED_SIZES["key_len"]


@pytest.mark.parametrize("name", [name for name in SPECS if "no cache" not in name])
def test_queries_and_keys_differ_in_number_both_ways(name):
    spec = small_spec(**SPECS[name])
    shapes = shapes_of(spec)
    assert any(sizes["query_len"] < sizes[spec.key_axis] for sizes in shapes)
    assert any(sizes["query_len"] == sizes[spec.key_axis] for sizes in shapes)
    if spec.cross:
        assert any(sizes["query_len"] > sizes["key_len"] for sizes in shapes)


@pytest.mark.parametrize(
    ("batch", "query_len", "past_len"),
    [(1, 1, 0), (2, 1, 0), (1, 5, 7), (2, 5, 7), (2, 5, 0), (3, 5, 5)],
)
def test_corners_of_a_cached_layer_are_there(batch, query_len, past_len):
    sizes = {"batch": batch, "query_len": query_len, "past_len": past_len}
    assert sizes | {"total_len": past_len + query_len} in shapes_of(small_spec())


def test_sizes_add_up(spec):
    for sizes in shapes_of(spec):
        assert sizes == with_sums(sizes, spec.sums)
        if spec.has_cache:
            assert sizes[spec.key_axis] == sizes["past_len"] + sizes["query_len"]


def test_what_bounds_an_integer_is_a_size():
    inputs = {"x": Input(("frames",), "int64", 0, "steps"), "y": Input(("batch",), "int64", 0, 5)}
    assert bounds(inputs) == {"steps"}
    assert axis_names(inputs, {}) == ["batch", "frames", "steps"]


def test_the_traced_sizes_are_distinct_at_least_2_and_add_up():
    assert len(set(TRACED_SIZES.values())) == len(TRACED_SIZES)
    assert min(TRACED_SIZES.values()) >= 2
    assert with_sums(TRACED_SIZES, RELATIONS) == TRACED_SIZES


# -- modules of the user's --------------------------------------------------------------------


@settings(deadline=None)
@given(unknown_names)
def test_axes_that_nobody_knows_get_sizes_of_their_own(names):
    shapes = lattice(["batch", "query_len", *names])
    assert len(shapes) >= 30
    assert all(set(sizes) == {"batch", "query_len", *names} for sizes in shapes)
    assert all(size >= 1 for sizes in shapes for size in sizes.values())
    for name in names:
        assert len({sizes[name] for sizes in shapes}) >= 10
    columns = [tuple(sizes[name] for sizes in shapes) for name in names]
    assert len(set(columns)) == len(names)


@settings(deadline=None)
@given(unknown_names)
def test_a_sum_of_unknown_axes_adds_up(names):
    relations = {"the sum": " + ".join(["batch", *names])}
    for sizes in lattice(["batch", "the sum", *names], relations):
        assert sizes["the sum"] == sizes["batch"] + sum(sizes[name] for name in names)


@settings(deadline=None)
@given(st.permutations(["batch", "query_len", "heads", "frames"]))
def test_the_order_of_the_names_does_not_matter(names):
    assert lattice(names) == lattice(sorted(names))


def test_each_of_many_unknown_axes_varies():
    names = [f"axis_{i}" for i in range(12)]
    shapes = lattice(names)
    assert all(len({sizes[name] for sizes in shapes}) >= 10 for name in names)


@pytest.mark.parametrize("name", ["batch", "query_len", "frames"])
def test_one_axis_alone_has_each_of_its_sizes_once(name):
    sizes = [shape[name] for shape in lattice([name])]
    assert len(sizes) == len(set(sizes)) >= 6


def test_without_dynamic_axes_there_is_one_shape():
    assert lattice([]) == [{}]


@pytest.mark.parametrize(
    ("shapes", "relations", "names"),
    [
        ({"x": ("batch", 4), "y": (2, "query_len")}, {}, ["batch", "query_len"]),
        ({"x": (3, 4)}, {}, []),
        (
            {"x": ("past_len",), "y": ("query_len",)}, RELATIONS,
            ["past_len", "query_len", "total_len"],
        ),
    ],
)  # fmt: skip
def test_the_names_of_axes_include_sums_that_only_outputs_have(shapes, relations, names):
    inputs = {name: Input(shape) for name, shape in shapes.items()}
    assert axis_names(inputs, relations) == names


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({"batch": 3, "query_len": 5, "total_len": 12}, 36), ({"query_len": 5}, 5),
        ({"batch": 3}, 3), ({}, 1),
    ],
)  # fmt: skip
def test_tokens_are_rows_of_the_longest_axis(sizes, count):
    assert tokens(sizes) == count
