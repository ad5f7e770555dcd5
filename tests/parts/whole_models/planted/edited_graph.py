"""Graphs to edit, and edits of their constants and nodes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

_LAYER = re.compile(r"(?:layers?|h|block|key_values|present)[._](\d+)\b")


@dataclasses.dataclass(frozen=True)
class GraphFault:
    """A kind of faults.

    Attributes:
        places: Yields functions that each edit one place, and return what was edited: names of
            nodes, values and initialisers.
        words: Words that name the kind, in lower case.
    """

    name: str
    places: Callable[[Edited], Iterator[Callable[[], list[str]]]]
    words: tuple[str, ...]


class Edited:
    """A graph to edit.

    `shapes`: The shapes of values of one run.
    """

    def __init__(self, model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> None:
        self.model, self.graph, self.shapes = model, model.graph, shapes
        self.nodes = list(self.graph.node)
        self.weights = {x.name: x for x in self.graph.initializer}
        self.inputs = {x.name for x in self.graph.input}
        self.outputs = {x.name for x in self.graph.output}
        self.made = {out: node for node in self.nodes for out in node.output}

    def users(self, value: str) -> list[onnx.NodeProto]:
        return [node for node in self.nodes if value in node.input]

    def constant(self, name: str) -> np.ndarray | None:
        """Return the value of an initialiser or a Constant node."""
        if name in self.weights:
            return numpy_helper.to_array(self.weights[name])
        node = self.made.get(name)
        if node is not None and node.op_type == "Constant" and node.attribute[0].name == "value":
            return numpy_helper.to_array(node.attribute[0].t)
        return None

    def put(self, name: str, array: np.ndarray, *, user: onnx.NodeProto | None = None) -> list[str]:
        """Change a constant, for one node or for all; return what was edited."""
        users = [user] if user is not None else self.users(name)
        if user is None and name in self.weights:
            self.weights[name].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), name))
        else:
            new = f"{name}.edited"
            self.graph.initializer.append(numpy_helper.from_array(np.asarray(array), new))
            for node in users:
                node.input[:] = [new if each == name else each for each in node.input]
        return [name, *(x for node in users for x in (node.name, node.output[0]))]

    def before(self, node: onnx.NodeProto, at: int, *nodes: onnx.NodeProto) -> list[str]:
        """Insert nodes before an input of a node."""
        index = list(self.graph.node).index(node)
        for number, new in enumerate(nodes):
            self.graph.node.insert(index + number, new)
        value = node.input[at]
        node.input[at] = nodes[-1].output[0]
        return [node.name, node.output[0], value, *(x.output[0] for x in nodes)]

    def dropped(self, node: onnx.NodeProto, keep: int = 0) -> list[str]:
        """Replace a node by one of its inputs."""
        kept = helper.make_node("Identity", [node.input[keep]], list(node.output), name=node.name)
        node.CopyFrom(kept)
        return [node.name, node.output[0]]

    def matrices(self) -> list[str]:
        """Return matrices of products, in the order of the graph."""
        names = [n.input[1] for n in self.nodes if n.op_type in ("MatMul", "Gemm")]
        return [x for x in names if x in self.weights and min(self.weights[x].dims) >= 8]

    def vectors(self, *, bias: bool) -> list[str]:
        """Return biases, or the weights of norms."""
        found = []
        for name, weight in self.weights.items():
            if len(weight.dims) != 1 or weight.dims[0] < 8 or weight.data_type != 1:
                continue
            users = self.users(name)
            is_bias = any(
                u.op_type in ("Add", "Gemm") or list(u.input).index(name) >= 2 for u in users
            )
            is_norm = any(u.op_type == "Mul" or "Norm" in u.op_type for u in users)
            if users and (is_bias if bias else is_norm and not is_bias) and "inv_freq" not in name:
                found.append(name)
        return found

    def of(self, *types: str) -> list[onnx.NodeProto]:
        return [node for node in self.nodes if node.op_type in types]

    def rank(self, value: str) -> int:
        return len(self.shapes.get(value, ()))

    def layers_at(self, names: list[str]) -> set[int]:
        """Return the layers of edited places: those named next before and behind them."""
        found: set[int] = set()
        hints = [self._hint(node) for node in self.nodes]
        for index, node in enumerate(self.nodes):
            if not {node.name, *node.output, *node.input} & set(names):
                continue
            if hints[index]:
                found |= hints[index]
            elif node.op_type != "Constant":
                found |= next((h for h in hints[index::-1] if h), {0})
                found |= next((h for h in hints[index:] if h), set())
        return found

    def is_shared(self, names: list[str]) -> bool:
        """Return whether edited places name no layer, or an input of the graph."""
        touched = [node for node in self.nodes if {node.name, *node.output} & set(names)]
        return bool(self.inputs & set(names)) or not any(map(self._hint, touched))

    def _hint(self, node: onnx.NodeProto) -> set[int]:
        scopes = [x.value for x in node.metadata_props if "name_scopes" in x.key]
        names = [node.name, *node.output, *node.input, *scopes]
        return {int(x) for name in names for x in _LAYER.findall(name)}


Place = Callable[[], list[str]]
ArrayChange = Callable[[np.ndarray], np.ndarray | None]


def constants_of(names: Callable[[Edited], list[str]], change: ArrayChange) -> Any:
    def places(g: Edited) -> Iterator[Place]:
        for name in names(g):
            old = g.constant(name)
            new = change(old.copy()) if old is not None else None
            if new is not None and not np.array_equal(new, old):
                yield functools.partial(g.put, name, new.astype(old.dtype))

    return places


def nodes_of(
    types: tuple[str, ...], edit: Callable[[Edited, onnx.NodeProto], Any],
    when: Callable[[Edited, onnx.NodeProto], Any] = lambda *_: True,
) -> Any:  # fmt: skip
    def places(g: Edited) -> Iterator[Place]:
        for node in g.of(*types):
            if when(g, node):
                yield lambda node=node: edit(g, node) or [node.name, node.output[0]]

    return places


def type_of(name: str) -> Callable[[Edited, onnx.NodeProto], None]:
    def edit(_: Edited, node: onnx.NodeProto) -> None:
        node.op_type = name

    return edit


def swapped(_: Edited, node: onnx.NodeProto) -> None:
    at = (1, 2) if node.op_type == "Where" else (0, 1)
    a, b = (node.input[i] for i in at)
    node.input[at[0]], node.input[at[1]] = b, a


def attribute_of(name: str, value: Any) -> Callable[[Edited, onnx.NodeProto], None]:
    def edit(_: Edited, node: onnx.NodeProto) -> None:
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return edit


def scalar_of(types: tuple[str, ...], change: Callable[[float], float], when: Any) -> Any:
    """Change the scalar constant of a node."""

    def places(g: Edited) -> Iterator[Place]:
        for node in g.of(*types):
            for name in node.input:
                old = g.constant(name)
                if old is None or old.size != 1 or old.dtype != np.float32:
                    continue
                if when(g, node, float(old.ravel()[0])):
                    new = np.full_like(old, change(float(old.ravel()[0])))
                    yield functools.partial(g.put, name, new, user=node)

    return places
