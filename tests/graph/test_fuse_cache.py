"""Bringing a user's cache and repeated heads into the `Attention` node, pass by pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from attention_graphs import DV, Arrays, D, H, draw, named, output, qkv, run_ort, torch_attention
from ir_graphs import model_of, node_of, operators, shape_of, value, weight

from attn_export.graph import fuse_cache
from attn_export.graph.canonical import drop_unused_outputs

B, L, P, S = "batch", "query_len", "past_len", "key_len"
LOWEST, LARGEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max

SIZES = [(2, 3, 5, 4), (1, 1, 1, 0), (2, 1, 1, 7), (1, 4, 4, 0), (3, 2, 2, 1), (1, 1, 3, 2)]
"""B, L, new keys, P."""


def integers(name: str, *numbers: int) -> ir.Value:
    return weight(name, np.array(numbers, np.int64))


class Cached:
    """A graph that appends k and v to a past and attends to all of it. Its parts may be changed.

    Attributes:
        inputs: q, k, v, past_key, past_value, m.
        joins: The two Concat nodes.
        attention: The node that reads them.
    """

    def __init__(self, axis: int = 2, heads: int = H, **attributes: object) -> None:
        self.inputs = [
            *qkv(heads),
            value("past_key", B, heads, P, D),
            value("past_value", B, heads, P, DV),
            value("m", B, 1, L, "total_len", dtype=ir.DataType.BOOL),
        ]
        q, k, v, past_key, past_value, m = self.inputs
        self.presents = [
            value("present_key", B, heads, "total_len", D),
            value("present_value", B, heads, "total_len", DV),
        ]
        self.joins = [
            ir.node("Concat", [past, new], {"axis": axis}, outputs=[present])
            for past, new, present in zip(
                (past_key, past_value), (k, v), self.presents, strict=True
            )
        ]
        self.y = output()
        given = [q, *self.presents] + ([] if "is_causal" in attributes else [m])
        self.attention = ir.node("Attention", given, attributes, outputs=[self.y])
        self.nodes = [*self.joins, self.attention]
        self.outputs = [self.y, *self.presents]
        self.initializers: list[ir.Value] = []

    def model(self) -> ir.Model:
        return model_of(self.inputs, self.outputs, self.nodes, self.initializers)


def sizes_of(B: int, L: int, new: int, P: int) -> dict[str, int]:
    return named(B, L, new) | {"past_len": P, "total_len": P + new}


def joined(inputs: Arrays) -> Arrays:
    """q, k, v and m, with the past in front of k and v."""
    return {
        "q": inputs["q"],
        "k": np.concatenate([inputs["past_key"], inputs["k"]], axis=2),
        "v": np.concatenate([inputs["past_value"], inputs["v"]], axis=2),
        "m": inputs["m"],
    }


def check_all_sizes(model: ir.Model, **options: object) -> None:
    """The first outputs of a model are those of PyTorch, with the past in front."""
    for sizes in SIZES:
        inputs = draw(model, sizes_of(*sizes))
        whole = joined(inputs)
        wanted = [torch_attention(whole, **options), whole["k"], whole["v"]]
        for array, expected in zip(run_ort(model, inputs), wanted, strict=False):
            np.testing.assert_allclose(array, expected, atol=2e-6, rtol=1e-5)


def is_fused(model: ir.Model) -> bool:
    node = node_of(model, "Attention")
    return len(node.inputs) > 4 and node.inputs[4] is not None


# -- caches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [2, -2])
def test_a_concatenated_cache_becomes_the_past_of_the_attention(axis):
    model = Cached(axis).model()
    check_all_sizes(model)
    fuse_cache.fuse_caches(model)
    drop_unused_outputs(model)
    assert operators(model) == ["Attention"]
    node = node_of(model, "Attention")
    names = ["q", "k", "v", "m", "past_key", "past_value"]
    assert [v.name for v in node.inputs] == names
    assert [v.name for v in node.outputs] == ["y", "present_key", "present_value"]
    assert [v.name for v in model.graph.outputs] == ["y", "present_key", "present_value"]
    assert shape_of(node.outputs[1]) == [B, H, "total_len", D]
    check_all_sizes(model)


def test_shared_heads_have_a_cache_too():
    model = Cached(heads=2).model()
    fuse_cache.fuse_caches(model)
    assert operators(model) == ["Attention"]
    check_all_sizes(model, enable_gqa=True)


def test_a_cache_may_be_cut_out_of_one_input():
    graph = Cached()
    past = value("past", 2, B, H, P, D)
    graph.inputs[3:5] = [past]
    graph.inputs[2].shape = ir.Shape([B, H, S, D])
    for index, join in enumerate(graph.joins):
        at = integers(f"at_{index}", index)
        cut = ir.node("Gather", [past, at], {"axis": 0})
        flat = ir.node("Squeeze", [cut.outputs[0], integers(f"axis_{index}", 0)])
        graph.initializers += [at, flat.inputs[1]]
        flat.outputs[0].shape = ir.Shape([B, H, P, D])
        join.replace_input_with(0, flat.outputs[0])
        graph.nodes[index * 2 : index * 2] = [cut, flat]
    graph.presents[1].shape = ir.Shape([B, H, "total_len", D])
    graph.y.shape = ir.Shape([B, H, L, D])
    model = graph.model()
    fuse_cache.fuse_caches(model)
    assert operators(model) == ["Gather", "Squeeze"] * 2 + ["Attention"]
    inputs = draw(model, sizes_of(2, 3, 5, 4))
    whole = joined(inputs | {"past_key": inputs["past"][0], "past_value": inputs["past"][1]})
    np.testing.assert_allclose(run_ort(model, inputs)[0], torch_attention(whole), atol=2e-6)


def test_a_reader_in_front_of_the_attention_comes_after_it():
    graph = Cached()
    twice = value("twice", B, H, "total_len", D)
    graph.nodes.insert(2, ir.node("Add", [graph.presents[0]] * 2, outputs=[twice]))
    graph.outputs.append(twice)
    model = graph.model()
    fuse_cache.fuse_caches(model)
    assert operators(model) == ["Attention", "Add"]
    check_all_sizes(model)


def test_a_graph_in_order_keeps_its_order():
    graph = Cached()
    relu = ir.node("Relu", [graph.y], outputs=[value("z", B, H, L, DV)])
    first = ir.node("Not", [graph.inputs[5]])
    second = ir.node("Not", [first.outputs[0]])
    graph.attention.replace_input_with(3, second.outputs[0])
    graph.nodes[0:0] = [first, second]
    graph.nodes.append(relu)
    graph.outputs.append(relu.outputs[0])
    model = graph.model()
    fuse_cache.fuse_caches(model)
    assert operators(model) == ["Not", "Not", "Attention", "Relu"]
    check_all_sizes(model)


def test_the_present_need_not_leave_the_graph_as_it_is():
    graph = Cached()
    turned = [value(f"turned_{i}", B, "total_len", H, dim) for i, dim in enumerate((D, DV))]
    for present, out in zip(graph.presents, turned, strict=True):
        graph.nodes.append(ir.node("Transpose", [present], {"perm": [0, 2, 1, 3]}, outputs=[out]))
    graph.outputs = [graph.y, *turned]
    model = graph.model()
    fuse_cache.fuse_caches(model)
    assert operators(model) == ["Attention", "Transpose", "Transpose"]
    inputs = draw(model, sizes_of(2, 3, 5, 4))
    got, whole = run_ort(model, inputs), joined(inputs)
    np.testing.assert_allclose(got[0], torch_attention(whole), atol=2e-6)
    np.testing.assert_array_equal(got[2], whole["v"].swapaxes(1, 2))


def test_a_second_attention_reads_the_present_of_the_first():
    graph = Cached()
    z = output("z")
    given = [graph.inputs[0], *graph.presents, graph.inputs[5]]
    graph.nodes.append(ir.node("Attention", given, {"scale": 0.1}, outputs=[z]))
    graph.outputs.append(z)
    model = graph.model()
    fuse_cache.fuse_caches(model)
    assert operators(model) == ["Attention", "Attention"]
    check_all_sizes(model)
    inputs = draw(model, sizes_of(2, 3, 5, 4))
    wanted = torch_attention(joined(inputs), scale=0.1)
    np.testing.assert_allclose(run_ort(model, inputs)[3], wanted, atol=2e-6)


# -- what is no cache, or cannot be one ---------------------------------------------------------


def test_a_causal_attention_keeps_its_concat_for_a_past_would_shift_it():
    model = Cached(is_causal=1).model()
    before = [run_ort(model, draw(model, sizes_of(*sizes))) for sizes in SIZES]
    fuse_cache.fuse_caches(model)
    assert operators(model) == ["Concat", "Concat", "Attention"]
    for sizes, wanted in zip(SIZES, before, strict=True):
        inputs = draw(model, sizes_of(*sizes))
        whole = joined(inputs)
        del whole["m"]
        np.testing.assert_array_equal(run_ort(model, inputs)[0], wanted[0])
        np.testing.assert_allclose(wanted[0], torch_attention(whole, is_causal=True), atol=2e-6)


def prefix_of_weights(graph: Cached) -> None:
    for index, join in enumerate(graph.joins):
        prefix = weight(f"prefix_{index}", np.ones((1, H, 3, (D, DV)[index]), np.float32))
        graph.initializers.append(prefix)
        join.replace_input_with(0, prefix)


def past_that_is_computed(graph: Cached) -> None:
    for index, join in enumerate(graph.joins):
        relu = ir.node("Relu", [join.inputs[0]])
        relu.outputs[0].shape = join.inputs[0].shape
        join.replace_input_with(0, relu.outputs[0])
        graph.nodes.insert(index, relu)


def three_parts(graph: Cached) -> None:
    for join in graph.joins:
        join.resize_inputs(3)
        join.replace_input_with(2, join.inputs[1])


def nobody_wants_the_present(graph: Cached) -> None:
    graph.outputs = [graph.y]


def nobody_wants_the_present_value(graph: Cached) -> None:
    graph.outputs.pop()


def pasts_of_two_lengths(graph: Cached) -> None:
    graph.inputs[4].shape = ir.Shape([B, H, "another_len", DV])


def pasts_of_unknown_lengths(graph: Cached) -> None:
    for past in graph.inputs[3:5]:
        past.shape = ir.Shape([B, H, None, past.shape[3]])


def a_past_of_unknown_shape(graph: Cached) -> None:
    graph.inputs[3].shape = None


def only_keys_are_joined(graph: Cached) -> None:
    graph.attention.replace_input_with(2, graph.inputs[2])


def one_concat_for_both(graph: Cached) -> None:
    graph.attention.replace_input_with(2, graph.presents[0])


def another_axis(graph: Cached) -> None:
    for join in graph.joins:
        join.attributes["axis"] = ir.AttrInt64("axis", 1)


def a_mask_made_of_the_keys(graph: Cached) -> None:
    size = ir.node("Shape", [graph.presents[0]])
    mask = ir.node("Expand", [graph.inputs[5], size.outputs[0]])
    graph.attention.replace_input_with(3, mask.outputs[0])
    graph.nodes[2:2] = [size, mask]


def a_mask_made_of_the_keys_in_a_branch(graph: Cached) -> None:
    """As `torch.cond` exports to: what a branch reads is no input of the node that has it."""
    branches = {}
    for name in ("then_branch", "else_branch"):
        size = ir.node("Shape", [graph.presents[0]])
        mask = ir.node("Expand", [graph.inputs[5], size.outputs[0]])
        branches[name] = ir.Graph([], mask.outputs, nodes=[size, mask], name=name)
    condition = value("condition", dtype=ir.DataType.BOOL)
    chosen = ir.node("If", [condition], branches)
    graph.inputs.append(condition)
    graph.attention.replace_input_with(3, chosen.outputs[0])
    graph.nodes.insert(2, chosen)


def a_query_that_is_the_keys(graph: Cached) -> None:
    graph.attention.replace_input_with(0, graph.presents[0])


@pytest.mark.parametrize(
    "change",
    [
        prefix_of_weights, past_that_is_computed, three_parts, nobody_wants_the_present,
        nobody_wants_the_present_value, pasts_of_two_lengths, pasts_of_unknown_lengths,
        a_past_of_unknown_shape, only_keys_are_joined, one_concat_for_both, another_axis,
        a_mask_made_of_the_keys, a_mask_made_of_the_keys_in_a_branch, a_query_that_is_the_keys,
    ],
)  # fmt: skip
def test_a_concat_stays(change: Callable[[Cached], None]):
    graph = Cached()
    change(graph)
    model = graph.model()
    before = operators(model)
    fuse_cache.fuse_caches(model)
    assert operators(model) == before
    assert not is_fused(model)


def test_an_attention_that_has_a_past_keeps_it():
    model = Cached().model()
    fuse_cache.fuse_caches(model)
    before = [v.name for v in node_of(model, "Attention").inputs]
    fuse_cache.fuse_attention(model)
    assert [v.name for v in node_of(model, "Attention").inputs] == before


# -- repeated heads ---------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "change",
    [a_target_of_unknown_sizes, a_reshape_that_mixes, keys_and_values_of_different_heads],
)
def test_heads_stay_repeated(change: Callable[[ir.Model], None]):
    model = Repeated().model
    change(model)
    before = [v.name for v in node_of(model, "Attention").inputs]
    fuse_cache.share_heads(model)
    assert [v.name for v in node_of(model, "Attention").inputs] == before


def expand_model(source: ir.Value) -> ir.Model:
    """Attention whose K/V are expanded to `[B, H, S, D]`."""
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
