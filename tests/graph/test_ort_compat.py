"""Passes on masks that ONNX Runtime refuses, or reads differently from PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
from attention_graphs import (
    DV,
    D,
    H,
    attention_model,
    check_against_torch,
    draw,
    named,
    output,
    qkv,
    run_ort,
    torch_attention,
)
from ir_graphs import FLOAT, model_of, node_of, operators, shape_of, value, weight

from attn_export.graph import ort_compat
from attn_export.graph.lower.dialects import lower

BOOL = ir.DataType.BOOL
B, L, S = "batch", "query_len", "key_len"

SPREAD = ["Shape", "Concat", "Expand"]
MASKS = [
    ([L, S], []), ([B, H, L, S], []), ([B, 1, L, S], []), ([1, H, L, S], []), ([1, 1, L, S], []),
    ([H, L, S], ["Unsqueeze"]), ([1, L, S], ["Unsqueeze"]),
    ([1, S], SPREAD), ([B, 1, 1, S], SPREAD), ([B, H, 1, S], SPREAD), ([1, H, 1, S], SPREAD),
    ([1, 1, 1, S], SPREAD), ([H, 1, S], SPREAD), ([1, 1, S], SPREAD),
    ([L, 1], SPREAD), ([B, 1, L, 1], SPREAD), ([B, H, L, 1], SPREAD), ([H, L, 1], SPREAD),
    ([1, 1], ["Shape", *SPREAD]), ([1, 1, 1, 1], ["Shape", *SPREAD]),
    ([B, 1, 1, 1], ["Shape", *SPREAD]),
]  # fmt: skip
"""Every shape that PyTorch broadcasts, and the nodes that it takes to write it out."""


def mask_model(shape: Sequence[str | int], dtype: ir.DataType = BOOL) -> ir.Model:
    return attention_model(value("m", *shape, dtype=dtype))


# -- masks of every shape ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BOOL, FLOAT])
@pytest.mark.parametrize(("shape", "nodes"), MASKS, ids=[str(row[0]) for row in MASKS])
def test_a_mask_is_written_out_with_few_nodes_and_means_what_pytorch_means(shape, nodes, dtype):
    model = mask_model(shape, dtype)
    ort_compat.spread_masks(model)
    assert operators(model) == [*nodes, "Attention"]
    assert len(node_of(model, "Attention").inputs[3].shape) in (2, 4)
    check_against_torch(model)


@pytest.mark.parametrize("shape", [shape for shape, nodes in MASKS if "Expand" in nodes])
def test_onnxruntime_still_refuses_the_source(shape):
    model = mask_model(shape)
    with pytest.raises(Exception, match="inconsistent"):
        run_ort(model, draw(model, named(2, 3, 5)))


def test_a_mask_of_fixed_sizes_is_written_out_to_a_constant_target():
    inputs = [value("q", 2, H, 3, D), value("k", 2, H, 5, D), value("v", 2, H, 5, DV)]
    model = attention_model(value("m", 2, 1, 1, 5, dtype=BOOL), inputs=inputs)
    ort_compat.spread_masks(model)
    assert operators(model) == ["Expand", "Attention"]
    mask = node_of(model, "Attention").inputs[3]
    assert shape_of(mask) == [2, 1, 3, 5]
    given = draw(model, {"batch": 2, "query_len": 3})
    np.testing.assert_allclose(run_ort(model, given)[0], torch_attention(given), atol=2e-6)


def test_one_query_of_fixed_size_needs_no_more_rows():
    inputs = [value("q", B, H, 1, D), *qkv()[1:]]
    model = attention_model(value("m", B, 1, 1, S, dtype=BOOL), inputs=inputs)
    ort_compat.spread_masks(model)
    assert operators(model) == ["Attention"]


def test_the_axes_of_a_written_out_mask_keep_their_names():
    model = mask_model([B, 1, 1, S])
    ort_compat.spread_masks(model)
    assert shape_of(node_of(model, "Attention").inputs[3]) == [B, 1, L, S]


def test_a_mask_of_unknown_shape_stays_as_it_is():
    model = mask_model([])
    model.graph.inputs[3].shape = None
    ort_compat.make_ort_compatible(model)
    assert operators(model) == ["Attention"]
    model = mask_model([None, None])
    ort_compat.spread_masks(model)
    assert operators(model) == ["Attention"]


def test_a_mask_whose_added_axis_is_not_described_is_written_out():
    model = mask_model([B, 1, S])
    node, axis = node_of(model, "Attention"), weight("axis", np.array([1]))
    added = ir.node("Unsqueeze", [node.inputs[3], axis])
    model.graph.initializers.add(axis)
    model.graph.insert_before(node, added)
    node.replace_input_with(3, added.outputs[0])
    ort_compat.make_ort_compatible(model)
    mask = node.inputs[3]
    assert (shape_of(mask), mask.dtype) == ([B, 1, L, S], BOOL)


def test_a_mask_of_one_key_grows_to_past_and_new_ones():
    inputs = [*qkv(), value("m", B, 1, L, 1, dtype=BOOL)]
    past = [value("past_key", B, H, "past_len", D), value("past_value", B, H, "past_len", DV)]
    outputs = [output(), value("present_key"), value("present_value")]
    for present, dim in zip(outputs[1:], (D, DV), strict=True):
        present.shape = ir.Shape([B, H, "total_len", dim])
    model = model_of(
        [*inputs, *past], outputs, [ir.node("Attention", [*inputs, *past], outputs=outputs)]
    )
    ort_compat.spread_masks(model)
    assert operators(model) == ["Shape", "Shape", "Add", "Concat", "Expand", "Attention"]
    assert shape_of(node_of(model, "Attention").inputs[3]) == [B, 1, L, "total_len"]
    for P in (0, 1, 6):
        given = draw(model, named(2, 3, 4) | {"past_len": P})
        whole = {
            "q": given["q"],
            "k": np.concatenate([given["past_key"], given["k"]], axis=2),
            "v": np.concatenate([given["past_value"], given["v"]], axis=2),
            "m": given["m"],
        }
        np.testing.assert_allclose(run_ort(model, given)[0], torch_attention(whole), atol=2e-6)


def test_attention_of_rank_3_gets_its_rows_from_the_right_axis():
    x = value("q", B, L, H * D)
    inputs = [x, value("k", B, S, H * D), value("v", B, S, H * DV), value("m", B, 1, 1, S)]
    inputs[3].dtype = BOOL
    # Its length has a name that no input has, so that its own is read.
    q, y = value("between", B, "length", H * D), value("y", B, L, H * DV)
    heads = {"q_num_heads": H, "kv_num_heads": H}
    nodes = [
        ir.node("Identity", [x], outputs=[q]),
        ir.node("Attention", [q, *inputs[1:]], heads, outputs=[y]),
    ]
    model = model_of(inputs, [y], nodes)
    ort_compat.spread_masks(model)
    given = draw(model, named(2, 3, 5))
    split = {
        name: array.reshape(2, -1, H, array.shape[-1] // H).swapaxes(1, 2)
        for name, array in given.items()
        if name != "m"
    }
    wanted = torch_attention({**split, "m": given["m"]}).swapaxes(1, 2).reshape(2, 3, -1)
    np.testing.assert_allclose(run_ort(model, given)[0], wanted, atol=2e-6)


def test_the_layers_of_a_model_share_one_mask():
    from onnx_ir.passes import common

    inputs, mask = qkv(), value("m", B, 1, 1, S, dtype=BOOL)
    inputs[2].shape = ir.Shape([B, H, S, D])
    between, y = value("between", B, H, L, D), value("y", B, H, L, D)
    nodes = [
        ir.node("Attention", [*inputs, mask], outputs=[between]),
        ir.node("Attention", [between, *inputs[1:], mask], outputs=[y]),
    ]
    model = model_of([*inputs, mask], [y], nodes)
    ort_compat.make_ort_compatible(model)
    common.CommonSubexpressionEliminationPass()(model)
    assert operators(model) == [*SPREAD, "Attention", "Attention"]


# -- float masks of huge values ---------------------------------------------------------------

LOWEST = np.finfo(np.float32).min


def set_rows(number: float):
    """Return a change that sets the mask's first row, and half of the next ones, to `number`."""

    def change(inputs):
        inputs["m"][..., 1:, ::2] = number
        inputs["m"][..., 0, :] = number

    return change


def test_onnxruntime_still_takes_finfo_min_for_minus_infinity():
    model = mask_model([L, S], FLOAT)
    inputs = draw(model, named(2, 3, 5))
    inputs["m"][:] = LOWEST
    assert not run_ort(model, inputs)[0].any()
    assert torch_attention(inputs).all()


@pytest.mark.parametrize("number", [LOWEST, -3e38, -1e31, -1e30, -1e9, -1e4, -np.inf, 0.0])
@pytest.mark.parametrize("shape", [[L, S], [B, 1, L, S], [B, 1, 1, S]], ids=str)
def test_masked_rows_are_what_they_are_in_pytorch_whatever_masks_them(shape, number):
    model = mask_model(shape, FLOAT)
    ort_compat.make_ort_compatible(model)
    assert operators(model)[:3] == ["Max", "Equal", "Where"]
    check_against_torch(model, set_rows(number))


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("dialect", ["standard", "portable", "ort"])
def test_nan_and_inf_in_a_mask_reach_the_queries_that_they_are_for(dialect, number):
    model = mask_model([B, 1, L, S], FLOAT)
    ort_compat.make_ort_compatible(model)
    inputs = draw(model, named(2, 3, 5))
    inputs["m"][1, 0, 1, 2] = number
    (actual,) = run_ort(lower(model, dialect)[""].model, inputs)
    wrong = np.zeros(actual.shape, bool)
    wrong[1, :, 1] = True
    np.testing.assert_array_equal(np.isnan(actual), wrong)


def made_mask(*nodes: ir.Node, constants: Sequence[ir.Value] = ()) -> ir.Model:
    """Return Attention with a mask that the last of the nodes makes of the bool input m."""
    inputs = [*qkv(), value("m", L, S, dtype=BOOL)]
    for old in {v for node in nodes for v in node.inputs if v is not None and v.name == "m"}:
        old.replace_all_uses_with(inputs[3])
    mask, y = nodes[-1].outputs[0], output()
    for node in nodes:
        node.outputs[0].dtype, node.outputs[0].shape = FLOAT, ir.Shape([L, S])
    attention = ir.node("Attention", [*inputs[:3], mask], outputs=[y])
    return model_of(inputs, [y], [*nodes, attention], constants)


def one_minus_mask_times(number: float) -> ir.Model:
    """Return `(1 - mask) * number`, as Hugging Face writes it."""
    one, low = weight("one", np.float32(1)), weight("low", np.float32(number))
    cast = ir.node("Cast", [value("m")], {"to": FLOAT})
    inverse = ir.node("Sub", [one, cast.outputs[0]])
    times = ir.node("Mul", [inverse.outputs[0], low])
    return made_mask(cast, inverse, times, constants=[one, low])


def where_mask_else(number: float) -> ir.Model:
    zero, low = weight("zero", np.float32(0)), weight("low", np.float32(number))
    return made_mask(ir.node("Where", [value("m"), zero, low]), constants=[zero, low])


@pytest.mark.parametrize("make", [one_minus_mask_times, where_mask_else])
@pytest.mark.parametrize(
    ("number", "clamped"), [(LOWEST, True), (-1e38, True), (-1e9, False), (-np.inf, False)]
)
def test_a_mask_made_in_the_graph_is_clamped_if_a_huge_constant_is_in_its_making(
    make, number, clamped
):
    model = make(number)
    ort_compat.clamp_masks(model)
    assert ("Max" in operators(model)) == clamped
    if number == -np.inf and make is one_minus_mask_times:
        return  # 0 * inf, in PyTorch as well
    for sizes in [(2, 3, 5), (1, 1, 1), (1, 4, 1)]:
        inputs = draw(model, named(*sizes))
        inputs["m"][0] = False
        mask = np.where(inputs["m"], np.float32(0), np.float32(number))
        np.testing.assert_allclose(
            run_ort(model, inputs)[0], torch_attention({**inputs, "m": mask}), atol=2e-6
        )


def test_a_bias_that_is_a_weight_or_computed_of_the_input_is_not_clamped():
    bias = weight("bias", np.random.default_rng(0).standard_normal((H, 1, 1)).astype(np.float32))
    x = value("q", B, H, L, D)
    inputs, y = [x, *qkv()[1:]], output()
    scores = ir.node("MatMul", [x, x])
    added = ir.node("Add", [bias, scores.outputs[0]])
    for node in (scores, added):
        node.outputs[0].dtype, node.outputs[0].shape = FLOAT, ir.Shape([B, H, L, S])
    attention = ir.node("Attention", [*inputs, added.outputs[0]], outputs=[y])
    model = model_of(inputs, [y], [scores, added, attention], [bias])
    ort_compat.make_ort_compatible(model)
    assert operators(model) == ["MatMul", "Add", "Attention"]


def test_a_float_that_only_chooses_does_not_count():
    x, zero, low = value("x", L, S), weight("zero", np.float32(0)), weight("low", np.float32(-1e9))
    chosen = ir.node("Cast", [x], {"to": BOOL})
    mask = ir.node("Where", [chosen.outputs[0], zero, low])
    for node, dtype in ((chosen, BOOL), (mask, FLOAT)):
        node.outputs[0].dtype, node.outputs[0].shape = dtype, ir.Shape([L, S])
    inputs, y = [*qkv(), x], output()
    attention = ir.node("Attention", [*inputs[:3], mask.outputs[0]], outputs=[y])
    model = model_of(inputs, [y], [chosen, mask, attention], [zero, low])
    ort_compat.make_ort_compatible(model)
    assert operators(model) == ["Cast", "Where", "Attention"]


# -- all of them ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BOOL, FLOAT])
def test_a_corrected_graph_is_not_changed_again(dtype):
    model = mask_model([B, 1, 1, S], dtype)
    ort_compat.make_ort_compatible(model)
    once = operators(model)
    ort_compat.make_ort_compatible(model)
    assert operators(model) == once


def test_new_nodes_come_from_where_the_attention_comes_from():
    model = mask_model([B, 1, 1, S], FLOAT)
    node_of(model, "Attention").metadata_props["trace"] = "here"
    ort_compat.make_ort_compatible(model)
    assert [node.metadata_props.get("trace") for node in model.graph] == ["here"] * 7


def test_operators_of_another_domain_are_not_touched():
    model = mask_model([B, 1, 1, S])
    node_of(model, "Attention").domain = "com.microsoft"
    ort_compat.make_ort_compatible(model)
    assert operators(model) == ["Attention"]


# -- gates --------------------------------------------------------------------------------------


def test_a_sigmoid_is_written_so_that_nearly_closed_gates_keep_their_digits():
    x, y = value("x", "n"), value("y", "n")
    model = model_of([x], [y], [ir.node("Sigmoid", [x], outputs=[y])])
    ort_compat.write_sigmoids(model)
    assert operators(model) == ["Neg", "Exp", "Add", "Div"]
    numbers = np.array([-80, -20, -16, -1, 0, 1, 30, 200], np.float32)
    wanted = 1 / (1 + np.exp(-numbers.astype(np.float64)))
    np.testing.assert_allclose(run_ort(model, {"x": numbers})[0], wanted, rtol=1e-6)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_gate_that_no_sum_follows_keeps_its_digits(mixed: bool):
    x, y, z = value("x", "n", 4), value("y", "n", 4), value("z", "n", 4)
    gate = ir.node("Sigmoid", [x])
    gate.outputs[0].dtype = FLOAT
    nodes = [gate, ir.node("Mul", [gate.outputs[0], x], outputs=[y])]
    if mixed:
        nodes.append(ir.node("MatMul", [y, weight("w", np.eye(4, dtype=np.float32))], outputs=[z]))
    model = model_of([x], [z if mixed else y], nodes)
    ort_compat.make_ort_compatible(model)
    assert ("Sigmoid" in operators(model)) == mixed


def test_a_choice_of_bools_is_written_for_ort():
    names = {name: value(name, "n", dtype=BOOL) for name in ("c", "a", "b", "y")}
    c, a, b, y = names.values()
    model = model_of([c, a, b], [y], [ir.node("Where", [c, a, b], outputs=[y])])
    ort_compat.make_ort_compatible(model)
    rows = np.array(np.meshgrid(*[[False, True]] * 3)).reshape(3, 8)
    (found,) = run_ort(model, dict(zip("cab", rows, strict=True)))
    np.testing.assert_array_equal(found, np.where(*rows))
