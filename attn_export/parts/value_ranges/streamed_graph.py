"""A graph of which weights are read when a node needs them, with the types of its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from attn_export.float64.evaluate import is_float
from attn_export.float64.streamed import FLOATS, StreamedEvaluation
from attn_export.graph.load import names_read
from attn_export.graph.requirements import EXACT
from attn_export.tensorfile import Array

NARROW = ("float16", "bfloat16")

_MAKING = frozenset({"Cast", "CastLike", "Constant", "ConstantOfShape", "Range"})
"""Operators that round nothing, and give numbers that they do not read."""

_MOVING = EXACT - _MAKING

_PASSING = frozenset({
    "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that give all elements of their first input."""

_TYPED = {"Cast": "to", "ConstantOfShape": "value"}
"""The attribute that decides the type of an operator's output, where it is not `dtype`."""


class StreamedGraph(StreamedEvaluation):
    """A graph in which a node is named by its index.

    Attributes:
        index: The index of each node, by its id.
        dtypes: The floating type of each value. Those of nodes are added as they are computed.
        reads: The names of the values and weights that each node reads.
        weights_read: Those that are weights.
        made: The names of the values that each node makes.
        maker: The index of the node that makes each value.
        readers: The indices of the nodes that read each value.
        moving: The indices of the nodes that give elements of what they read, and no others.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        graph = self.model.graph
        self.dtypes = {
            tensor.name: FLOATS[tensor.data_type]
            for tensor in graph.initializer if tensor.data_type in FLOATS
        }  # fmt: skip
        for value in graph.input:
            if value.type.tensor_type.elem_type in FLOATS:
                self.dtypes.setdefault(value.name, FLOATS[value.type.tensor_type.elem_type])
        self.dtypes |= {name: self.dtypes[of] for name, (of, _) in self.transposed.items()}
        self.index = {id(node): n for n, node in enumerate(self.nodes)}
        self.made = [
            [name for name in node.output if name and name not in self.transposed]
            for node in self.nodes
        ]
        self.maker = {name: n for n, names in enumerate(self.made) for name in names}
        weights = self.weights()
        outer = {*self.maker, *self.inputs, *weights}
        self.reads = [
            [] if node.output[0] in self.transposed else sorted(names_read(node) & outer)
            for node in self.nodes
        ]
        self.moving = {
            n for n, node in enumerate(self.nodes)
            if node.op_type in _MOVING and node.domain in ("", "ai.onnx")
        }  # fmt: skip
        self.weights_read = [[name for name in names if name in weights] for names in self.reads]
        self.uses = Counter(name for names in self.reads for name in names)
        self.readers: dict[str, set[int]] = {}
        for n, names in enumerate(self.reads):
            for name in names:
                self.readers.setdefault(name, set()).add(n)

    def prepare(self, small: onnx.ModelProto) -> None:
        """Let Casts to narrow types give float32, since runs round by the types of values."""
        for attribute in (a for node in small.graph.node for a in node.attribute):
            if attribute.name == "to" and FLOATS.get(attribute.i) in NARROW:
                attribute.i = TensorProto.FLOAT

    def narrow_dtypes(self) -> set[str]:
        """Return the types narrower than float32 that the graph has itself."""
        casts = {
            FLOATS.get(a.i) for n in self.model.graph.node for a in n.attribute if a.name == "to"
        }
        return {dtype for dtype in NARROW if dtype in casts or dtype in self.dtypes.values()}

    def compute_node(self, node: onnx.NodeProto, values: Mapping[str, Any]) -> dict[str, Array]:
        """Return the outputs of a node from the values that it reads, and note their types."""
        computed = super().compute_node(node, values)
        for name, array in computed.items():
            if name not in self.dtypes and is_float(array):
                self.dtypes[name] = self._dtype_of(self.index[id(node)])
        return computed

    def name_of(self, n: int) -> str:
        """Return the name of a node, or that of its first output; "" for -1."""
        return self.nodes[n].name or next(iter(self.nodes[n].output), "") if n >= 0 else ""

    def passes_on(self, n: int) -> bool:
        """Return whether a node gives elements of what it reads, all of them as they are."""
        return self.nodes[n].op_type in _PASSING and self.nodes[n].domain in ("", "ai.onnx")

    def _dtype_of(self, n: int) -> str:
        original = self.model.graph.node[n]
        key = _TYPED.get(original.op_type, "dtype")
        for attribute in original.attribute:
            if attribute.name == key:
                content = helper.get_attribute_value(attribute)
                dtype = content.data_type if isinstance(content, TensorProto) else content
                return FLOATS.get(dtype, "float32")
        known = (self.dtypes[name] for name in self.nodes[n].input if name in self.dtypes)
        return next(known, "float32")
