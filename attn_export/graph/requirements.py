"""Features that a graph requires of a runtime, and the precision in which it computes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from pathlib import Path

import onnx
import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT, ORT, PORTABLE, QUANTISED, STANDARD
from attn_export.graph.ir_helpers import (
    MASK_INPUT,
    PAST_KEY_INPUT,
    dims,
    optional_input,
    producer_of,
    trace_back,
)
from attn_export.graph.load import load_graph, subgraphs

_ATTENTION = "Attention"
_OPTIONAL = {MASK_INPUT: "mask", PAST_KEY_INPUT: "past", 6: "nonpad_kv_seqlen"}
"""Optional inputs of ai.onnx `Attention` that some runtimes do not support, by index."""

_FLOAT32_LEVEL = 1
"""The accuracy level of MatMulNBits that keeps inputs in float32; 0 leaves the choice open."""


def features(model: ir.Model) -> tuple[str, ...]:
    """Return the features that a graph uses, sorted.

    They are the keys of the runtimes' support tables:

    - operators: ``Softmax`` of ai.onnx, ``com.microsoft.GroupQueryAttention`` of another domain
    - ``opset 24``, types of inputs (``input FLOAT16``), and ``value DOUBLE``
    - inputs and attributes of attention: ``Attention(past)``, ``Attention(is_causal)``,
      ``Attention(mask: BOOL)``; ``Attention(given mask: BOOL)`` if the mask depends on contents of
      inputs, so that it may hide all keys
    - the type in which attention computes: ``Attention(BFLOAT16)`` for that type only, and
      ``com.microsoft.GroupQueryAttention(FLOAT)`` for any
    - ``Range(total_len)`` with its declared axis, and ``LessOrEqual(of one Range)``, as in a
      causal mask without a past
    - ``Cast(to BFLOAT16)``, ``Cast(FLOAT to FLOAT16)``, ``DequantizeLinear(INT4)`` with the type of
      its input, ``DequantizeLinear(blocks)``, ``com.microsoft.MatMulNBits(accuracy_level 4)``
    """
    names = {f"opset {model.opset_imports['']}"}
    names |= {f"input {value.dtype.name}" for value in model.graph.inputs if value.dtype}
    for node in model.graph.all_nodes():
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        names.add(name)
        if any(value.dtype == ir.DataType.DOUBLE for value in node.outputs):
            names.add("value DOUBLE")
        if name in _USES:
            names |= {f"{name}({use})" for use in _USES[name](node)}
    return tuple(sorted(names))


def _attention_uses(node: ir.Node) -> set[str]:
    uses = set()
    for index, name in _OPTIONAL.items():
        value = optional_input(node, index)
        if value is None:
            continue
        dtype = f": {value.dtype.name}" if index == MASK_INPUT and value.dtype else ""
        uses.add(name + dtype)
        if index == MASK_INPUT and _depends_on_contents(value):
            uses.add(f"given {name}{dtype}")
    for name in ("is_causal", "softcap"):
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.value:
            uses.add(name)
    if len(node.outputs) > 3 and node.outputs[3].name:
        uses.add("qk_matmul_output")
    return uses | (_type_of_attention(node) & {"BFLOAT16"})


def _type_of_attention(node: ir.Node) -> set[str]:
    values = (*node.outputs[:1], *node.inputs[:3])  # some types may be unknown
    dtypes = (value.dtype for value in values if value is not None and value.dtype is not None)
    return {dtype.name for dtype in dtypes}


def _range_uses(node: ir.Node) -> set[str]:
    sizes = dims(node.outputs[0])
    return {size.value for size in sizes if isinstance(size, ir.SymbolicDim) and size.value}


def _comparison_uses(node: ir.Node) -> set[str]:
    sources = {trace_back(value, ("Unsqueeze",)) for value in node.inputs if value is not None}
    one_range = len(sources) == 1 and producer_of(sources.pop(), "Range") is not None
    return {"of one Range"} if one_range else set()


def _cast_uses(node: ir.Node) -> set[str]:
    to, source = ir.DataType(node.attributes.get_int("to", 0)), node.inputs[0]
    if to == ir.DataType.FLOAT16 and source is not None and source.dtype == ir.DataType.FLOAT:
        return {"FLOAT to FLOAT16"}
    return {"to BFLOAT16"} if to == ir.DataType.BFLOAT16 else set()


def _grouped_query_uses(node: ir.Node) -> set[str]:
    named = {12: "k_scale", 14: "q_norm_weight"}
    uses = {name for index, name in named.items() if optional_input(node, index) is not None}
    return uses | _type_of_attention(node)


def _dequantise_uses(node: ir.Node) -> set[str]:
    read = node.inputs[0]
    dtype = {read.dtype.name} if read is not None and read.dtype else set()
    return dtype | ({"blocks"} if node.attributes.get_int("block_size", 0) else set())


def _matmul_nbits_uses(node: ir.Node) -> set[str]:
    """Return the accuracy level if it allows the rounding of inputs."""
    level = node.attributes.get_int("accuracy_level", 0)
    return {f"accuracy_level {level}"} if level > _FLOAT32_LEVEL else set()


_USES = {
    _ATTENTION: _attention_uses, "Cast": _cast_uses, "DequantizeLinear": _dequantise_uses,
    "Range": _range_uses, "LessOrEqual": _comparison_uses,
    f"{MICROSOFT}.GroupQueryAttention": _grouped_query_uses,
    f"{MICROSOFT}.MatMulNBits": _matmul_nbits_uses,
}  # fmt: skip


def _depends_on_contents(value: ir.Value) -> bool:
    """Return whether a value depends on the contents of an input, not on sizes alone."""
    values, seen = [value], {value}
    while values:
        value = values.pop()
        node = value.producer()
        if node is None:
            if value.is_graph_input():
                return True
        elif node.op_type != "Shape":
            new = {source for source in node.inputs if source is not None} - seen
            values += new
            seen |= new
    return False


_PORTABLE_UP_TO = 18
"""The newest opset that every runtime supports."""

_EPS: Mapping[int, float] = {onnx.TensorProto.FLOAT16: 2.0**-10, onnx.TensorProto.BFLOAT16: 2.0**-7}
"""The eps of types that are narrower than float32."""

_FLOATING: Set[int] = {*_EPS, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}

EXACT = frozenset({
    "Abs", "Cast", "CastLike", "Ceil", "Clip", "Concat", "Constant", "ConstantOfShape", "Dropout",
    "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Identity", "Max", "Min",
    "Neg", "Pad", "Range", "ReduceMax", "ReduceMin", "Relu", "Reshape", "Round", "ScatterElements",
    "ScatterND", "Sign", "Slice", "Split", "Squeeze", "TensorScatter", "Tile", "TopK", "Transpose",
    "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators that round nothing: they move, choose or compare elements."""

_NOT_FLOATING = frozenset({
    "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less",
    "LessOrEqual", "NonZero", "Shape", "Size",
})  # fmt: skip
"""Operators whose outputs are not floating, whatever they read."""

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
"""The attributes that state the type of a node's output."""


def foreign_features(path: str) -> list[str]:
    """Read a graph from a file, and return its `features`."""
    return list(features(load_graph(Path(path))))


def features_of_files(paths: list[str]) -> list[list[str]]:
    """Return the `features` of several graphs."""
    return [foreign_features(path) for path in paths]


def dialect_of(names: tuple[str, ...]) -> str:
    """Return the dialect to which a graph is closest, by its features."""
    if any(name.startswith(f"{MICROSOFT}.") for name in names):
        return ORT
    opsets = [int(name.split()[1]) for name in names if name.startswith("opset ")]
    plain = "Attention" not in names and all(opset <= _PORTABLE_UP_TO for opset in opsets)
    return PORTABLE if plain else STANDARD


def least_eps(model: onnx.ModelProto) -> float:
    """Return the eps of the narrowest type in which a graph computes or stores values; 0 if none.

    Where an output is as narrow, its type tells the precision of values that are only stored.
    """
    stored, computed = _narrow_types(model)
    outputs = {output.type.tensor_type.elem_type for output in model.graph.output}
    types = computed if outputs & _EPS.keys() else stored | computed
    return max((_EPS[code] for code in types), default=0.0)


def _narrow_types(model: onnx.ModelProto) -> tuple[set[int], set[int]]:
    """Return the narrow types of constants and casts that nodes read, and of values they compute.

    Values that only move elements of an input of the graph belong to neither.
    """
    types = _ValueTypes(model.functions)
    inputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    types.walk_graph(model.graph, inputs, set(inputs))
    return types.stored & _EPS.keys(), types.computed & _EPS.keys()


class _ValueTypes:
    """The types of values that nodes read or compute, in a graph with its functions and subgraphs.

    An operator that is not known returns the type of its first floating operand.

    Attributes:
        stored: The types of the values that some node reads.
        computed: The types of the outputs of nodes that may round.
    """

    def __init__(self, functions: Iterable[onnx.FunctionProto]) -> None:
        self.stored: set[int] = set()
        self.computed: set[int] = set()
        self._outputs: dict[tuple[str, str], list[int]] = {}
        for function in functions:
            types = self._walk(function.node, {}, set(function.input))
            self._outputs[function.domain, function.name] = [
                types.get(name, 0) for name in function.output
            ]

    def walk_graph(
        self, graph: onnx.GraphProto, types: Mapping[str, int], inputs: Collection[str]
    ) -> list[int]:
        """Collect the types in a graph, and return those of its outputs."""
        weights = {tensor.name: tensor.data_type for tensor in graph.initializer}
        weights |= {
            sparse.values.name: sparse.values.data_type for sparse in graph.sparse_initializer
        }
        found = self._walk(graph.node, {**types, **weights}, set(inputs) - weights.keys())
        return [found.get(value.name) or value.type.tensor_type.elem_type for value in graph.output]

    def _walk(
        self, nodes: Iterable[onnx.NodeProto], types: dict[str, int], inputs: set[str]
    ) -> dict[str, int]:
        for node in nodes:
            self.stored |= {types.get(name, 0) for name in node.input if name not in inputs}
            found = self._outputs_of(node, types, inputs)
            types |= zip(node.output, found, strict=False)
            if node.op_type not in EXACT:
                self.computed |= set(found)
            elif node.op_type not in ("Cast", "CastLike"):
                moved = {n for n in node.input if n in inputs or types.get(n) in _FLOATING}
                inputs |= set(node.output) if moved and moved <= inputs else set()
        return types

    def _outputs_of(
        self, node: onnx.NodeProto, types: Mapping[str, int], inputs: Collection[str]
    ) -> list[int]:
        """Return the types of a node's outputs; 0 for those that are not known or not floating."""
        bodies = [self._walk_body(node, body, types, inputs) for body in subgraphs(node)]
        if bodies:  # The first outputs of a body of `Loop` are none of the node.
            return bodies[0][max(0, len(bodies[0]) - len(node.output)) :]
        stated = [a.i for a in node.attribute if a.name in _TYPE_ATTRIBUTES and a.i]
        stated += [a.t.data_type for a in node.attribute if a.HasField("t")]
        operands = [types.get(name, 0) for name in node.input]
        if node.op_type == "CastLike":
            stated = operands[1:2]
        floats = [] if node.op_type in _NOT_FLOATING else [t for t in operands if t in _FLOATING]
        usual = [next(iter([*stated, *floats]), 0)] * len(node.output)
        known = self._outputs.get((node.domain, node.op_type), usual)
        return [found or default for found, default in zip(known, usual, strict=False)]

    def _walk_body(
        self, node: onnx.NodeProto, body: onnx.GraphProto, types: Mapping[str, int],
        inputs: Collection[str],
    ) -> list[int]:  # fmt: skip
        # The last operands of a `Loop` or `Scan` are the last inputs of its body.
        names = [value.name for value in body.input]
        passed = dict(zip(reversed(names), reversed(node.input), strict=False))
        inner = {**types, **{name: types.get(outer, 0) for name, outer in passed.items()}}
        from_input = {name for name, outer in passed.items() if outer in inputs}
        return self.walk_graph(body, inner, (set(inputs) - set(names)) | from_input)


def precision_notes(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return notes on a graph that computes in fewer bits than its outputs have."""
    notes = []
    types = {output.type.tensor_type.elem_type for output in model.graph.output} & _FLOATING
    if least_eps(model) > min((_EPS.get(code, 0.0) for code in types), default=0.0):
        notes.append(
            "the graph computes in fewer bits than its outputs have: the tolerance is that of "
            "the narrower type"
        )
    quantised = sorted({node.op_type for node in model.graph.node} & QUANTISED)
    if quantised:
        notes.append(
            f"the graph quantises ({', '.join(quantised)}); the tolerance is that of rounding "
            "to its floating types alone"
        )
    return tuple(notes)
