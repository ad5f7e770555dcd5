"""The precision of a graph is known by the types of all values that it stores or computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from attn_export.graph.requirements import least_eps, precision_notes

F32, F16, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
INT = TensorProto.INT64
NONE, HALF, BRAIN = 0.0, 2.0**-10, 2.0**-7


def tensor(name: str, dtype: int = F16) -> onnx.TensorProto:
    return helper.make_tensor(name, dtype, [4, 4], np.ones(16))


def model(
    nodes: list[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto] = (),
    given: Mapping[str, int] = {"x": F32},
    outputs: Mapping[str, int] = {"y": F32},
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    ends = [
        [helper.make_tensor_value_info(name, kind, ["n", 4]) for name, kind in of.items()]
        for of in (given, outputs)
    ]
    graph = helper.make_graph(nodes, "g", *ends, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions)


def node(operator: str, inputs: str, output: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), [output], **attributes)


def branches(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto]) -> onnx.NodeProto:
    """Return an `If` with the same nodes, which give `z`, in both branches."""
    z = [helper.make_tensor_value_info("z", F32, None)]
    then, other = (helper.make_graph(nodes, name, [], z, weights) for name in ("then", "else"))
    return helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)


def loop(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto]) -> onnx.NodeProto:
    """Return a `Loop` over `x`, whose body computes `z` from `v`."""
    ends = [
        [helper.make_tensor_value_info(name, kind, None) for name, kind in of]
        for of in (
            (("i", INT), ("go", TensorProto.BOOL), ("v", F32)),
            (("go", TensorProto.BOOL), ("z", F32)),
        )
    ]
    return helper.make_node(
        "Loop", ["m", "c", "x"], ["y"], body=helper.make_graph(nodes, "body", *ends, weights)
    )


def function(nodes: list[onnx.NodeProto]) -> onnx.FunctionProto:
    return helper.make_function("own", "f", ["v"], ["z"], nodes, [helper.make_opsetid("", 21)])


X, W, IDS, CONDITION = {"x": F32}, tensor("w"), {"ids": INT}, {"c": TensorProto.BOOL}
TABLE = [node("Gather", "w ids", "r"), node("Cast", "r", to=F32)]
CONSTANT = node("Constant", "", "w", value=W)
IN_HALF = [
    node("Cast", "v", "h", to=F16), node("MatMul", "h h", "p"), node("Cast", "p", "z", to=F32)
]  # fmt: skip
BY_TABLE = [node("Cast", "w", "s", to=F32), node("MatMul", "x s", "z")]
LIKE = [node("CastLike", "x w", "h"), node("CastLike", "h x")]
SCALED = [
    node("DequantizeLinear", "w s", "d"), node("Cast", "d", "f", to=F32), node("MatMul", "x f")
]  # fmt: skip
INTEGERS = [tensor("w", TensorProto.INT8), helper.make_tensor("s", F16, [], [0.5])]
CALL = helper.make_node("f", ["x"], ["y"], domain="own")
CACHE, PRESENT = {"x": F32, "past": F16}, {"y": F32, "present": F16}
APPENDED = [
    node("MatMul", "x x"), node("Cast", "y", "new", to=F16),
    node("Concat", "past new", "present", axis=0),
]  # fmt: skip
PRODUCT = [node("MatMul", "past past", "present"), node("Cast", "present", to=F32)]
MOVED = [
    node("Gather", "x ids", "g"), node("Cast", "g", "f", to=F32), node("MatMul", "f f")
]  # fmt: skip

GRAPHS: dict[str, tuple[onnx.ModelProto, float]] = {
    "a cast": (model([node("Cast", "x", "h", to=F16), node("Cast", "h", to=F32)]), HALF),
    "a table": (model(TABLE, [W], IDS), HALF),
    "a bfloat16 table": (model(TABLE, [tensor("w", BF16)], IDS), BRAIN),
    "a constant": (model([CONSTANT, *TABLE], [], IDS), HALF),
    "a cast to the type of another value": (model(LIKE, [W]), HALF),
    "a scale of integers": (model(SCALED, INTEGERS), HALF),
    "in a branch": (model([branches(BY_TABLE, [W])], [], X | CONDITION), HALF),
    "in a loop": (model([loop(IN_HALF, [])], [], X | CONDITION | {"m": INT}), HALF),
    "in a function": (model([CALL], functions=[function(IN_HALF)]), HALF),
    "a product of inputs": (model(PRODUCT, [], CACHE), HALF),
    "a product beside a float16 output": (model(PRODUCT, [], CACHE, PRESENT), HALF),
    # Values that are only kept or moved stay as exact as they were.
    "float32": (model([node("MatMul", "x w")], [tensor("w", F32)]), NONE),
    "an input that is moved and cast": (model(MOVED, [], {"x": F16} | IDS), NONE),
    "a float16 cache": (model(APPENDED, [], CACHE, PRESENT), NONE),
    "a weight that no node reads": (model([node("MatMul", "x x")], [W]), NONE),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_narrowest_type_that_a_graph_computes_in_is_found(name: str):
    graph, wanted = GRAPHS[name]
    assert least_eps(graph) == wanted
    assert any("fewer bits" in note for note in precision_notes(graph)) == bool(wanted)


def test_a_graph_that_is_narrow_throughout_has_no_fewer_bits_than_its_outputs():
    graph = model([node("MatMul", "x x")], [], {"x": F16}, {"y": F16})
    assert least_eps(graph) == HALF
    assert not precision_notes(graph)
