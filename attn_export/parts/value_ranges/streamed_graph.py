"""A graph whose weights are read when a node needs them, so that it may be as large as the disk."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from attn_export.errors import GraphError
from attn_export.float64.evaluate import Evaluation, lift_constants, names_read
from attn_export.graph.load import (
    embed,
    inlined,
    load_proto,
    refuse_bad_data,
    sound,
    tensors_of,
)
from attn_export.graph.requirements import EXACT
from attn_export.parts.value_ranges.ort_nodes import unknown_operators
from attn_export.tensorfile import Array, ArrayDict, numpy_dtype, to_float64

FLOATS: Mapping[int, str] = {
    TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64",
    TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
}  # fmt: skip
NARROW = ("float16", "bfloat16")

_LARGE = 2**14
"""The number of elements from which a weight is read anew by each node."""

MOST_HELD = 2**27
"""The size in bytes up to which values stay in memory that are needed again."""

_MAKING = frozenset({"Cast", "CastLike", "Constant", "ConstantOfShape", "Range"})
"""Operators that round nothing, and give numbers that they do not read."""

_MOVING = EXACT - _MAKING

_PASSING = frozenset({
    "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that give all elements of their first input."""

_TYPED = {"Cast": "to", "ConstantOfShape": "value"}
"""The attribute that decides the type of an operator's output, where it is not `dtype`."""


class StreamedGraph:
    """A graph that is evaluated node by node.

    Attributes:
        path: Its file.
        proto: The model as it was read, with functions inlined and constants as initialisers.
        nodes: The nodes in order; a node is named by its index among them.
        outputs: The names of the graph outputs.
        dtypes: The floating type of each value. Those of nodes are added as they are computed.
        turned: Weights that nodes transpose: by the new name, the weight and the axes.
        reads: The names of the values and weights that each node reads.
        weights_read: Those that are weights.
        made: The names of the values that each node makes.
        readers: The indices of the nodes that read each value.
        moving: The indices of the nodes that give elements of what they read, and no others.
        foreign: The operators that ONNX Runtime computes, in float32.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        proto = load_proto(path)
        refuse_bad_data(proto, path)
        with sound(path):
            self._read(proto)

    def _read(self, proto: onnx.ModelProto) -> None:
        self.proto = inlined(proto)
        lift_constants(self.proto.graph)
        graph = self.proto.graph
        inner = {
            name for node in graph.node for name in names_read(node) if name not in node.input
        } | {output.name for output in graph.output}
        self._large = {
            tensor.name: tensor for tensor in graph.initializer
            if int(np.prod(tensor.dims)) >= _LARGE and tensor.name not in inner
        }  # fmt: skip
        small = onnx.ModelProto()
        small.CopyFrom(_without(self.proto, self._large))
        for tensor in tensors_of(small):
            embed(tensor, self.path.parent)
        for attribute in (a for node in small.graph.node for a in node.attribute):
            if attribute.name == "to" and FLOATS.get(attribute.i) in NARROW:
                attribute.i = TensorProto.FLOAT  # runs round by the types of values
        self.foreign: list[str] = []
        try:
            self._evaluation = Evaluation(small, str(self.path))
        except GraphError:
            operators = unknown_operators(small)
            self.foreign = sorted({operator.__name__ for operator in operators})
            self._evaluation = Evaluation(small, str(self.path), operators)
        self.nodes = self._evaluation.nodes
        self.outputs = self._evaluation.outputs
        self._small = self._evaluation.initializers
        self.dtypes = {
            tensor.name: FLOATS[tensor.data_type]
            for tensor in graph.initializer if tensor.data_type in FLOATS
        }  # fmt: skip
        for value in graph.input:
            if value.type.tensor_type.elem_type in FLOATS:
                self.dtypes.setdefault(value.name, FLOATS[value.type.tensor_type.elem_type])
        self._held: dict[str, Array] = {}
        self.turned = dict(self._turned_weights())
        self.producer = {
            name: n for n, node in enumerate(self.nodes) for name in node.output
            if name and name not in self.turned
        }  # fmt: skip
        self.dtypes |= {name: self.dtypes[of] for name, (of, _) in self.turned.items()}
        outer = {*self.producer, *self.inputs, *self.weights()}
        self.reads = [
            [] if node.output[0] in self.turned else sorted(names_read(node) & outer)
            for node in self.nodes
        ]
        self.made = [
            [name for name in node.output if name and name not in self.turned]
            for node in self.nodes
        ]
        self.moving = {
            n for n, node in enumerate(self.nodes)
            if node.op_type in _MOVING and node.domain in ("", "ai.onnx")
        }  # fmt: skip
        weights = self.weights()
        self.weights_read = [[name for name in names if name in weights] for names in self.reads]
        self.uses = Counter(name for names in self.reads for name in names)
        self.readers: dict[str, set[int]] = {}
        for n, names in enumerate(self.reads):
            for name in names:
                self.readers.setdefault(name, set()).add(n)

    @functools.cached_property
    def inputs(self) -> list[str]:
        """The names of the inputs that a user gives."""
        weights = self.weights()
        return [value.name for value in self.proto.graph.input if value.name not in weights]

    def weights(self) -> set[str]:
        """Return the names of the weights and constants."""
        return {*self._large, *self._small, *self.turned}

    def weight(self, name: str) -> Array:
        """Return a weight, floating ones as float64."""
        if name in self._small:
            return self._small[name]
        if name not in self._held:
            array = to_float64(self.stored(name))
            if sum(held.nbytes for held in self._held.values()) + array.nbytes > MOST_HELD:
                return array
            self._held[name] = array
        return self._held[name]

    def is_held(self, name: str) -> bool:
        """Return whether a weight is the same array each time."""
        return name in self._small or name in self._held

    def stored(self, name: str) -> Array:
        """Return a large weight as it is stored, in its file if it is external."""
        if name in self.turned:
            of, axes = self.turned[name]
            return self.stored(of).transpose(axes)
        tensor = self._large[name]
        if tensor.data_location != TensorProto.EXTERNAL or tensor.data_type not in FLOATS:
            return self.array_of(tensor)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        return np.memmap(
            self.path.parent / entries["location"], numpy_dtype(FLOATS[tensor.data_type]), "r",
            int(entries.get("offset", 0)), tuple(tensor.dims),
        )  # fmt: skip

    def array_of(self, tensor: TensorProto) -> Array:
        """Return the values of a tensor, which may lie in a file beside the graph."""
        copy = TensorProto()
        copy.CopyFrom(tensor)
        embed(copy, self.path.parent)
        return np.asarray(numpy_helper.to_array(copy))

    def size(self, name: str) -> int:
        """Return the number of elements of a large weight, without reading it."""
        of = self.turned[name][0] if name in self.turned else name
        return int(np.prod(self._large[of].dims))

    def is_large(self, name: str) -> bool:
        """Return whether a weight is read anew by each node."""
        return name in self._large or name in self.turned

    def _turned_weights(self) -> Iterator[tuple[str, tuple[str, list[int]]]]:
        """Yield the transposed forms of large weights: the names of both, and the axes."""
        for node in self.nodes:
            if node.op_type == "Transpose" and node.input[0] in self._large:
                axes = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
                rank = len(self._large[node.input[0]].dims)
                yield node.output[0], (node.input[0], axes or list(range(rank))[::-1])

    def narrow_dtypes(self) -> set[str]:
        """Return the types narrower than float32 that the graph has itself."""
        casts = {
            FLOATS.get(a.i) for n in self.proto.graph.node for a in n.attribute if a.name == "to"
        }
        return {dtype for dtype in NARROW if dtype in casts or dtype in self.dtypes.values()}

    def compute(self, n: int, values: Mapping[str, Any]) -> ArrayDict:
        """Return the outputs of a node from the values that it reads, and note their types."""
        node = self.nodes[n]
        computed = self._evaluation.compute_node(node, values)
        for name, array in computed.items():
            if name not in self.dtypes and _is_float(array):
                self.dtypes[name] = self._dtype_of(n)
        return computed

    def name_of(self, n: int) -> str:
        """Return the name of a node, or that of its first output; "" for -1."""
        return self.nodes[n].name or next(iter(self.nodes[n].output), "") if n >= 0 else ""

    def passes_on(self, n: int) -> bool:
        """Return whether a node gives elements of what it reads, all of them as they are."""
        return self.nodes[n].op_type in _PASSING and self.nodes[n].domain in ("", "ai.onnx")

    def _dtype_of(self, n: int) -> str:
        original = self.proto.graph.node[n]
        key = _TYPED.get(original.op_type, "dtype")
        for attribute in original.attribute:
            if attribute.name == key:
                content = helper.get_attribute_value(attribute)
                dtype = content.data_type if isinstance(content, TensorProto) else content
                return FLOATS.get(dtype, "float32")
        known = (self.dtypes[name] for name in self.nodes[n].input if name in self.dtypes)
        return next(known, "float32")


def _is_float(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _without(model: onnx.ModelProto, names: Mapping[str, TensorProto]) -> onnx.ModelProto:
    """Return a model that lacks some initialisers and shares the rest with the one given."""
    return onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import,
        graph=onnx.GraphProto(
            name=model.graph.name, node=model.graph.node, input=model.graph.input,
            output=model.graph.output,
            initializer=[t for t in model.graph.initializer if t.name not in names],
        ),
    )  # fmt: skip
