"""Evaluation of a graph in float64, value by value.

The reference evaluator of onnx computes each node. `Attention` has an implementation of its own
(`attention_steps`): known faults replace its steps, and onnx's is wrong for some masks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference.op_run import OpFunction, OpRun
from onnx.reference.ops.op_loop import Loop as ReferenceLoop

from attn_export.errors import GraphError, one_line
from attn_export.float64.attention_steps import StepChange, attention
from attn_export.float64.bounded import BoundedEvaluator, CountedSteps, UnboundedError
from attn_export.float64.contrib_operators import CONTRIB_OPERATORS, DequantizeLinear
from attn_export.graph.load import inlined, load_model, names_read
from attn_export.optional_parts import hooks
from attn_export.tensorfile import Array, to_float64

Values = Mapping[str, Array | None]
ComputesNode = Callable[[onnx.NodeProto, Values], Values]
"""A function that returns the outputs of a node from the values before it, by name."""

FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
NARROW = FLOATS - {onnx.TensorProto.FLOAT}
_WITH_BLOCKS = 19
"""The first opset whose `DequantizeLinear` the reference evaluator has."""

_RANDOM = frozenset({
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
})  # fmt: skip
"""Operators whose values no second run gives."""

ROUNDED_TO = "rounded_to"
"""Attribute that `widen_model` adds to a Cast: the narrower type to which it rounds in float64."""


class NotComputedError(GraphError):
    """A node that cannot be computed from its inputs.

    Attributes:
        shapes: The shapes of its operands.
    """

    def __init__(
        self, node: onnx.NodeProto, error: Exception, operands: Sequence[object] = ()
    ) -> None:
        super().__init__(f"{node.op_type} {node.name} cannot be computed: {one_line(error)}")
        self.node: str = node.name
        self.output: str = next(iter(node.output), "")
        self.shapes: list[tuple[int, ...]] = [
            x.shape for x in operands if isinstance(x, np.ndarray)
        ]


class Attention(OpRun):
    """`Attention` for the reference evaluator; `changes` replaces steps of it."""

    op_domain = ""

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        set_attributes = {name: value for name, value in attributes.items() if value is not None}
        count = len(self.onnx_node.output)
        return attention(inputs, set_attributes, self.changes)[:count]

    changes: Mapping[str, StepChange] = {}


class Cast(OpRun):
    """`Cast` for the reference evaluator; with the attribute `ROUNDED_TO` it rounds in float64.

    What becomes an integer is rounded to float32 first: float64 may give 1.9999999999999998 where a
    graph in float32 gives 2, as logarithms of relative positions do.
    """

    op_domain = ""

    def _run(self, x: Array, to: int = 0, **attributes: Any) -> tuple[Array]:
        narrow = attributes.get(ROUNDED_TO)
        if narrow is not None:
            return (to_float64(x.astype(helper.tensor_dtype_to_np_dtype(narrow))),)
        dtype = helper.tensor_dtype_to_np_dtype(to)
        return ((x.astype(np.float32) if is_float(x) and dtype.kind in "iu" else x).astype(dtype),)


class GatherElements(OpRun):
    """`GatherElements` for the reference evaluator, whose own requires the shape of `x`."""

    op_domain = ""

    def _run(self, x: Array, indices: Array, axis: int = 0) -> tuple[Array]:
        ends = [*indices.shape]
        ends[axis] = x.shape[axis]
        return (np.take_along_axis(x[tuple(map(slice, ends))], indices, axis),)


class Loop(ReferenceLoop):
    """`Loop` for the reference evaluator, whose own runs no body if there is no condition."""

    op_domain = ""

    def _run(self, M: Array | None, cond: Array | None, *args: Any, **attributes: Any) -> Any:
        run: Any = super()._run
        return run(M, np.array(True) if cond is None else cond, *args, **attributes)


OPERATORS: list[type[OpRun]] = [
    Attention, Cast, GatherElements, Loop, *CONTRIB_OPERATORS,
    *itertools.chain(*hooks("OPERATORS")),
]  # fmt: skip
"""Operators that replace, or add to, those of the reference evaluator."""


class Evaluation:
    """A graph that can be evaluated in float64.

    Attributes:
        proto: The model with float64 in place of its floating types.
        initializers: The initialisers and `Constant` nodes by name, floating ones as float64.
        producer: The node that computes each value, by the name of the value.
    """

    def __init__(self, model: onnx.ModelProto, name: str = "the graph") -> None:
        opset = next((o.version for o in model.opset_import if not o.domain), 0)
        others = [DequantizeLinear] if opset < _WITH_BLOCKS else []
        try:
            self.proto: onnx.ModelProto = widen_model(model)
            self._evaluator = BoundedEvaluator(self.proto, new_ops=[*OPERATORS, *others])
        except Exception as error:
            raise GraphError(f"{name} cannot be evaluated in float64: {one_line(error)}") from error
        self._steps = CountedSteps()
        self.nodes: list[onnx.NodeProto] = list(self.proto.graph.node)
        ids = [id(node) for node in self.nodes]
        self._operators = dict(zip(ids, self._evaluator.rt_nodes_, strict=True))
        self._names_read = dict(zip(ids, map(names_read, self.nodes), strict=True))
        self.outputs: list[str] = [output.name for output in self.proto.graph.output]
        self.initializers: dict[str, Array] = self._evaluator.rt_inits_
        self.producer: dict[str, onnx.NodeProto] = {
            name: node for node in self.nodes for name in node.output if name
        }

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a graph from a file."""
        return cls(inlined(load_model(path)), path.name)

    def values(
        self, inputs: Mapping[str, Array], compute: ComputesNode | None = None,
        kept: Container[str] | None = None,
    ) -> Values:  # fmt: skip
        """Return every value of the graph by name, computed from the graph inputs.

        `compute`: What computes each node.  [default: `compute_node`]
        `kept`: The values that are not dropped after their last reader.  [default: all]
        """
        given = {name: to_float64(array) for name, array in inputs.items()}
        start: dict[str, Array | None] = {"": None, **self.initializers, **given}
        return self.walk(start, compute or self.compute_node, kept)

    def outputs_at(
        self, inputs: Mapping[str, Array], compute: ComputesNode | None = None
    ) -> dict[str, Array]:
        """Return the graph outputs for some inputs, without holding all other values."""
        return self.outputs_of(self.values(inputs, compute, self.outputs))

    def walk(
        self, values: dict[str, Any], compute: Callable[[onnx.NodeProto, Any], Mapping[str, Any]],
        kept: Container[str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Add to values what `compute` gives for each node, in order, and return them.

        What stands for a value is up to `compute`. `kept` is as in `values`.
        """
        left = Counter(itertools.chain(*self._names_read.values()))
        for node in self.nodes:
            values |= compute(node, values)
            if kept is not None:
                left.subtract(self._names_read[id(node)])
                for name in {*self._names_read[id(node)], *node.output} - {""}:
                    if not left[name] and name not in kept:
                        values.pop(name, None)
        return values

    def rounded_values(self, inputs: Mapping[str, Array], dtype: np.dtype) -> Values:
        """Return every value of the graph, with the output of each node rounded to another type."""

        def compute(node: onnx.NodeProto, values: Values) -> dict[str, Array]:
            computed = self.compute_node(node, values).items()
            return {n: to_float64(x.astype(dtype)) if is_float(x) else x for n, x in computed}

        return self.values(inputs, compute)

    def recompute(self, values: Values, replaced: Mapping[str, Array]) -> Values:
        """Return the values of the graph after some of them are replaced.

        Values that depend on replaced ones are recomputed, unless they are replaced themselves.
        """
        changed = set(replaced)

        def compute(node: onnx.NodeProto, now: Values) -> Mapping[str, Array]:
            if changed.isdisjoint(self._names_read[id(node)]):
                return {}
            changed.update(filter(None, node.output))
            kept = {name: replaced[name] for name in node.output if name in replaced}
            return self.compute_node(node, now) | kept

        return self.walk({**values, **replaced}, compute)

    def attention(
        self, node: onnx.NodeProto, values: Values, changes: Mapping[str, StepChange]
    ) -> dict[str, Array]:
        """Return the outputs of a node of attention, computed with some steps changed."""
        operator = self._operators[id(node)]
        operator.changes = changes
        try:
            return self.compute_node(node, values)
        finally:
            operator.changes = {}

    def outputs_of(self, values: Values) -> dict[str, Array]:
        """Return the graph outputs among all values, by name."""
        outputs = ((name, values.get(name)) for name in self.outputs)
        return {name: array for name, array in outputs if isinstance(array, np.ndarray)}

    def compute_node(self, node: onnx.NodeProto, values: Values) -> dict[str, Array]:
        """Return the outputs of a node, by name."""
        operator = self._operators[id(node)]
        try:
            if node.op_type in _RANDOM:
                raise ValueError("it draws random numbers, which no second run gives; remove it")
            inputs = [values[name] for name in node.input]
            with np.errstate(all="ignore"):
                if not operator.need_context() and not isinstance(operator, OpFunction):
                    outputs = operator.run(*inputs)
                else:
                    context = {"context": dict(values)} if operator.need_context() else {}
                    with self._steps.counted(id(node)):
                        outputs = operator.run(*inputs, **context)
        except UnboundedError as error:
            raise UnboundedError(f"{node.op_type} {node.name} {error}") from error
        except Exception as error:  # a graph of unknown origin may raise anything
            operands = [values.get(name) for name in node.input]
            raise NotComputedError(node, error, operands) from error
        return {name: x for name, x in zip(node.output, outputs, strict=False) if name}


def is_float(value: object) -> bool:
    """Return whether a value is a floating array; a value may also be a list (a sequence)."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def widen_model(original: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model that computes in float64.

    A Cast to a type narrower than the one in which the model computes is intended to round: in
    the copy it rounds to that type, and gives float64.
    """
    model = onnx.ModelProto()
    model.CopyFrom(original)
    dtypes = {i.type.tensor_type.elem_type for i in model.graph.input}
    dtypes |= {t.data_type for t in model.graph.initializer}
    # A graph with bfloat16 inputs casts them to float32, and computes in float32.
    cast_targets = {a.i for n in model.graph.node for a in n.attribute if n.op_type == "Cast"}
    wide_enough = onnx.TensorProto.FLOAT in dtypes | cast_targets
    lift_constants(model.graph)
    _widen(model.graph, NARROW if wide_enough else frozenset())
    return model


def lift_constants(graph: onnx.GraphProto) -> None:
    """Replace `Constant` nodes by initialisers, which all readers of an evaluation expect."""
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        value = node.attribute[0] if node.op_type == "Constant" and node.attribute else None
        if value is None or value.name not in CONSTANTS:
            graph.node.append(node)
            continue
        content = helper.get_attribute_value(value)
        dtype = CONSTANTS[value.name]
        tensor = content if dtype is None else numpy_helper.from_array(np.array(content, dtype))
        graph.initializer.append(tensor)
        graph.initializer[-1].name = node.output[0]


CONSTANTS = {
    "value": None, "value_float": np.float32, "value_floats": np.float32,
    "value_int": np.int64, "value_ints": np.int64,
}  # fmt: skip
"""Attributes of `Constant` that hold numbers, with the type of the array; None for a tensor."""


def _widen(graph: onnx.GraphProto, narrow: frozenset[int]) -> None:
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in FLOATS:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
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
        tensor.CopyFrom(numpy_helper.from_array(to_float64(numpy_helper.to_array(tensor)), name))
