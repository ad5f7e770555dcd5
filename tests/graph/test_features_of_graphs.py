"""Requirements of a graph on a runtime, by name."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from attention_graphs import attention_model, output, qkv
from ir_graphs import INT64, model_of, value, weight

from attn_export.graph.requirements import features

FLOAT, BOOL, FLOAT16 = ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.FLOAT16


def of(*given: ir.Value | None, outputs: int = 1, **attributes: object) -> set[str]:
    """Return the features of one `Attention` node that are about that node."""
    outs = [output(f"y{i}") for i in range(outputs)]
    node = ir.node("Attention", [*qkv(), *given], attributes, outputs=outs)
    known = [*qkv(), *(v for v in given if v is not None)]
    model = model_of(known, outs, [node])
    return {name for name in features(model) if name.startswith("Attention(")}


def test_operators_types_of_inputs_and_the_opset_are_named_and_sorted():
    found = features(attention_model(value("m", 2, 3, dtype=BOOL)))
    assert found == (
        "Attention", "Attention(given mask: BOOL)", "Attention(mask: BOOL)", "input BOOL",
        "input FLOAT", "opset 23",
    )  # fmt: skip
    assert list(found) == sorted(found)


def test_an_operator_of_another_domain_has_its_domain():
    node = ir.node("GroupQueryAttention", qkv(), domain="com.microsoft", outputs=[output()])
    assert "com.microsoft.GroupQueryAttention" in features(model_of(qkv(), node.outputs, [node]))


def test_an_operator_within_a_branch_is_seen():
    branch = ir.Graph([], [output()], nodes=[ir.node("Relu", [], outputs=[output()])], name="b")
    node = ir.node("If", [value("c", dtype=BOOL)], {"then_branch": branch, "else_branch": branch})
    assert {"If", "Relu"} <= set(features(model_of([], node.outputs, [node])))


PAST = [value("past_key", 1, 4, 3, 8), value("past_value", 1, 4, 3, 6)]


@pytest.mark.parametrize(
    ("given", "attributes", "named"),
    [
        ((), {}, set()),
        ((value("m", 2, 3, dtype=FLOAT),), {}, {"mask: FLOAT", "given mask: FLOAT"}),
        ((value("m", 2, 3, dtype=FLOAT16),), {}, {"mask: FLOAT16", "given mask: FLOAT16"}),
        ((None, *PAST), {}, {"past"}),
        ((None, None, None, value("n", 1)), {}, {"nonpad_kv_seqlen"}),
        ((), {"is_causal": 1}, {"is_causal"}),
        ((), {"is_causal": 0, "softcap": 0.0}, set()),
        ((), {"softcap": 2.0}, {"softcap"}),
        ((), {"outputs": 4}, {"qk_matmul_output"}),
        ((), {"outputs": 3}, set()),
    ],
)
def test_the_features_of_an_attention_are_named(given, attributes, named):
    assert of(*given, **attributes) == {f"Attention({name})" for name in named}


def constant(name: str, number: int) -> ir.Value:
    return weight(name, np.array(number, np.int64))


def positions() -> tuple[list[ir.Node], ir.Value]:
    """Return the nodes that count up to the size of `q`'s third axis, and their output."""
    q = qkv()[0]
    nodes = [ir.node("Shape", [q], {"start": 2, "end": 3})]
    nodes.append(ir.node("Squeeze", [nodes[0].outputs[0]]))
    ends = [constant("zero", 0), nodes[1].outputs[0], constant("one", 1)]
    nodes.append(ir.node("Range", ends, outputs=[value("at", "query_len", dtype=INT64)]))
    return nodes, nodes[-1].outputs[0]


def compared(*, moved: bool) -> set[str]:
    """Return the features of a mask that compares positions with each other."""
    nodes, at = positions()
    nodes.append(ir.node("Unsqueeze", [at, weight("axes", np.array([1]))]))
    rows = nodes[-1].outputs[0]
    if moved:
        nodes.append(ir.node("Add", [rows, constant("past", 3)]))
        rows = nodes[-1].outputs[0]
    mask = value("mask", "query_len", "query_len", dtype=BOOL)
    nodes.append(ir.node("LessOrEqual", [at, rows], outputs=[mask]))
    inputs = qkv()
    nodes[0].replace_input_with(0, inputs[0])
    nodes.append(ir.node("Attention", [*inputs, mask], outputs=[output()]))
    return set(features(model_of(inputs, nodes[-1].outputs, nodes)))


def test_a_mask_that_depends_on_sizes_is_no_given_mask():
    found = compared(moved=False)
    assert "Attention(mask: BOOL)" in found
    assert "Attention(given mask: BOOL)" not in found


def test_positions_that_are_compared_with_themselves_are_named():
    assert "LessOrEqual(of one Range)" in compared(moved=False)
    assert "LessOrEqual(of one Range)" not in compared(moved=True)
    assert "LessOrEqual" in compared(moved=True)


def test_a_range_has_the_name_of_the_axis_that_it_is_declared_to_have():
    assert "Range(query_len)" in compared(moved=True)
