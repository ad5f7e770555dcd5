"""A graph in float64, value by value: its meaning, independent of runtimes.

The reference evaluator of onnx computes each node; `Attention` is our own (`attention_steps`),
since a mistake can be made in one of its steps, and since the evaluator's is wrong for some masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from attn_export.diagnose.attention_steps import Call, Change, attention
from attn_export.diagnose.contrib_operators import (
    GroupQueryAttention,
    MatMulNBits,
    MultiHeadAttention,
)
from attn_export.errors import GraphError, one_line
from attn_export.graph.load import load_model
from attn_export.tensorfile import Array, is_floating

Values = Mapping[str, Array | None]
Rounding = Callable[[Array], Array]

FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
NARROW = FLOATS - {onnx.TensorProto.FLOAT}
ROUNDED_TO = "rounded_to"
PRODUCTS = frozenset({"MatMul", "Gemm"})


class NotComputedError(GraphError):
    """A node that cannot be computed from its inputs.

    Attributes:
        node: Its name.
    """

    def __init__(self, node: onnx.NodeProto, error: Exception) -> None:
        super().__init__(f"{node.op_type} {node.name} cannot be computed: {one_line(error)}")
        self.node = node.name


class Attention(OpRun):
    """The node, in the evaluator."""

    op_domain = ""

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        given = {name: value for name, value in attributes.items() if value is not None}
        names = ("q", "k", "v", "mask", "past_key", "past_value", "cache_length")
        call: Any = dict(zip(names, inputs, strict=False))
        count = len(self.onnx_node.output)
        return attention(Call(**call, attributes=given), self.changes)[:count]

    changes: Mapping[str, Change] = {}


class Cast(OpRun):
    """The node, in the evaluator; to a type narrower than the graph's own it rounds."""

    op_domain = ""

    def _run(self, x: Array, to: int = 0, **attributes: Any) -> tuple[Array]:
        narrow = attributes.get(ROUNDED_TO)
        if narrow is not None:
            return (wide(x.astype(helper.tensor_dtype_to_np_dtype(narrow))),)
        return (x.astype(helper.tensor_dtype_to_np_dtype(to)),)


OPERATORS = [Attention, Cast, GroupQueryAttention, MatMulNBits, MultiHeadAttention]


def _names_read(node: onnx.NodeProto) -> set[str]:
    """Return the names of values that a node reads, those that its subgraphs do among them."""
    bodies = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return {*node.input}.union(*(_names_read(inner) for body in bodies for inner in body.node))


class Evaluation:
    """A graph that can be evaluated in float64.

    Args:
        model: The graph with its weights; it is copied.
        name: The name of the graph in errors.

    Attributes:
        proto: The graph, its floating types widened.
        nodes: In the order of computation.

    Raises:
        GraphError: If it has an operator that the reference evaluator lacks.
    """

    def __init__(self, model: onnx.ModelProto, name: str = "the graph") -> None:
        try:
            self.proto = widened(model)
            self._evaluator = ReferenceEvaluator(self.proto, new_ops=OPERATORS)
        except Exception as error:
            raise GraphError(f"{name} cannot be evaluated in float64: {one_line(error)}") from error
        self.nodes = list(self.proto.graph.node)
        ids = [id(node) for node in self.nodes]
        self._operators = dict(zip(ids, self._evaluator.rt_nodes_, strict=True))
        self._names_read = dict(zip(ids, map(_names_read, self.nodes), strict=True))
        self.outputs: list[str] = [output.name for output in self.proto.graph.output]
        self.initializers: dict[str, Array] = self._evaluator.rt_inits_
        self.producer = {name: node for node in self.nodes for name in node.output if name}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a graph from a file.

        Raises:
            GraphError: If the file cannot be read, or the graph cannot be evaluated.
        """
        return cls(load_model(path), path.name)

    def values(self, inputs: Mapping[str, Array], rounding: Rounding | None = None) -> Values:
        """Return every value of the graph, by name.

        Args:
            inputs: By name; floating ones are widened.
            rounding: The rounding of the operands of every product.

        Raises:
            NotComputedError: If a node cannot be computed.
        """
        known: dict[str, Array | None] = {"": None, **self.initializers}
        known |= {name: wide(array) for name, array in inputs.items()}
        for node in self.nodes:
            self._compute(node, known, rounding)
        return known

    def noisy_values(self, inputs: Mapping[str, Array], dtype: np.dtype) -> Values:
        """Return every value, each rounded to a narrower type before its use.

        Args:
            inputs: By name.
            dtype: The graph's own floating type.

        Raises:
            NotComputedError: If a node cannot be computed.
        """
        known: dict[str, Array | None] = {"": None, **self.initializers}
        known |= {name: wide(array) for name, array in inputs.items()}
        for node in self.nodes:
            for name, array in self.compute_node(node, known).items():
                known[name] = wide(array.astype(dtype)) if is_float(array) else array
        return known

    def again(self, values: Values, replaced: Mapping[str, Array]) -> Values:
        """Return the values after replacing some: recompute all that depends on them.

        Args:
            values: All values of the graph, by name.
            replaced: The new values of some of them, by name.
        """
        known, changed = {**values, **replaced}, set(replaced)
        for node in self.nodes:
            if not changed.isdisjoint(self._names_read[id(node)]):
                self._compute(node, known)
                known |= {name: replaced[name] for name in node.output if name in replaced}
                changed.update(name for name in node.output if name)
        return known

    def attention(
        self, node: onnx.NodeProto, values: Values, changes: Mapping[str, Change]
    ) -> dict[str, Array]:
        """Return the outputs of an `Attention` node with changed steps, by name.

        Args:
            node: The node.
            values: All values of the graph, by name.
            changes: The steps to change, by name.
        """
        operator = self._operators[id(node)]
        operator.changes = changes
        try:
            return self.compute_node(node, values)
        finally:
            operator.changes = {}

    def outputs_of(self, values: Values) -> dict[str, Array]:
        """Return the graph's own outputs from its values."""
        found = ((name, values.get(name)) for name in self.outputs)
        return {name: array for name, array in found if isinstance(array, np.ndarray)}

    def _compute(
        self,
        node: onnx.NodeProto,
        known: dict[str, Array | None],
        rounding: Rounding | None = None,
    ) -> None:
        if rounding is None:
            known |= self.compute_node(node, known)
        elif node.op_type == "Attention":
            known |= self.attention(node, known, rounded_products(rounding))
        elif node.op_type in PRODUCTS:
            narrow = {n: rounding(a) for n in node.input if (a := known.get(n)) is not None}
            known |= self.compute_node(node, {**known, **narrow})
        else:
            known |= self.compute_node(node, known)

    def compute_node(self, node: onnx.NodeProto, known: Values) -> dict[str, Array]:
        """Return the outputs of a node, by name.

        Args:
            node: The node.
            known: The values that it may read, by name.

        Raises:
            NotComputedError: If it cannot be computed, for whatever reason.
        """
        operator = self._operators[id(node)]
        try:
            context = {"context": dict(known)} if operator.need_context() else {}
            with np.errstate(all="ignore"), contextlib.redirect_stdout(None):
                found = operator.run(*(known[name] for name in node.input), **context)
        except Exception as error:  # a graph may hold anything
            raise NotComputedError(node, error) from error
        return dict(zip(node.output, found, strict=False))


def rounded_products(rounding: Rounding) -> dict[str, Change]:
    """Return changes by which `Attention` rounds the operands of its products."""
    return {
        "queries": lambda q, _: rounding(q),
        "keys": lambda k, _: rounding(k),
        "values": lambda v, _: rounding(v),
        "weights": lambda w, _: rounding(w),
    }


def is_float(value: object) -> bool:
    """Return whether a value is a float64 array; it may also be a list."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def wide(array: Array) -> Array:
    """Convert floating arrays to float64."""
    return array.astype(np.float64) if is_floating(array.dtype) else array


def widened(original: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model with float64 in place of the type that it computes in.

    What it casts to narrower types still, it rounds on purpose.
    """
    model = onnx.ModelProto()
    model.CopyFrom(original)
    starts = {i.type.tensor_type.elem_type for i in model.graph.input}
    starts |= {t.data_type for t in model.graph.initializer}
    # bfloat16 that comes in is cast to float32 first: that is what such a graph computes in.
    casts = {a.i for n in model.graph.node for a in n.attribute if n.op_type == "Cast"}
    wide_enough = onnx.TensorProto.FLOAT in starts | casts
    _widen(model.graph, NARROW if wide_enough else frozenset())
    return model


def _widen(graph: onnx.GraphProto, narrow: frozenset[int]) -> None:
    del graph.value_info[:]
    for end in (*graph.input, *graph.output):
        if end.type.tensor_type.elem_type in FLOATS:
            end.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for node in graph.node:
        for attribute in list(node.attribute):
            _widen_attribute(node, attribute, narrow)


def _widen_attribute(
    node: onnx.NodeProto, attribute: onnx.AttributeProto, narrow: frozenset[int]
) -> None:
    if attribute.name == "to" and attribute.i in FLOATS:  # Cast
        if attribute.i in narrow:
            node.attribute.append(helper.make_attribute(ROUNDED_TO, attribute.i))
        attribute.i = onnx.TensorProto.DOUBLE
    elif attribute.type == onnx.AttributeProto.TENSOR:
        _widen_tensor(attribute.t)
    elif attribute.type == onnx.AttributeProto.GRAPH:
        _widen(attribute.g, narrow)
    elif attribute.type == onnx.AttributeProto.FLOAT and attribute.name == "value_float":
        tensor = numpy_helper.from_array(np.asarray(attribute.f, np.float64))
        attribute.CopyFrom(helper.make_attribute("value", tensor))


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in FLOATS:
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(wide(numpy_helper.to_array(tensor)), name))
