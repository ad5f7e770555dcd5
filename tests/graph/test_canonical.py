"""Passes of the canonical form, each on a minimal graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
from ir_graphs import INT64, model_of, node_of, operators, run, shape_of, value, weight

from attn_export.graph import axis_names, canonical, ir_helpers

# -- sums of axes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("past_len + query_len", "total_len"), ("query_len + past_len", "total_len"),
        ("query_len+past_len", "total_len"), ("past_len", "past_len"),
        ("past_len + 1", "past_len + 1"), ("2*past_len", "2*past_len"),
        ("past_len + query_len + key_len", "past_len + query_len + key_len"),
    ],
)  # fmt: skip
def test_a_sum_of_axes_gets_its_one_name_everywhere(written, named):
    x, between, y = (value(name, "batch", written) for name in ("x", "between", "y"))
    nodes = [ir.node("Relu", [x], outputs=[between]), ir.node("Relu", [between], outputs=[y])]
    model = model_of([x], [y], nodes)
    axis_names.name_sums_of_axes(model, {"total_len": "past_len + query_len"})
    assert [shape_of(v) for v in (x, between, y)] == [["batch", named]] * 3


# -- weights ----------------------------------------------------------------------------------


def transposed(*readers: int, perm: Sequence[int] = (1, 0)) -> ir.Model:
    """Return a MatMul with the transpose of a weight, once for each reader."""
    w = weight("proj.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    x, nodes, outputs = value("x", "batch", 4), [], []
    for reader in readers:
        turned, y = value(f"turned_{reader}", 4, 3), value(f"y_{reader}", "batch", 3)
        nodes.append(ir.node("Transpose", [w], {"perm": perm}, outputs=[turned]))
        nodes.append(ir.node("MatMul", [x, turned], outputs=[y]))
        outputs.append(y)
    return model_of([x], outputs, nodes, [w])


def test_a_weight_is_stored_as_matmul_reads_it_under_its_own_name():
    model = transposed(0)
    x = np.random.default_rng(0).standard_normal((2, 4), dtype=np.float32)
    before = run(model, x=x)
    canonical.fold_weight_transposes(model)
    (stored,) = model.graph.initializers.values()
    assert node_of(model, "MatMul").inputs[1] is stored
    assert (stored.name, shape_of(stored)) == ("proj.weight", [4, 3])
    np.testing.assert_array_equal(
        stored.const_value.numpy(), np.arange(12).reshape(3, 4).transpose()
    )
    np.testing.assert_array_equal(run(model, x=x), before)


def test_a_weight_with_several_readers_stays_as_it_is():
    model = transposed(0, 1)
    canonical.fold_weight_transposes(model)
    assert operators(model) == ["Transpose", "MatMul"] * 2
    assert shape_of(model.graph.initializers["proj.weight"]) == [3, 4]


def test_a_transpose_of_an_input_stays():
    x, y = value("x", "batch", 4), value("y", 4, "batch")
    model = model_of([x], [y], [ir.node("Transpose", [x], {"perm": [1, 0]}, outputs=[y])])
    canonical.fold_weight_transposes(model)
    assert operators(model) == ["Transpose"]


def test_equal_weights_are_stored_once():
    check_deduplication(1000)


def test_equal_weights_are_stored_once_however_large_they_are(monkeypatch):
    check_deduplication(1100)
    monkeypatch.setattr(ir_helpers, "LARGE", 1000)  # compared row by row
    check_deduplication(1100)


@pytest.mark.parametrize("at", [(0, 0), (49, 39)], ids=["first", "last"])
def test_large_weights_that_differ_in_one_element_stay_apart(at, monkeypatch):
    monkeypatch.setattr(ir_helpers, "LARGE", 10)
    ours, other = np.zeros((50, 40), np.float32), np.zeros((40, 50), np.float32).T
    other[at] = -0.0  # equal as a number, and another one as bytes
    a, b = weight("a", ours), weight("b", other)
    y, z = value("y", 50, 40), value("z", 50, 40)
    nodes = [ir.node("Neg", [a], outputs=[y]), ir.node("Neg", [b], outputs=[z])]
    model = model_of([], [y, z], nodes, [a, b])
    ir_helpers.merge_equal_constants(model, large=True)
    assert list(model.graph.initializers) == ["a", "b"]
    other[at] = 0.0
    ir_helpers.merge_equal_constants(model, large=True)
    assert list(model.graph.initializers) == ["a"]


def check_deduplication(size: int) -> None:
    """Check two biases of zeros, a common initial state of modules."""
    a, b = (weight(f"{name}.bias", np.zeros(size, np.float32)) for name in "ab")
    x, z, y = (value(name, "batch", size) for name in "xzy")
    nodes = [ir.node("Add", [x, a], outputs=[z]), ir.node("Add", [z, b], outputs=[y])]
    model = model_of([x], [y], nodes, [a, b])
    canonical.canonicalize(model, [o.name for o in model.graph.outputs], {})
    assert len(model.graph.initializers) == 1


# -- Reshape and Expand -----------------------------------------------------------------------


def reshape_model(before: Sequence[str | int], after: Sequence[str | int]) -> ir.Model:
    """Return a Reshape to a target that this pass must treat as external."""
    x, y = value("x", *before), value("y", *after)
    target = value("target", len(after), dtype=INT64)
    node = ir.node("Reshape", [x, target], {"allowzero": 1}, outputs=[y])
    return model_of([x, target], [y], [node])


@pytest.mark.parametrize(
    ("before", "after", "target"),
    [
        (["batch", "query_len", 32], ["batch", "query_len", 4, 8], [0, 0, 4, 8]),
        (["batch", "query_len", 4, 8], ["batch", "query_len", 32], [0, 0, 32]),
        (["batch", 4, 2, "query_len", 8], ["batch", 8, "query_len", 8], [0, 8, -1, 8]),
        (["batch", 6, 8], ["folded", 8], [-1, 8]),
        ([6, 4], [2, 3, 4], [2, 3, 4]),
    ],
)
def test_the_target_of_a_reshape_is_a_constant_by_position(before, after, target):
    model = reshape_model(before, after)
    canonical.reshape_by_position(model)
    node = node_of(model, "Reshape")
    assert node.inputs[1].const_value.numpy().tolist() == target
    assert "allowzero" not in node.attributes
    sizes = {"batch": 2, "query_len": 3, "folded": 12}
    shape = [sizes.get(axis, axis) for axis in before]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    (y,) = run(model, x=x, target=np.zeros(len(after), np.int64))
    assert list(y.shape) == [sizes.get(axis, axis) for axis in after]
    assert y.ravel().tolist() == x.ravel().tolist()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["batch", "query_len", 8], ["query_len", "batch", 8]),
        (["folded", 8], ["batch", "query_len", 8]),
    ],
)
def test_a_reshape_with_more_than_one_unknown_stays_computed(before, after):
    model = reshape_model(before, after)
    canonical.reshape_by_position(model)
    assert node_of(model, "Reshape").inputs[1].name == "target"


def test_a_constant_target_stays():
    x, y, target = value("x", "n", 4), value("y", "n", 2, 2), weight("t", np.array([-1, 2, 2]))
    node = ir.node("Reshape", [x, target], {"allowzero": 1}, outputs=[y])
    model = model_of([x], [y], [node], [target])
    canonical.reshape_by_position(model)
    assert node.inputs[1] is target
    assert "allowzero" in node.attributes


def test_a_reshape_of_unknown_axes_keeps_its_meaning():
    model = reshape_model([None, None], [None, None])
    canonical.reshape_by_position(model)
    (y,) = run(model, x=np.zeros((2, 3), np.float32), target=np.array([3, 2]))
    assert y.shape == (3, 2)


def expand_model(before: Sequence[str | int | None], after: Sequence[str | int]) -> ir.Model:
    query, mask, y = value("query", "batch", "query_len", 4), value("mask", *before), value("y")
    y.shape = ir.Shape(after)
    target = value("target", len(after), dtype=INT64)
    node = ir.node("Expand", [mask, target], outputs=[y])
    return model_of([query, mask, target], [y], [node])


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        (["batch", 1, 1, "S"], ["batch", 1, "query_len", "S"], ["1", "1", "query_len", "1"]),
        ([1, 1, 1, "S"], ["batch", 1, "query_len", "S"], ["batch", "1", "query_len", "1"]),
        ([1, "S"], ["query_len", "S"], ["query_len", "1"]),
        (["S"], ["batch", "query_len", "S"], ["batch", "query_len", "1"]),
        (["query_len", "S"], ["query_len", "S"], ["1", "1"]),
    ],
)
def test_the_target_of_an_expand_names_only_the_axes_that_really_grow(before, after, parts):
    model = expand_model(before, after)
    canonical.expand_by_position(model)
    concat = node_of(model, "Expand").inputs[1].producer()
    found = []
    for part in concat.inputs:
        size = part.producer()
        if size is None:
            found.append(str(part.const_value.numpy().item()))
        else:
            at = size.attributes.get_int("start")
            assert size.inputs[0].name == "query"
            assert size.attributes.get_int("end") == at + 1
            found.append(["batch", "query_len"][at])
    assert found == parts
    sizes = {"batch": 2, "query_len": 3, "S": 5}
    (y,) = run(
        model,
        query=np.zeros((2, 3, 4), np.float32),
        mask=np.ones([sizes.get(axis, 1) for axis in before], np.float32),
        target=np.zeros(len(after), np.int64),
    )
    assert list(y.shape) == [sizes.get(axis, axis) for axis in after]


@pytest.mark.parametrize("after", [["batch", 1, "elsewhere", "S"], ["batch", 4, 1, "S"]])
def test_an_expand_to_a_size_of_no_input_stays(after):
    model = expand_model(["batch", 1, 1, "S"], after)
    canonical.expand_by_position(model)
    assert operators(model) == ["Expand"]
    assert node_of(model, "Expand").inputs[1].name == "target"


def test_an_expand_of_unknown_axes_keeps_its_meaning():
    model = expand_model([None], [None])
    canonical.expand_by_position(model)
    query, mask = np.zeros((1, 1, 4), np.float32), np.ones(1, np.float32)
    (y,) = run(model, query=query, mask=mask, target=np.array([7]))
    assert y.shape == (7,)


# -- pieces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 5])
def test_pieces_of_a_computed_size_are_slices(length: int):
    x, size, part = value("x", 2, "n"), value("size", dtype=INT64), ir.Value(name="part")
    y = [value(name, 2, None) for name in ("a", "b")]
    nodes = [ir.node("SplitToSequence", [x, size], {"axis": 1}, outputs=[part])]
    numbers = [weight(f"number_{n}", np.array(n)) for n in range(2)]
    nodes += [
        ir.node("SequenceAt", [part, n], outputs=[out]) for n, out in zip(numbers, y, strict=True)
    ]
    model = model_of([x, size], y, nodes, numbers)
    array = np.arange(2.0 * length, dtype=np.float32).reshape(2, length)
    canonical.slice_pieces(model)
    assert "SequenceAt" not in operators(model)
    assert "SplitToSequence" not in operators(model)
    a, b = run(model, x=array, size=np.array(3))
    assert a.tolist() == array[:, :3].tolist()
    assert b.tolist() == array[:, 3:].tolist()


def test_pieces_of_many_sizes_are_left_alone():
    x, lengths = value("x", 2, "n"), [value(name, 1, dtype=INT64) for name in ("m", "n")]
    sizes, part, out = ir.Value(name="sizes"), ir.Value(name="part"), value("a", 2, None)
    nodes = [
        ir.node("Concat", lengths, {"axis": 0}, outputs=[sizes]),
        ir.node("SplitToSequence", [x, sizes], {"axis": 1}, outputs=[part]),
        ir.node("SequenceAt", [part, number := weight("number", np.array(0))], outputs=[out]),
    ]
    model = model_of([x, *lengths], [out], nodes, [number])
    canonical.slice_pieces(model)
    array = np.arange(10, dtype=np.float32).reshape(2, 5)
    (a,) = run(model, x=array, m=np.array([3]), n=np.array([2]))
    assert a.tolist() == array[:, :3].tolist()
