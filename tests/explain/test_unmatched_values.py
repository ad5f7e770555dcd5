"""The first value of a graph that a whole model does not have."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

from attn_export.explain.eager_values import ValueReference, first_unmatched_node
from attn_export.float64 import ReferenceStep
from attn_export.float64.evaluate import Evaluation
from attn_export.graph.load import inlined


def test_a_mask_of_0_and_1_is_no_first_wrong_value():
    nodes = [
        helper.make_node("Sub", ["one", "mask"], ["hidden"], name="hidden"),
        helper.make_node("Mul", ["x", "factor"], ["y"], name="wrong"),
    ]
    x, mask, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [6]) for n in ("x", "mask", "y")
    )
    constants = [numpy_helper.from_array(np.float32(v), n) for n, v in (("one", 1), ("factor", 2))]
    graph = Evaluation(helper.make_model(helper.make_graph(nodes, "g", [x, mask], [y], constants)))
    given = np.arange(6.0), np.array([1.0, 1, 0, 0, 1, 1])
    values = graph.values({"x": given[0], "mask": given[1]})
    steps = [
        ReferenceStep("x", "", given[0], ()),
        ReferenceStep("mask", "", given[1], ()),
        ReferenceStep("where", "", given[1] * 7, (1,)),
        ReferenceStep("mul", "", given[0] * 3, (0,)),
    ]
    whose = ValueReference("the model's", cause=lambda *_: None)
    found = first_unmatched_node(graph, values, whose, steps, {})
    assert found is not None
    assert found.node == "wrong"


def test_the_nodes_of_a_function_have_the_name_of_its_call():
    text = """<ir_version: 9, opset_import: ["" : 18, "own" : 1]>
        g (float[2] x) => (float[2] y) { [one] m = own.twice(x) [two] y = own.twice(m) }
        <domain: "own", opset_import: ["" : 18]>
        twice (x) => (y) { [half] h = Identity(x) [sum] y = Add(h, x) }"""
    model: onnx.ModelProto = parser.parse_model(text)
    names = [node.name for node in inlined(model).graph.node]
    assert [name.split("/")[0] for name in names] == ["one", "one", "two", "two"]
    assert [name.split("/")[1].rstrip("_2") for name in names] == ["half", "sum"] * 2
