"""Places in graphs, and nodes that are added there."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from graph_surgery import Graph
from onnx import TensorProto, helper, shape_inference

FLOATS = {TensorProto.FLOAT: np.dtype(np.float32), TensorProto.FLOAT16: np.dtype(np.float16)}
"""The types that ONNX Runtime computes in; bfloat16 is cast."""

SAME_VALUES = frozenset({
    "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators whose output holds what their input holds."""

FUSED = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention"})

Path = tuple[tuple[int, str], ...]
"""Of a graph within others: the number of each node, and the name of its attribute."""


def graphs_of(model: onnx.ModelProto) -> Iterator[tuple[Path, Graph]]:
    """Yield the graph of a model, and those within its nodes."""
    stack: list[tuple[Path, Graph]] = [((), Graph(model))]
    while stack:
        path, graph = stack.pop()
        yield path, graph
        for number, node in enumerate(graph.nodes):
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    inner = Graph(model, attribute.g)
                    stack.append(((*path, (number, attribute.name)), inner))


def graph_at(model: onnx.ModelProto, path: Path) -> Graph:
    return next(graph for found, graph in graphs_of(model) if found == path)


@dataclasses.dataclass(frozen=True)
class Value:
    """A floating value of a graph.

    Attributes:
        path: Of the graph that it is in.
        name: Its own.
        dtype: Its type.
        operator: What computes it; "input" for an input of the model.
        rank: The number of its axes; 0 where it is not known.
    """

    path: Path
    name: str
    dtype: np.dtype
    operator: str
    rank: int = 0


def float_values(model: onnx.ModelProto) -> list[Value]:
    """Return the floating values of a model that are computed from its inputs, and these."""
    inferred = shape_inference.infer_shapes(model)
    found = []
    for (path, graph), (_, known) in zip(graphs_of(model), graphs_of(inferred), strict=True):
        types = {v.name: v.type.tensor_type for v in (*known.proto.value_info, *known.proto.output)}
        if not path:
            for given in graph.proto.input:
                dtype = FLOATS.get(given.type.tensor_type.elem_type)
                if dtype is not None:
                    rank = len(given.type.tensor_type.shape.dim)
                    found.append(Value(path, given.name, dtype, "input", rank))
        for node in graph.nodes:
            if node.op_type in SAME_VALUES:
                continue
            for name in node.output:
                of = types.get(name)
                dtype = FLOATS.get(of.elem_type) if of is not None else None
                if dtype is None and node.op_type in FUSED and name:
                    dtype = found[0].dtype
                if dtype is not None:
                    rank = len(of.shape.dim) if of is not None and of.HasField("shape") else 0
                    found.append(Value(path, name, dtype, node.op_type, rank))
    return found


class Planter:
    """Insertion of nodes into a graph, one behind the other."""

    _count = itertools.count()

    def __init__(self, graph: Graph, at: int, dtype: np.dtype) -> None:
        self.graph, self.at, self.dtype = graph, at, dtype

    def __call__(self, operator: str, *inputs: Any, output: str = "", **attributes: Any) -> str:
        """Add a node; inputs that are no names are constants. Return its output."""
        name = f"planted_{next(self._count)}"
        names = [x if isinstance(x, str) else self.constant(x) for x in inputs]
        out = output or f"{name}.out"
        self.graph.insert(self.at, helper.make_node(operator, names, [out], name, **attributes))
        self.at += 1
        return out

    def constant(self, value: Any) -> str:
        """Add a constant; Python's floats have the type of the value, its ints are int64."""
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(self.dtype)
        return self.graph.constant(array, f"planted_{next(self._count)}")

    def size(self, of: str, axis: int) -> str:
        """Return a size as a tensor of one element."""
        return self("Shape", of, start=axis, end=axis + 1)

    def number(self, of: str, axis: int) -> str:
        """Return a size as a number."""
        return self("Squeeze", self.size(of, axis))

    def counted(self, of: str, axis: int) -> str:
        """Return 0, 1, … as far as an axis is long."""
        return self("Range", np.int64(0), self.number(of, axis), np.int64(1))


Make = Callable[[Planter, str], str]
"""Adds nodes that make a wrong value of a right one."""


def plant(model: onnx.ModelProto, value: Value, make: Make) -> None:
    """Put nodes between a value and all that use it."""
    graph = graph_at(model, value.path)
    for number, node in enumerate(graph.nodes):
        if value.name in node.output:
            right = f"{value.name}.right"
            node.output[list(node.output).index(value.name)] = right
            planter = Planter(graph, number + 1, value.dtype)
            planter("Identity", make(planter, right), output=value.name)
            return
    wrong = f"{value.name}.wrong"
    _use_instead(graph, value.name, wrong)
    planter = Planter(graph, 0, value.dtype)
    planter("Identity", make(planter, value.name), output=wrong)


def feed(graph: Graph, node: onnx.NodeProto, index: int, make: Make) -> None:
    """Put nodes between a node and one of its inputs."""
    planter = Planter(graph, graph.nodes.index(node), np.dtype(np.float32))
    node.input[index] = make(planter, node.input[index])


def behind(graph: Graph, name: str, make: Make) -> None:
    """Put nodes between a value of the outermost graph and all that use it."""
    plant(graph.model, Value((), name, np.dtype(np.float32), ""), make)


def _use_instead(graph: Graph, old: str, new: str) -> None:
    for _, inner in graphs_of(graph.model):
        for node in inner.nodes:
            node.input[:] = [new if name == old else name for name in node.input]


def input_value(model: onnx.ModelProto, name: str) -> Value | None:
    """Return an input of a model, whatever its type; None where there is none of that name."""
    for given in model.graph.input:
        if given.name == name:
            of = given.type.tensor_type
            dtype = FLOATS.get(of.elem_type, helper.tensor_dtype_to_np_dtype(of.elem_type))
            return Value((), name, dtype, "input", len(of.shape.dim))
    return None


def either(p: Planter, conditions: Sequence[str], operator: str = "And") -> str:
    """Return conditions joined to one."""
    joined = conditions[0]
    for condition in conditions[1:]:
        joined = p(operator, joined, condition)
    return joined
