"""Operators of ONNX Runtime that lose digits are named, with what to write in their place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.explain.causes import Observations, causes
from attn_export.explain.eager_values import ValueReference
from attn_export.explain.fault_attribution import first_deviation
from attn_export.explain.graph_evaluation import EvaluatedGraph
from attn_export.explain.graph_run import GoldenCase, GraphRunner
from attn_export.explain.inexact_operators import inexact_operator
from attn_export.explain.pattern import Pattern
from attn_export.float64.evaluate import Evaluation
from attn_export.results import Case, Golden
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.protocol import Limits
from attn_export.schema import GraphFile, Tolerance


def gate(operator: str, folder: Path) -> EvaluatedGraph:
    """Return a graph y `[n, 4]` = x times an operator of gates g `[n]`."""
    nodes = [
        helper.make_node(operator, ["g"], ["opened"], name="gate"),
        helper.make_node("Unsqueeze", ["opened", "last"], ["column"], name="column"),
        helper.make_node("Mul", ["x", "column"], ["y"], name="product"),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4]) for n in "xy")
    g = helper.make_tensor_value_info("g", TensorProto.FLOAT, ["n"])
    last = numpy_helper.from_array(np.array([1]), "last")
    graph = helper.make_graph(nodes, "g", [x, g], [y], [last])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, folder / "g.onnx")
    limits = Limits.default()
    runner = GraphRunner(folder / "g.onnx", GraphFile("g.onnx"), runtime("ort-cpu"), {}, limits)
    return EvaluatedGraph(runner, Evaluation(model), right=True)


def case_of(suspect: EvaluatedGraph, gates: list[float]) -> GoldenCase:
    inputs = {"x": np.ones((len(gates), 4), np.float32), "g": np.array(gates, np.float32)}
    reference = suspect.evaluation.outputs_of(suspect.evaluation.values(inputs))
    expected = {name: array.astype(np.float32) for name, array in reference.items()}
    tolerance = {"y": Tolerance(1e-6, 1e-6)}
    golden = Golden(Case("one", "shape", {}, inputs, ""), expected, expected, tolerance, {})
    return GoldenCase("one", {}, inputs, golden)


@pytest.mark.parametrize(
    ("operator", "gates", "says", "form"),
    [
        ("Sigmoid", [1, -16, -20], "for -20 gives 0, not 2.061154e-09", "1 / (1 + exp(-x))"),
        ("Elu", [1, -1e-3], "for -0.001 gives", "where(x > 0, x, tanh(x / 2) * (exp(x) + 1))"),
    ],
)
def test_an_operator_that_loses_digits_is_the_cause(operator, gates, says, form, tmp_path):
    suspect = gate(operator, tmp_path)
    trial = suspect.runner.trial([case_of(suspect, gates)])
    lines = {"gate": "mine.py:3"}
    first = first_deviation("runtime", suspect, [], trial, lines, ValueReference())
    seen = Observations("runtime", "ort-cpu", [], True, first, Pattern((), (), ()), {}, "")
    (cause,) = causes(seen, {}, {})
    assert f"{operator} gate (mine.py:3) is inexact there: errors of up to " in cause.sentence
    assert says in cause.sentence
    assert cause.sentence.endswith(f"; write {form} in its place")


@pytest.mark.parametrize(("factor", "is_cause"), [(1, True), (2, False)])
def test_an_inexact_operator_is_the_cause_only_if_it_gives_the_outputs(factor, is_cause, tmp_path):
    suspect = gate("Sigmoid", tmp_path)
    case = case_of(suspect, [1, -16])
    opened = np.array([0.7310586, 6e-8], np.float32)
    actual = {"opened": opened, "column": opened[:, None]}
    actual["y"] = factor * actual["column"] * case.inputs["x"]
    assert (inexact_operator(suspect, case, actual) is not None) == is_cause
