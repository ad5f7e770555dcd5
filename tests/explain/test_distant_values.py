"""The node at which a graph that quantises leaves its float model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.explain.distant_values import where_it_leaves
from attn_export.float64 import ReferenceStep
from attn_export.float64.evaluate import Evaluation

X = np.random.default_rng(0).standard_normal((4, 8))
LAYERS, ROUNDED = 24, 0.01


def graph_of(folder: Path, wrong: int, opset: int) -> Path:
    """Write a graph that adds an integer weight in each layer, of a wrong scale in one."""
    nodes, constants, value = [], [], "x"
    for number in range(LAYERS):
        scale = np.float32(0.02 if number == wrong else 0.005)
        weight = np.random.default_rng(number + 1).integers(-100, 100, (4, 8)).astype(np.int8)
        constants += [
            numpy_helper.from_array(weight, f"w{number}"),
            numpy_helper.from_array(scale, f"s{number}"),
        ]
        nodes += [
            helper.make_node("DequantizeLinear", [f"w{number}", f"s{number}"], [f"d{number}"]),
            helper.make_node("Add", [value, f"d{number}"], [f"y{number}"], name=f"layer {number}"),
        ]
        value = f"y{number}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in ("x", value)]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9),
        folder / "g.onnx",
    )
    return folder / "g.onnx"


def steps() -> list[ReferenceStep]:
    """Return the values of the float model, from which all integers are a little away."""
    found, value = [ReferenceStep("x", "", X, ())], X
    for number in range(LAYERS):
        random = np.random.default_rng(number + 1)
        weight = random.integers(-100, 100, (4, 8)) * 0.005
        value = value + weight + ROUNDED * random.standard_normal((4, 8))
        found.append(ReferenceStep("add", f"model.py:{number}", value, (number,)))
    return found


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (-1, "it grows from node to node; the first one that is not the model's is Add layer 0 ("),
        (14, "at Add layer 14 (model.py:"),
    ],
)
def test_the_node_that_does_more_than_round_is_named(wrong, says, opset, tmp_path):
    graph = Evaluation.load(graph_of(tmp_path, wrong, opset))
    assert says in where_it_leaves(graph, graph.values({"x": X}), steps())


def test_where_nothing_resembles_the_model_any_more_is_said(tmp_path):
    graph, model = Evaluation.load(graph_of(tmp_path, -1, 21)), steps()
    others = np.random.default_rng(99).standard_normal((LAYERS, 4, 8)) * 50
    model[10:] = [ReferenceStep("add", "", other, (0,)) for other in others[: len(model) - 10]]
    text = where_it_leaves(graph, graph.values({"x": X}), model)
    assert text.startswith("behind Add layer ")
    assert ", nothing resembles the model: DequantizeLinear d" in text
