"""The first value of a graph that a whole model does not have."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from attn_export.explain.eager_values import ValueReference, first_unmatched_node
from attn_export.explain.explanation import Deviation
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


X = np.arange(6.0) - 2


def first_of(text: str, steps: list[ReferenceStep], weight: np.ndarray | None = None) -> Deviation:
    """Return the first wrong value of a graph with the input x and, if one is given, a weight."""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> {text}')
    if weight is not None:
        model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), "w"))
    graph = Evaluation(model)
    found = first_unmatched_node(
        graph, graph.values({"x": X}), ValueReference("the model", cause=lambda *_: None), steps, {}
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("nodes", "operation", "right", "says"),
    [
        ("[n] y = Neg(x)", "mul", 2 * X, "it is Neg of x, where the model has mul, 1.5e+00 away"),
        ("[n] y = Neg(x)", "sin", X, "the model has no such value"),
        ("[n] y = Mul(x, x)", "mul", 2 * X * X, "it is 0.5 times what it should be, by mul of the"),
        ("[n] y = Tanh(x)", "tanh", np.tanh(X + 1), "its numbers are not those of tanh of the"),
        ("[a] z = Tanh(x) [n] y = Log(z)", "tanh", np.tanh(X), "it gives NaN, which no value of"),
    ],
)  # fmt: skip
def test_what_a_wrong_node_does_and_what_it_should(
    nodes: str, operation: str, right: np.ndarray, says: str
):
    steps = [ReferenceStep("x", "", X, ()), ReferenceStep(operation, "", right, (0,))]
    found = first_of(f"g (float[6] x) => (float[6] y) {{ {nodes} }}", steps)
    assert found.node == "n"
    assert found.says.startswith(says)


def test_a_weight_that_is_not_the_models_is_named():
    weight = np.random.default_rng(0).standard_normal((6, 6))
    steps = [
        ReferenceStep("x", "", X, ()), ReferenceStep("a.weight", "", weight, ()),
        ReferenceStep("mm", "", X @ weight, (0, 1)),
    ]  # fmt: skip
    text = "g (float[6] x) => (float[6] y) { [n] y = MatMul(x, w) }"
    found = first_of(text, steps, weight[[1, 0, 2, 3, 4, 5]])
    assert found.says == "its weight w, a.weight in the model, has rows 0 and 1 swapped"


def test_the_nodes_of_a_function_have_the_name_of_its_call():
    text = """<ir_version: 9, opset_import: ["" : 18, "own" : 1]>
        g (float[2] x) => (float[2] y) { [one] m = own.twice(x) [two] y = own.twice(m) }
        <domain: "own", opset_import: ["" : 18]>
        twice (x) => (y) { [half] h = Identity(x) [sum] y = Add(h, x) }"""
    model: onnx.ModelProto = parser.parse_model(text)
    names = [node.name for node in inlined(model).graph.node]
    assert [name.split("/")[0] for name in names] == ["one", "one", "two", "two"]
    assert [name.split("/")[1].rstrip("_2") for name in names] == ["half", "sum"] * 2
