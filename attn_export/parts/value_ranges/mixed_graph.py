"""Graphs of float32 written in a narrow format, with some nodes kept in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from attn_export.errors import UsageError, printable
from attn_export.graph.save import name_by_digest
from attn_export.parts.value_ranges.float_formats import FloatFormat
from attn_export.parts.value_ranges.keep_search import KeptNodes
from attn_export.parts.value_ranges.streamed_graph import StreamedGraph
from attn_export.tensorfile import numpy_dtype

_EMBEDDED_BELOW = 2**30
"""The size of weights in bytes from which they go to a file of their own."""

_WIDE_INPUTS: Mapping[str, Set[int]] = {"GroupQueryAttention": {12, 13}}
"""The inputs of ONNX Runtime's own operators that are float32 always: scales of a cache."""

_FLOAT_ONLY = frozenset({
    "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention", "QLinearAdd",
})  # fmt: skip
"""ONNX Runtime's own operators without a form in float16."""


def check_fixable(graph: StreamedGraph) -> None:
    """Raise UsageError if a graph has other floating types than float32."""
    others = {name: dtype for name, dtype in graph.dtypes.items() if dtype != "float32"}
    for name, dtype in others.items():
        raise UsageError(
            f"--fix takes graphs in float32; {printable(name, 80)} of {graph.path} is {dtype}: "
            "give the graph from which this one was made"
        )


def write_mixed(
    graph: StreamedGraph, kept: KeptNodes, format_: FloatFormat, path: Path
) -> str | None:
    """Write a graph in a narrow format; its inputs and outputs stay in float32.

    Returns:
        The name of the file of large weights beside it, which has their digest; None without one.
    """
    writer = _Writer(graph, kept, format_)
    model = writer.model()
    sizes = (
        int(np.prod(tensor.dims)) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in graph.model.graph.initializer
    )
    large = sum(sizes) >= _EMBEDDED_BELOW
    data = path.with_name("data")
    with data.open("wb") if large else contextlib.nullcontext() as stream:
        for tensor in writer.tensors():
            if stream is not None and len(tensor.raw_data) >= 1024:
                entries = {
                    "location": data.name, "offset": stream.tell(), "length": len(tensor.raw_data)
                }  # fmt: skip
                stream.write(tensor.raw_data)
                tensor.ClearField("raw_data")
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in entries.items():
                    tensor.external_data.add(key=key, value=str(value))
            model.graph.initializer.append(tensor)
    onnx.save_model(model, path)
    return name_by_digest(path, data) if large and data.stat().st_size else None


class _Writer:
    def __init__(self, graph: StreamedGraph, kept: KeptNodes, format_: FloatFormat) -> None:
        self._graph, self._kept, self._format = graph, kept, format_
        self._narrow = getattr(TensorProto, format_.name.upper())
        self._names = {*graph.dtypes, *graph.maker, *graph.uses}
        self._types: dict[str, int] = {}
        self._casts: dict[tuple[str, int], str] = {}
        self._weights: dict[tuple[str, int], str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._opset = next(
            (o.version for o in graph.model.opset_import if o.domain in ("", "ai.onnx")), 1
        )

    def model(self) -> onnx.ModelProto:
        """Return the model without its weights."""
        source = self._graph.model
        weights = self._graph.weights()
        inputs = [value for value in source.graph.input if value.name not in weights]
        self._types |= dict.fromkeys((v.name for v in inputs), TensorProto.FLOAT)
        for n, node in enumerate(source.graph.node):
            self._add(n, node)
        return onnx.ModelProto(
            ir_version=source.ir_version, opset_import=source.opset_import,
            producer_name=source.producer_name, producer_version=source.producer_version,
            metadata_props=source.metadata_props,
            graph=onnx.GraphProto(
                name=source.graph.name, node=self._nodes, input=inputs,
                output=source.graph.output, doc_string=source.graph.doc_string,
            ),
        )  # fmt: skip

    def tensors(self) -> Iterator[TensorProto]:
        """Yield the weights in the types in which they are read."""
        for tensor in self._graph.model.graph.initializer:
            forms = {
                type_: new for (name, type_), new in self._weights.items() if name == tensor.name
            }
            is_output = tensor.name in self._graph.outputs
            if not forms and (tensor.name not in self._graph.dtypes or is_output):
                forms = {tensor.data_type: tensor.name}
            for type_, name in forms.items():
                array = self._graph.array_of(tensor)
                if type_ == self._narrow:
                    if tensor.name in self._kept.clipped:
                        array = np.clip(array, -self._format.largest, self._format.largest)
                    with np.errstate(over="ignore"):
                        array = array.astype(numpy_dtype(self._format.name))
                yield numpy_helper.from_array(array, name)

    def _add(self, n: int, source: onnx.NodeProto) -> None:
        node = onnx.NodeProto()
        node.CopyFrom(source)
        bodies = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        wide = n in self._kept.nodes or bool(bodies) or node.op_type in _FLOAT_ONLY
        types = [
            TensorProto.FLOAT if wide else self._wanted(node, i) for i in range(len(node.input))
        ]
        for index, name in enumerate(node.input):
            node.input[index] = self._read(name, types[index])
        for body in bodies:
            names = {name for name in self._graph.reads[n] if name in self._graph.dtypes}
            _rename(body, {name: self._read(name, TensorProto.FLOAT) for name in names})
        if not wide:
            self._narrow_attributes(node)
        given = {self._type_name(node, i): type_ for i, type_ in enumerate(types)}
        self._nodes.append(node)
        for index, name in enumerate(source.output):
            if name not in self._graph.dtypes:
                continue
            type_ = TensorProto.FLOAT if wide else self._given(node, index, given)
            self._types[name] = type_
            if name in self._graph.outputs and type_ != TensorProto.FLOAT:
                node.output[index] = self._casts[name, type_] = self._new(name)
                self._cast(node.output[index], name, TensorProto.FLOAT)
                self._types[name] = TensorProto.FLOAT

    def _read(self, name: str, type_: int) -> str:
        """Return the name of a value in a type, after a Cast if it is needed."""
        if name not in self._graph.dtypes:
            return name
        if name not in self._types:  # a weight
            both = name in self._weights.values()
            return self._weights.setdefault((name, type_), self._new(name) if both else name)
        if self._types[name] == type_:
            return name
        if (name, type_) not in self._casts:
            self._casts[name, type_] = self._new(name)
            self._cast(name, self._casts[name, type_], type_)
        return self._casts[name, type_]

    def _cast(self, name: str, new: str, type_: int) -> None:
        cast = helper.make_node("Cast", [name], [new], name=self._new(f"{name}_cast"), to=type_)
        self._nodes.append(cast)

    def _new(self, name: str) -> str:
        number, new = 0, f"{name}_{self._format.name}"
        while new in self._names:
            number += 1
            new = f"{name}_{self._format.name}_{number}"
        self._names.add(new)
        return new

    def _narrow_attributes(self, node: onnx.NodeProto) -> None:
        """Let a node that makes float32 by an attribute make the narrow format."""
        for attribute in node.attribute:
            if (
                attribute.name in ("to", "dtype", "output_dtype")
                and attribute.i == TensorProto.FLOAT
            ):
                attribute.i = self._narrow
            elif attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT:
                array = numpy_helper.to_array(attribute.t).astype(numpy_dtype(self._format.name))
                attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))

    # -- types that operators take ---------------------------------------------------------------

    def _schema(self, node: onnx.NodeProto) -> onnx.defs.OpSchema | None:
        if node.domain not in ("", "ai.onnx"):
            return None
        try:
            return onnx.defs.get_schema(node.op_type, self._opset, "")
        except onnx.defs.SchemaError:
            return None

    def _type_name(self, node: onnx.NodeProto, index: int) -> str:
        schema = self._schema(node)
        return _formal(schema.inputs, index) if schema and schema.inputs else ""

    def _takes_narrow(self, node: onnx.NodeProto, type_name: str) -> bool:
        schema = self._schema(node)
        if schema is None or not type_name:
            return True
        allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        return f"tensor({self._format.name})" in allowed.get(type_name, [type_name])

    def _wanted(self, node: onnx.NodeProto, index: int) -> int:
        """Return the floating type in which a node in the narrow format reads an input."""
        if self._schema(node) is None:
            wide = index in _WIDE_INPUTS.get(node.op_type, ())
        else:
            wide = not self._takes_narrow(node, self._type_name(node, index))
        return TensorProto.FLOAT if wide else self._narrow

    def _given(self, node: onnx.NodeProto, index: int, given: Mapping[str, int]) -> int:
        """Return the floating type of an output of a node in the narrow format.

        `given`: The types of the inputs by the names of their types in the operator's definition.
        """
        schema = self._schema(node)
        if schema is None:
            return int(self._narrow)
        name = _formal(schema.outputs, index)
        is_statistic = node.op_type == "LayerNormalization" and index > 0
        if is_statistic or not self._takes_narrow(node, name):
            return int(TensorProto.FLOAT)
        return given.get(name, int(self._narrow))


def _formal(parameters: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> str:
    """Return the name of the type of a parameter; the last one may stand for any number."""
    return str(parameters[min(index, len(parameters) - 1)].type_str)


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Let a subgraph read outer values by other names."""
    own = {x.name for x in (*graph.input, *graph.initializer)}
    own |= {name for node in graph.node for name in node.output}
    names = {old: new for old, new in names.items() if old not in own}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g, names)
    for output in graph.output:
        output.name = names.get(output.name, output.name)
