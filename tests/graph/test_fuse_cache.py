"""Fusion of a user's cache into the `Attention` node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from attention_graphs import (
    DV,
    Arrays,
    Cached,
    D,
    H,
    draw,
    integers,
    named,
    output,
    run_ort,
    torch_attention,
)
from ir_graphs import node_of, operators, shape_of, value, weight

from attn_export.graph import fuse_cache
from attn_export.graph.canonical import drop_unused_outputs

B, L, P, S = "batch", "query_len", "past_len", "key_len"
SIZES = [(2, 3, 5, 4), (1, 1, 1, 0), (2, 1, 1, 7), (1, 4, 4, 0), (3, 2, 2, 1), (1, 1, 3, 2)]
"""B, L, new keys, P."""


def sizes_of(B: int, L: int, new: int, P: int) -> dict[str, int]:
    return named(B, L, new) | {"past_len": P, "total_len": P + new}


def joined(inputs: Arrays) -> Arrays:
    """Return q, k, v and m, with the past in front of k and v."""
    return {
        "q": inputs["q"],
        "k": np.concatenate([inputs["past_key"], inputs["k"]], axis=2),
        "v": np.concatenate([inputs["past_value"], inputs["v"]], axis=2),
        "m": inputs["m"],
    }


def check_all_sizes(model: ir.Model, **options: object) -> None:
    """Assert that a model's first outputs are PyTorch's, with the past in front."""
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


def without_the_present(graph: Cached) -> None:
    graph.outputs = [graph.y]


def without_the_present_value(graph: Cached) -> None:
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
    """Add an `If`, as `torch.cond` exports it: a branch's reads are no inputs of its node."""
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
        prefix_of_weights, past_that_is_computed, three_parts, without_the_present,
        without_the_present_value, pasts_of_two_lengths, pasts_of_unknown_lengths,
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
    graph = Cached()
    graph.attention.resize_inputs(6)
    for index, past in enumerate(graph.inputs[3:5]):
        graph.attention.replace_input_with(4 + index, past)
    model = graph.model()
    fuse_cache.fuse_caches(model)
    assert operators(model) == ["Concat", "Concat", "Attention"]


def test_attention_of_another_domain_is_not_touched():
    graph = Cached()
    graph.attention.domain = "com.microsoft"
    model = graph.model()
    fuse_cache.fuse_attention(model)
    assert operators(model) == ["Concat", "Concat", "Attention"]
