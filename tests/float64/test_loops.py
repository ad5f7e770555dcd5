"""Loops in the float64 evaluation, beside ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from attn_export.float64.evaluate import Evaluation


@pytest.mark.parametrize("condition", ["", "go"])
@pytest.mark.parametrize("count", [0, 3])
def test_a_loop_runs_as_often_as_it_says(condition: str, count: int):
    value, make = helper.make_tensor_value_info, helper.make_node
    body = helper.make_graph(
        [make("Identity", ["c"], ["c_out"]), make("Mul", ["s", "w"], ["t"])],
        "body",
        [value("i", TensorProto.INT64, []), value("c", TensorProto.BOOL, []),
         value("s", TensorProto.FLOAT, [2])],
        [value("c_out", TensorProto.BOOL, []), value("t", TensorProto.FLOAT, [2])],
    )  # fmt: skip
    constants = {"m": np.int64(count), "go": np.array(True), "w": np.full(2, 3, np.float32)}
    graph = helper.make_graph(
        [make("Loop", ["m", condition, "x"], ["y"], body=body)], "loop",
        [value("x", TensorProto.FLOAT, [2])], [value("y", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    x = {"x": np.array([1.0, 2.0], np.float32)}
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, x)
    np.testing.assert_array_equal(Evaluation(model).values(x)["y"], expected)
    np.testing.assert_array_equal(expected, x["x"] * 3.0**count)
    onnx.checker.check_model(model)
