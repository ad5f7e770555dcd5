"""Edits of a graph that change its weights and insert nodes, with its values at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from measuring.float16_runs import Graph

_THROUGH = (
    "Reshape",
    "Transpose",
    "Unsqueeze",
    "Expand",
    "Add",
    "Mul",
    "Div",
    "Tanh",
    "Split",
    "Where",
)
"""Operators between a value and the matrix that makes it, which is on their first input."""


class NoPlaceError(Exception):
    """A graph has no place for a plant of the wanted size."""


class Edited:
    """A graph to plant in, with its values in float64."""

    def __init__(
        self, model: onnx.ModelProto, name: str, inputs: dict[str, Any], random: np.random.Generator
    ) -> None:
        self.model, self.graph, self.name = model, model.graph, name
        self.inputs, self.random = inputs, random
        self.weights = {t.name: t for t in self.graph.initializer}
        self.reference = Graph(model).reference(inputs)

    def made(self, value: str) -> NodeProto | None:
        """Return the node that makes a value."""
        return next((n for n in self.graph.node if value in n.output), None)

    def of(self, *operators: str) -> list[NodeProto]:
        """Return the nodes of some operators."""
        return [n for n in self.graph.node if n.op_type in operators]

    def pick(self, places: list[Any]) -> Any:
        """Return one of some places, drawn."""
        if not places:
            raise NoPlaceError
        return places[self.random.integers(len(places))]

    def top(self, value: str) -> float:
        """Return the largest magnitude of a value, without what is masked."""
        x = np.abs(self.reference[value])
        return float(np.max(x, where=x < 9000, initial=0))

    def array(self, name: str) -> np.ndarray:
        """Return a weight."""
        return numpy_helper.to_array(self.weights[name])

    def constant(self, array: Any, name: str = "planted") -> str:
        """Add a weight, and return its name."""
        name = f"{name}.{len(self.graph.initializer)}"
        tensor = numpy_helper.from_array(np.asarray(array), name)
        self.graph.initializer.append(tensor)
        self.weights[name] = tensor
        return name

    def own(self, node: NodeProto, at: int, change: Callable[[np.ndarray], Any]) -> str:
        """Give a node a changed weight of its own."""
        old = self.array(node.input[at])
        node.input[at] = self.constant(np.asarray(change(old), old.dtype), node.input[at])
        return str(node.input[at])

    def add(self, before: NodeProto, operator: str, *inputs: str, **attributes: Any) -> NodeProto:
        """Insert a node before another."""
        new = f"planted_{operator}_{len(self.graph.node)}"
        node = helper.make_node(operator, inputs, [new], name=f"node_{new}", **attributes)
        index = next(i for i, n in enumerate(self.graph.node) if n.output[0] == before.output[0])
        self.graph.node.insert(index, node)
        added: NodeProto = self.graph.node[index]
        return added

    def behind(self, node: NodeProto, operator: str, other: Any) -> NodeProto:
        """Let all that read a node read it after an operation with a number or array."""
        readers = [n for n in self.graph.node if node.output[0] in n.input]
        new = self.add(readers[0], operator, node.output[0], self.constant(np.float32(other)))
        for reader in readers:
            reader.input[:] = [new.output[0] if x == node.output[0] else x for x in reader.input]
        return new

    def matrix(self, value: str) -> tuple[NodeProto, int, slice]:
        """Return the node, input and columns of the weights that make a value."""
        columns = slice(None)
        while True:
            node = self.made(value)
            if node is None:
                raise NoPlaceError
            for at in (0, 1):
                name = node.input[at] if len(node.input) > at else ""
                is_norm = (
                    node.op_type == "Mul" and name in self.weights and self.array(name).ndim == 1
                )
                is_matrix = node.op_type in ("MatMul", "Gemm") and name in self.weights
                if is_norm or is_matrix:
                    return node, at, columns
            if node.op_type not in _THROUGH:
                raise NoPlaceError
            if node.op_type == "Split":
                part, width = list(node.output).index(value), self.reference[value].shape[-1]
                columns = slice(part * width, (part + 1) * width)
            value = node.input[1 if node.op_type == "Where" else 0]

    def scale(self, value: str, factor: float, column: int | None = None) -> None:
        """Multiply a value by a factor in the weights that make it."""
        node, at, columns = self.matrix(value)
        columns = columns if column is None else slice(column, column + 1)

        def scaled(w: np.ndarray) -> np.ndarray:
            w = w.copy()
            w[..., columns] *= factor
            return w

        self.own(node, at, scaled)

    def attention(self) -> tuple[NodeProto, NodeProto]:
        """Return the Softmax of a layer, and the product that makes its scores."""
        softmax = self.pick(
            [n for n in self.of("Softmax") if self.reference[n.output[0]].ndim == 4]
        )
        node = self.made(softmax.input[0])
        while node is not None and node.op_type != "MatMul":
            node = self.made(node.input[1 if node.op_type == "Where" else 0])
        assert node is not None
        return softmax, node
