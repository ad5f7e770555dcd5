"""Small graphs that leave float16 in one way each, with the node to blame."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 16
Node = tuple[str, str, str]
"""An operator, its inputs and its output, which is the node's name."""


@dataclasses.dataclass(frozen=True)
class RangeCase:
    """A graph of float32 and what float16 does to it.

    Attributes:
        nodes: The nodes; the input is ``x`` `[3, WIDTH]`, the output is that of the last node.
        constants: The constants by name.
        scale: The factor of the normally distributed input.
        blamed: The names of the nodes or weights that are found.
        kind: The kind of the first finding.
        absorbed: Whether its infinity is absorbed.
        kept: The names of the nodes that the written graph keeps in float32.
        clipped: The names of the weights that it limits.
    """

    nodes: Sequence[Node]
    constants: Mapping[str, object] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    blamed: Sequence[str] = ()
    kind: str = "overflow"
    absorbed: bool = False
    kept: Sequence[str] = ()
    clipped: Sequence[str] = ()

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Return inputs by name."""
        drawn = np.random.default_rng(seed).standard_normal((3, WIDTH)) * self.scale
        return {"x": drawn.astype(np.float32)}

    def write(self, path: Path) -> Path:
        """Write the graph."""
        onnx.save_model(self.model(), path)
        return path

    def model(self) -> onnx.ModelProto:
        """Return the graph."""
        rng = np.random.default_rng(1)
        constants = {"axis": np.array([-1]), "w": rng.standard_normal((WIDTH, WIDTH)) / 4}
        constants |= {name: np.asarray(value) for name, value in self.constants.items()}
        nodes = [
            helper.make_node(
                op_type, inputs.split(), [output], name=output, **attributes_of(op_type)
            )
            for op_type, inputs, output in self.nodes
        ]
        shape = ["batch", WIDTH]
        used = {name for node in nodes for name in node.input}
        graph = helper.make_graph(
            nodes, "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, shape)],
            [
                numpy_helper.from_array(
                    a.astype(np.float32) if a.dtype.kind == "f" else a, name
                )
                for name, a in constants.items() if name in used
            ],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def attributes_of(op_type: str) -> dict[str, int]:
    """Return the attributes of a node in these graphs."""
    return {"Cast": {"to": TensorProto.INT64}, "Softmax": {"axis": -1}}.get(op_type, {})


def root_mean_square(eps: float) -> tuple[list[Node], dict[str, object]]:
    """Return the nodes of y / sqrt(mean(y²) + eps), with y = x w."""
    nodes = [
        ("MatMul", "x w", "y"), ("Pow", "y two", "squares"), ("ReduceMean", "squares axis", "mean"),
        ("Add", "mean eps", "sum"), ("Sqrt", "sum", "root"), ("Div", "y root", "z"),
        ("MatMul", "z w", "out"),
    ]  # fmt: skip
    return nodes, {"two": 2.0, "eps": eps}


def case(
    made: Callable[[float], tuple[list[Node], dict[str, object]]], eps: float, **rest: object
) -> RangeCase:
    nodes, constants = made(eps)
    return RangeCase(nodes, constants, **rest)  # type: ignore[arg-type]


CASES = {
    "squares of a norm, absorbed": case(
        root_mean_square, 1e-6, scale=600.0, blamed=["squares", "mean", "sum"], absorbed=True,
        kept=["squares", "mean", "sum", "root"],
    ),
    "squares of a norm that become 0": case(
        root_mean_square, 1e-14, scale=1e-4, blamed=["eps", "squares", "mean", "sum"],
        kind="underflow", kept=["squares", "mean", "sum", "root"],
    ),
    "scores before their scale": RangeCase(
        [("MatMul", "x w", "q"), ("Mul", "q large", "scores"), ("Mul", "scores small", "scaled"),
         ("Softmax", "scaled", "out")],
        {"large": 3e4, "small": 1e-4}, blamed=["scores"], kept=["scores", "scaled"],
    ),
    "softmax without its largest score": RangeCase(
        [("MatMul", "x w", "q"), ("Add", "q shift", "scores"), ("Exp", "scores", "exp"),
         ("ReduceSum", "exp axis", "sum"), ("Div", "exp sum", "out")],
        {"shift": 12.0}, blamed=["exp", "sum"], absorbed=True, kept=["exp", "sum", "out"],
    ),
    "a mask times 0": RangeCase(
        [("MatMul", "x w", "q"), ("Mul", "zeros low", "mask"), ("Add", "q mask", "out")],
        {"zeros": np.zeros(WIDTH), "low": -1e9}, blamed=["low"], clipped=["low"],
    ),
    "a row that is masked wholly": RangeCase(
        [("MatMul", "x w", "q"), ("Add", "q mask", "scores"), ("Softmax", "scores", "out")],
        {"mask": np.full(WIDTH, -1e9)}, blamed=["mask", "scores"], clipped=["mask"],
    ),
    "a row that is masked wholly, with large scores": RangeCase(
        [("MatMul", "x w", "q"), ("Mul", "q large", "s"), ("Add", "s mask", "scores"),
         ("Softmax", "scores", "p"), ("MatMul", "p w", "out")],
        {"large": 30.0, "mask": np.repeat([[-1e9], [0.0], [0.0]], WIDTH, 1)},
        blamed=["mask", "scores"], kept=["scores", "p"],
    ),
    "whole numbers that are no numbers of float16": RangeCase(
        [("CumSum", "ones zero", "count"), ("Mul", "count small", "angle"),
         ("Cos", "angle", "turned"), ("Mul", "x turned", "out")],
        {"ones": np.full(WIDTH, 3010.0), "zero": np.array(0), "small": 0.01},
        blamed=["count", "angle"], kind="rounding", kept=["count", "angle", "turned"],
    ),
    "a sum of two halves": RangeCase(
        [("Mul", "x large", "y"), ("Add", "y y", "sum"), ("Mul", "sum small", "scaled"),
         ("MatMul", "scaled w", "out")],
        {"large": 2e4, "small": 1e-4}, blamed=["sum"], kept=["sum", "scaled"],
    ),
    "an output beyond the limit": RangeCase(
        [("Mul", "x large", "out")], {"large": 3e4}, scale=3.0, blamed=["out"], kept=["out"],
    ),
    "an angle with few digits": RangeCase(
        [("MatMul", "x w", "q"), ("Mul", "q one", "y"), ("Add", "y offset", "angle"),
         ("Cos", "angle", "turned"), ("MatMul", "turned w", "out")],
        {"offset": 4001.3, "one": 1.0}, blamed=["angle", "offset"], kind="rounding",
        kept=["angle", "turned"],
    ),
}  # fmt: skip
"""Graphs that do not fit float16."""

FITTING = {
    "a norm": case(root_mean_square, 1e-5),
    "a mask without a whole row": RangeCase(
        [("MatMul", "x w", "q"), ("Add", "q mask", "scores"), ("Softmax", "scores", "out")],
        {"mask": np.where(np.arange(WIDTH) < 4, -1e9, 0.0)},
    ),
    "squares that become 0 beside eps": case(root_mean_square, 1e-2, scale=1e-3),
}
"""Graphs that fit, though some of their values do not."""
