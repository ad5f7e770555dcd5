"""Passes that undo the repetition of K/V heads, and that remove slices of everything."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from attention_graphs import DV, D, H, draw, integers, named, output, qkv, run_ort, torch_attention
from ir_graphs import model_of, node_of, operators, value

from attn_export.graph import fuse_cache

B, L, S = "batch", "query_len", "key_len"
LOWEST, LARGEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class Repeated:
    """Attention whose K/V heads are repeated by Unsqueeze, Expand and Reshape."""

    def __init__(self, *, heads: int = 2, axis: int = 2, shapes: bool = True) -> None:
        self.inputs = qkv(heads)
        self.nodes: list[ir.Node] = []
        self.initializers = [integers("axis", axis)]
        times = H // heads
        target = [1, 1, times, 1, 1] if axis == 2 else [1, times, 1, 1, 1]
        self.initializers.append(integers("target", *target))
        repeated = [self.repeat(v, times, axis, shapes) for v in self.inputs[1:]]
        y = output()
        self.nodes.append(ir.node("Attention", [self.inputs[0], *repeated], outputs=[y]))
        self.model = model_of(self.inputs, [y], self.nodes, self.initializers)

    def repeat(self, source: ir.Value, times: int, axis: int, shapes: bool) -> ir.Value:
        axis_of, target = self.initializers[:2]
        lift = ir.node("Unsqueeze", [source, axis_of])
        expand = ir.node("Expand", [lift.outputs[0], target])
        size = integers(f"{source.name}_size", 0, H, -1, source.shape[3])
        self.initializers.append(size)
        fold = ir.node("Reshape", [expand.outputs[0], size])
        if shapes:
            shape = [*source.shape]
            shape.insert(axis, times)
            expand.outputs[0].shape = ir.Shape(shape)
        fold.outputs[0].shape = ir.Shape([B, H, S, source.shape[3]])
        self.nodes += [lift, expand, fold]
        return fold.outputs[0]


def fuse_heads(model: ir.Model) -> list[str]:
    fuse_cache.fuse_attention(model)
    return operators(model)


@pytest.mark.parametrize("shapes", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_heads_that_are_repeated_one_by_one_are_shared(heads, shapes):
    model = Repeated(heads=heads, shapes=shapes).model
    before = [run_ort(model, draw(model, named(*sizes)))[0] for sizes in [(2, 3, 5), (1, 1, 1)]]
    assert fuse_heads(model) == ["Attention"]
    for sizes, wanted in zip([(2, 3, 5), (1, 1, 1)], before, strict=True):
        np.testing.assert_allclose(run_ort(model, draw(model, named(*sizes)))[0], wanted, atol=2e-6)


def test_heads_that_are_repeated_as_a_whole_stay():
    model = Repeated(axis=1).model
    assert "Expand" in fuse_heads(model)


def a_target_of_unknown_sizes(model: ir.Model) -> None:
    given = value("given", 5, dtype=ir.DataType.INT64)
    model.graph.inputs.append(given)
    for node in model.graph:
        if node.op_type == "Expand":
            node.outputs[0].shape = None
            node.replace_input_with(1, given)


def a_reshape_that_mixes(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "Reshape":
            B, H, S, dim = node.outputs[0].shape
            node.outputs[0].shape = ir.Shape([B, H, dim, S])


def keys_and_values_of_different_heads(model: ir.Model) -> None:
    single = ir.node("Expand", [value("single", B, 1, S, DV), integers("t", 1, H, 1, 1)])
    single.outputs[0].shape = ir.Shape([B, H, S, DV])
    attention = node_of(model, "Attention")
    model.graph.insert_before(attention, single)
    attention.replace_input_with(2, single.outputs[0])


def a_past_of_all_heads(model: ir.Model) -> None:
    node = node_of(model, "Attention")
    node.resize_inputs(6)
    for index, dim in enumerate((D, DV)):
        node.replace_input_with(4 + index, value(f"past_{index}", B, H, "past_len", dim))


@pytest.mark.parametrize(
    "change",
    [
        a_target_of_unknown_sizes, a_reshape_that_mixes, keys_and_values_of_different_heads,
        a_past_of_all_heads,
    ],
)  # fmt: skip
def test_heads_stay_repeated(change: Callable[[ir.Model], None]):
    model = Repeated().model
    change(model)
    before = list(node_of(model, "Attention").inputs)
    fuse_cache.share_heads(model)
    assert list(node_of(model, "Attention").inputs) == before


def expand_model(source: ir.Value) -> ir.Model:
    """Return Attention whose K/V are expanded to `[B, H, S, D]`."""
    q, y = value("q", B, H, L, D), value("y", B, H, L, D)
    expand = ir.node("Expand", [source, integers("target", 1, H, 1, 1)])
    expand.outputs[0].shape = ir.Shape([B, H, S, D])
    attention = ir.node("Attention", [q, *expand.outputs, *expand.outputs], outputs=[y])
    return model_of([q, source], [y], [expand, attention], [expand.inputs[1]])


def test_a_single_head_that_is_expanded_is_shared():
    model = expand_model(value("k", B, 1, S, D))
    assert fuse_heads(model) == ["Attention"]
    inputs = draw(model, named(2, 3, 5))
    wanted = torch_attention({**inputs, "v": inputs["k"]}, enable_gqa=True)
    np.testing.assert_allclose(run_ort(model, inputs)[0], wanted, atol=2e-6)


@pytest.mark.parametrize(
    "shape", [[1, 1, S, D], [B, 1, 1, D], [B, 1, S, 1], [1, S, D], [B, 1, None, D]]
)
def test_an_expand_of_more_than_the_head_stays(shape):
    assert fuse_heads(expand_model(value("k", *shape))) == ["Expand", "Attention"]


def test_repeated_keys_with_values_of_their_own_stay():
    model = Repeated().model
    node_of(model, "Attention").replace_input_with(2, value("other", B, H, S, DV))
    assert fuse_heads(model) == ["Unsqueeze", "Expand", "Reshape", "Attention"]


# -- slices of everything -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "whole"),
    [
        ([[0], [LARGEST], [1], [1]], True), ([[0], [LARGEST], [1]], True),
        ([[0], [LARGEST]], True), ([[0, 0], [LARGEST] * 2, [0, 2], [1, 1]], True),
        ([[1], [LARGEST], [1], [1]], False), ([[0], [4], [1], [1]], False),
        ([[0], [LARGEST], [1], [2]], False), ([[-1], [LOWEST], [1], [-1]], False),
        ([[0, 0], [LARGEST, 3], [0, 2], [1, 1]], False),
    ],
)  # fmt: skip
def test_only_a_slice_of_everything_is_left_out(bounds, whole):
    x, y = value("x", 3, 4, 5), value("y")
    parts = [integers(f"bound_{i}", *numbers) for i, numbers in enumerate(bounds)]
    cut = ir.node("Slice", [x, *parts])
    model = model_of([x], [y], [cut, ir.node("Relu", cut.outputs, outputs=[y])], parts)
    fuse_cache.drop_whole_slices(model)
    assert operators(model) == (["Relu"] if whole else ["Slice", "Relu"])


def test_a_slice_of_unknown_bounds_or_that_leaves_the_graph_stays():
    x, end, y = value("x", 3), value("end", 1, dtype=ir.DataType.INT64), value("y", None)
    start, largest = integers("start", 0), integers("largest", LARGEST)
    unknown, last = ir.node("Slice", [x, start, end]), ir.node("Slice", [x, start, largest])
    last.outputs[0].name = "z"
    relu = ir.node("Relu", unknown.outputs, outputs=[y])
    model = model_of([x, end], [y, last.outputs[0]], [unknown, relu, last], [start, largest])
    fuse_cache.drop_whole_slices(model)
    assert operators(model) == ["Slice", "Relu", "Slice"]
