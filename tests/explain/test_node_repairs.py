"""The one node of a graph that computes something else than it should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from made_golden import made_golden
from onnx import parser

from attn_export.explain.explanation import Deviation
from attn_export.explain.graph_evaluation import EvaluatedGraph
from attn_export.explain.graph_run import GoldenCase, GraphRunner
from attn_export.explain.node_repairs import node_repair
from attn_export.float64.evaluate import Evaluation
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.protocol import Limits
from attn_export.schema import GraphFile

INPUTS = {
    "x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32),
    "z": np.random.default_rng(1).standard_normal((2, 3)).astype(np.float32),
}


def graph_of(nodes: str) -> Evaluation:
    text = f"g (float[2,3] x, float[2,3] z) => (y) {{ {nodes} }}"
    model: onnx.ModelProto = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> {text}')
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return Evaluation(model)


def repaired(wrong: str, right: str, first: str = "n", *, padded: int | None = None) -> Any:
    expected = graph_of(right).values(INPUTS)["y"]
    assert expected is not None
    golden = made_golden({"y": expected.astype(np.float32)})
    if padded is not None:
        golden.expected["y"][padded] = 7
        golden = replace(golden, case=replace(golden.case, ignored_rows=(padded,)))
    case = GoldenCase("c", {}, INPUTS, golden)
    runner = GraphRunner(
        Path("g.onnx"), GraphFile("g.onnx"), runtime("ort-cpu"), {}, Limits(1, 1.0, 1)
    )
    evaluated = EvaluatedGraph(runner, graph_of(wrong), False)
    at = Deviation(first, "", "", "", 1.0, "")
    return node_repair(evaluated, at, [case], {}, lambda _: False)


@pytest.mark.parametrize(
    ("wrong", "right", "says"),
    [
        ("Tanh(x)", "Erf(x)", "Tanh n should be Erf"),
        ("Gelu(x)", 'Gelu <approximate = "tanh"> (x)', "Gelu n should be Gelu in its tanh form"),
        ("HardSigmoid(x)", "Sigmoid(x)", "HardSigmoid n should be Sigmoid"),
        ("Identity(x)", "Tanh(x)", "Identity n should be Tanh"),
        ("Add(x, z)", "Mul(x, z)", "Add n should be Mul"),
        ("Sub(x, z)", "Sub(z, x)", "Sub n should have its inputs exchanged"),
        ("Add(x, z)", "Identity(z)", "Add n should give its input z alone"),
        ("Concat <axis = 1> (x, z)", "Concat <axis = 1> (z, x)", "Concat n should join z, then x"),
        ("Softmax <axis = 0> (x)", "Softmax <axis = 1> (x)", "Softmax n should be over axis 1"),
        ("ReduceSum(x)", "ReduceMean(x)", "ReduceSum n should be ReduceMean"),
    ],
)
def test_the_node_is_named_with_what_it_should_be(wrong: str, right: str, says: str):
    cause = repaired(f"[n] y = {wrong}", f"[n] y = {right}")
    assert cause.sentence == f"the graph is wrong: {says}: with this alone its outputs are right"
    assert (cause.node, cause.unexplained) == ("n", 0.0)


def test_a_node_behind_the_first_wrong_value_and_all_of_a_kind_are_found():
    chain = "[n] a = Div(x, z) [m] b = {}(a) [o] c = Add(b, x) [p] d = {}(c) [q] y = Mul(d, z)"
    one = repaired(chain.format("Tanh", "Erf"), chain.format("Erf", "Erf"))
    assert "Tanh m should be Erf" in one.sentence
    both = repaired(chain.format("Tanh", "Tanh"), chain.format("Erf", "Erf"))
    assert "Tanh m, and 1 node like it, should be Erf" in both.sentence


def test_rows_that_are_not_compared_prove_nothing():
    assert repaired("[n] y = Tanh(x)", "[n] y = Erf(x)", padded=1) is not None


def test_a_mask_that_hides_too_little_is_named():
    masked = (
        "[c] l = Less(x, z) [d] f = Cast <to = 1> (l) [k] k = Constant <value_float = {}> () "
        "[m] m = Mul(f, k) [n] s = Add(x, m) [s] y = Softmax(s)"
    )
    cause = repaired(masked.format("-1.0"), masked.format("-1e30"))
    assert "Mul m adds -1 to the scores of hidden keys, and should add a huge number" in (
        cause.sentence
    )


def test_what_no_single_node_explains_is_not_named():
    assert repaired("[n] y = Neg(x)", "[n] y = Cos(z)") is None
