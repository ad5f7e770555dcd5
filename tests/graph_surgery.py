"""Changes of ONNX graphs by which tests plant faults, made with onnx alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


@dataclasses.dataclass
class Graph:
    """A graph that is changed: that of a model, or a subgraph of a node."""

    model: onnx.ModelProto
    inner: onnx.GraphProto | None = None

    @property
    def proto(self) -> onnx.GraphProto:
        return self.model.graph if self.inner is None else self.inner

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        return list(self.proto.node)

    def all(self, operator: str, name: str = "") -> list[onnx.NodeProto]:
        return [n for n in self.nodes if n.op_type == operator and name in n.name]

    def one(self, operator: str, name: str = "", at: int = 0) -> onnx.NodeProto:
        found = self.all(operator, name)
        assert found, f"no {operator} {name}: {sorted({n.op_type for n in self.nodes})}"
        return found[at]

    def constant(self, value: Any, name: str = "") -> str:
        """Add a constant; it gets a name of its own if none is given."""
        name = name or f"planted_constant_{len(self.proto.initializer)}"
        self.proto.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def initializer(self, name: str) -> np.ndarray:
        return numpy_helper.to_array(self._initializer(name))

    def set_initializer(self, name: str, of: Callable[[np.ndarray], np.ndarray]) -> None:
        tensor = self._initializer(name)
        changed = np.ascontiguousarray(of(numpy_helper.to_array(tensor)))
        tensor.CopyFrom(numpy_helper.from_array(changed, name))

    def _initializer(self, name: str) -> onnx.TensorProto:
        return next(t for t in self.proto.initializer if t.name == name)

    def set_attribute(self, node: onnx.NodeProto, name: str, value: Any) -> None:
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    def attribute(self, node: onnx.NodeProto, name: str) -> Any:
        return next(helper.get_attribute_value(a) for a in node.attribute if a.name == name)

    def before(
        self, node: onnx.NodeProto, index: int, operator: str, *more: str, **attributes: Any
    ) -> None:
        """Put a node between an input of a node and the node."""
        name = f"planted_{operator}_{node.name}_{index}".replace("/", "_")
        new = helper.make_node(
            operator, [node.input[index], *more], [f"{name}.out"], name, **attributes
        )
        node.input[index] = f"{name}.out"
        self.insert(self.nodes.index(node), new)

    def after(self, node: onnx.NodeProto, operator: str, *more: str, **attributes: Any) -> None:
        """Put a node between an output of a node and all that use it."""
        name = f"planted_{operator}_{node.name}".replace("/", "_")
        old, inner = node.output[0], f"{name}.in"
        node.output[0] = inner
        new = helper.make_node(operator, [inner, *more], [old], name, **attributes)
        self.insert(self.nodes.index(node) + 1, new)

    def after_input(self, name: str, operator: str, *more: str, **attributes: Any) -> None:
        """Put a node between an input of the graph and all that use it."""
        out = f"planted_{name}"
        for node in self.nodes:
            node.input[:] = [out if i == name else i for i in node.input]
        new = helper.make_node(operator, [name, *more], [out], f"planted_{operator}", **attributes)
        self.insert(0, new)

    def skip(self, node: onnx.NodeProto) -> None:
        """Remove a node. Users of its output read its first input instead."""
        for other in self.nodes:
            other.input[:] = [node.input[0] if i == node.output[0] else i for i in other.input]
        self.proto.node.remove(node)

    def insert(self, at: int, node: onnx.NodeProto) -> None:
        self.proto.node.insert(at, node)
