"""Evaluation of a graph whose weights are read when a node needs them, and dropped after it.

So a graph may be as large as the disk. What reads `values` or `walk` of any evaluation reads those
of a streamed one, with `kept` to drop values, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from attn_export.float64.evaluate import Evaluation, Values, lift_constants
from attn_export.graph.load import (
    embed,
    inlined,
    load_proto,
    mapped_data,
    names_read,
    refuse_bad_data,
    sound,
    tensors_of,
)
from attn_export.tensorfile import Array, numpy_dtype, to_float64

FLOATS: Mapping[int, str] = {
    TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64",
    TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
}  # fmt: skip

_BLOCK_ELEMENTS = 2**22
"""The number of elements of a weight that are multiplied together."""

LARGE_ELEMENTS = 2**14
"""The number of elements from which a weight is read anew by each node."""

MOST_HELD_BYTES = 2**27
"""The size up to which values stay in memory that are needed again."""


class StreamedEvaluation(Evaluation):
    """A graph that is evaluated with the weights of one node in memory.

    Attributes:
        path: Its file.
        model: The model as it was read, with functions inlined and constants as initialisers.
        inputs: The names of the inputs that a user gives.
        transposed: Weights that nodes transpose: by the new name, the weight and the axes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        proto = load_proto(path)
        refuse_bad_data(proto, path)
        with sound(path):
            self._read(proto)

    def _read(self, proto: onnx.ModelProto) -> None:
        self.model = inlined(proto)
        lift_constants(self.model.graph)
        graph = self.model.graph
        inner = {
            name for node in graph.node for name in names_read(node) if name not in node.input
        } | {output.name for output in graph.output}
        self._large = {
            tensor.name: tensor for tensor in graph.initializer
            if int(np.prod(tensor.dims)) >= LARGE_ELEMENTS and tensor.name not in inner
        }  # fmt: skip
        small = onnx.ModelProto()
        small.CopyFrom(_without(self.model, self._large))
        for tensor in tensors_of(small):
            embed(tensor, self.path.parent)
        self.prepare(small)
        super().__init__(small, str(self.path))
        self._held: dict[str, Array] = {}
        self.transposed = dict(self._transposed_weights())
        weights = self.weights()
        self.inputs = [value.name for value in graph.input if value.name not in weights]

    def prepare(self, small: onnx.ModelProto) -> None:
        """Change the model without its large weights before it is evaluated."""

    def weights(self) -> set[str]:
        """Return the names of the weights and constants."""
        return {*self._large, *self.initializers, *self.transposed}

    def weight(self, name: str) -> Array:
        """Return a weight, floating ones as float64."""
        if name in self.initializers:
            return self.initializers[name]
        if name not in self._held:
            array = to_float64(self.stored(name))
            if sum(held.nbytes for held in self._held.values()) + array.nbytes > MOST_HELD_BYTES:
                return array
            self._held[name] = array
        return self._held[name]

    def is_held(self, name: str) -> bool:
        """Return whether a weight is the same array each time."""
        return name in self.initializers or name in self._held

    def stored(self, name: str) -> Array:
        """Return a large weight as it is stored, in its file if it is external."""
        if name in self.transposed:
            of, axes = self.transposed[name]
            return self.stored(of).transpose(axes)
        tensor = self._large[name]
        if tensor.data_location != TensorProto.EXTERNAL or tensor.data_type not in FLOATS:
            return self.array_of(tensor)
        return mapped_data(tensor, self.path.parent, numpy_dtype(FLOATS[tensor.data_type]))

    def array_of(self, tensor: TensorProto) -> Array:
        """Return the values of a tensor, which may lie in a file beside the graph."""
        copy = TensorProto()
        copy.CopyFrom(tensor)
        embed(copy, self.path.parent)
        return np.asarray(numpy_helper.to_array(copy))

    def shape(self, name: str) -> list[int]:
        """Return the shape of a large weight, without reading it."""
        of, axes = self.transposed.get(name, (name, []))
        dims = self._large[of].dims
        return [dims[axis] for axis in axes or range(len(dims))]

    def is_large(self, name: str) -> bool:
        """Return whether a weight is read anew by each node."""
        return name in self._large or name in self.transposed

    def compute_node(self, node: onnx.NodeProto, values: Values) -> dict[str, Array]:
        """Return the outputs of a node, by name, with the large weights that it reads."""
        if node.output[0] in self.transposed:
            return {}
        missing = [name for name in node.input if name not in values and self.is_large(name)]
        parts = []
        for weights, moved in self.pieces(node, missing, lambda name: [values[name]]):
            indices = {name: moved[id(values[name])] for name in node.input[1:2] if moved}
            parts.append(super().compute_node(node, {**values, **weights, **indices}))
        return parts[0] if len(parts) == 1 else joined(parts)

    def pieces(
        self, node: onnx.NodeProto, names: Sequence[str], read: Callable[[str], Sequence[Any]]
    ) -> Iterator[tuple[dict[str, Array], dict[int, Array]]]:
        """Yield the weights of a node, and the indices that it reads in place of others, by id.

        The weight of a large product comes in blocks of columns, a table as the rows that are read.

        `names`: The names of its weights.
        `read`: What gives all values that are read by a name.
        """
        place = 1 if self.in_blocks(node) else 0
        name = node.input[place] if node.input else ""
        if place and name in names:
            stored = self.stored(name)
            others = {each: self.weight(each) for each in names if each != name}
            step = max(1, _BLOCK_ELEMENTS * stored.shape[-1] // stored.size)
            for start in range(0, stored.shape[-1], step):
                yield (
                    {**others, name: to_float64(np.asarray(stored[..., start : start + step]))},
                    {},
                )
            return
        is_table = node.op_type == "Gather" and not any(a.i for a in node.attribute)
        if is_table and [*names] == [name] and self.is_large(name):
            stored, count, indices = self.stored(name), self.shape(name)[0], read(node.input[1])
            rows = np.unique(np.concatenate([each.reshape(-1) for each in indices]))
            if rows.size and -count <= rows[0] and rows[-1] < count:  # else the node raises
                rows = np.unique(rows % count)
                moved = {id(each): np.searchsorted(rows, each % count) for each in indices}
                yield {name: to_float64(np.asarray(stored[rows]))}, moved
                return
        yield {each: self.weight(each) for each in names}, {}

    def in_blocks(self, node: onnx.NodeProto) -> bool:
        """Return whether a node is a product by a weight that is too large to hold."""
        is_product = node.op_type == "MatMul" and self.is_large(node.input[1])
        return is_product and math.prod(self.shape(node.input[1])) > _BLOCK_ELEMENTS

    def _transposed_weights(self) -> Iterator[tuple[str, tuple[str, list[int]]]]:
        """Yield the transposed forms of large weights: the names of both, and the axes."""
        for node in self.nodes:
            if node.op_type == "Transpose" and node.input[0] in self._large:
                axes = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
                rank = len(self._large[node.input[0]].dims)
                yield node.output[0], (node.input[0], axes or list(range(rank))[::-1])


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the outputs of a node of which blocks of columns were computed."""
    return {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}


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
