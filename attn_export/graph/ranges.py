"""Descriptions of the inputs of a foreign graph, to draw cases from: axes, types, ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from attn_export.graph.signature_check import dtype_name, inputs_of
from attn_export.interface import Input, axes_in

SUM = re.compile(r"\s*[\w.]+(\s*\+\s*[\w.]+)+\s*")
"""The name of an axis that is a sum, such as ``past_len + query_len``."""

_PASSES_ON = frozenset({
    "Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose",
    "Unsqueeze",
})  # fmt: skip
"""Operators that pass on the elements of their first input."""

_HIDING_BELOW = -1e4
"""Mask values below this hide a key."""

_MASK_INPUT = 3
"""The index of the mask among the inputs of `Attention`."""


def described_inputs(
    model: onnx.ModelProto, ranges: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, Input], dict[str, str], tuple[str, ...]]:
    """Describe every input, the axes that are sums of others, and the ranges of integers.

    The indices of a table range over its rows; other integers are 0 or 1.

    Returns:
        The inputs by name, the sum that each such axis equals, and notes on ranges.
    """
    graph = _ValueReaders(model)
    inputs, notes, sums = {}, [], {}
    for value in inputs_of(model):
        dtype, shape = dtype_name(value), _shape(value)
        for axis in shape:
            if isinstance(axis, str) and SUM.fullmatch(axis):
                terms = axis.split("+")
                sums[axis] = " + ".join(term.strip() for term in terms)
        low = high = 0
        if dtype.startswith(("int", "uint")):
            (low, high), reason = ranges.get(value.name, (0, 0)), ""
            if value.name not in ranges:
                high, reason = graph.largest(value.name)
            notes.append(f"{value.name} is drawn from {low} to {high}{reason}")
        true_hides = graph.hides(value.name)
        inputs[value.name] = Input(
            shape, dtype, low, high,
            first=None if dtype == "bool" and true_hides is None else true_hides is not True,
            hides=dtype.startswith(("float", "bfloat")) and graph.is_added_mask(value.name),
        )  # fmt: skip
    # An axis that is named as a sum of others is free if the graph has no such others.
    axes = {axis for input_ in inputs.values() for axis in input_.shape}
    sums = {axis: text for axis, text in sums.items() if axes.issuperset(axes_in(text))}
    return inputs, sums, tuple(notes)


def declared_outputs(model: onnx.ModelProto) -> dict[str, tuple[str | int, ...]]:
    """Return the declared shape of every output, its axes named as those of the inputs."""
    return {value.name: _shape(value) for value in model.graph.output}


def _shape(value: onnx.ValueInfoProto) -> tuple[str | int, ...]:
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}.{number}"
        for number, dim in enumerate(value.type.tensor_type.shape.dim)
    )


class _ValueReaders:
    """Index of the nodes that read each value of a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                self._readers.setdefault(name, []).append((node, index))
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                self._tensors[node.output[0]] = node.attribute[0].t

    def largest(self, name: str) -> tuple[int, str]:
        """Return the largest value that an integer input may have, and the reason."""
        limits = []
        for node, index, _ in self._users(name):
            if node.op_type == "Gather" and index == 1 and node.input[0] in self._tensors:
                axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
                dims = self._tensors[node.input[0]].dims
                if dims and -len(dims) <= axis < len(dims):
                    limits.append((dims[axis] - 1, f", the rows of {node.input[0]}"))
        return min(limits, default=(1, "; nothing in the graph says more: --range sets it"))

    def hides(self, name: str) -> bool | None:
        """Return whether True hides a key in a bool input; None if no node uses it as a mask."""
        for node, index, flipped in self._users(name):
            if node.op_type == "Attention" and index == _MASK_INPUT:
                return flipped
            if node.op_type == "Where" and index == 0:
                for branch in (1, 2):
                    if self._is_low(node.input[branch]):
                        return (branch == 1) != flipped
        return None

    def is_added_mask(self, name: str) -> bool:
        """Return whether a floating input is a mask that is added to scores."""
        for node, index, _ in self._users(name):
            if node.op_type == "Attention" and index == _MASK_INPUT:
                return True
            if node.op_type == "Add" and any(
                reader.op_type == "Softmax" for reader, _, _ in self._users(node.output[0])
            ):
                return True
        return "mask" in name.lower()

    def _is_low(self, name: str) -> bool:
        tensor = self._tensors.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return False
        return bool(np.all(numpy_helper.to_array(tensor).astype(np.float64) < _HIDING_BELOW))

    def _users(self, name: str) -> Iterator[tuple[onnx.NodeProto, int, bool]]:
        """Yield the nodes that use a value, the index of the input, and whether Not inverted it.

        Values are followed through layout operators, Not and And.
        """
        waiting, seen = [(name, False)], {(name, False)}
        while waiting:
            value, flipped = waiting.pop()
            for node, index in self._readers.get(value, ()):
                yield node, index, flipped
                passes_on = node.op_type in _PASSES_ON and index == 0
                if not passes_on and node.op_type not in ("Not", "And"):
                    continue
                after = (node.output[0], flipped != (node.op_type == "Not"))
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)


_MOST_PATCHES = 32
"""The largest number of patches in a row of an image that is tried."""


def image_sizes(model: onnx.ModelProto, inputs: Mapping[str, Input]) -> Iterator[dict[str, int]]:
    """Yield sizes of images that a graph may take: the channels of its convolution, and patches."""
    weights = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    for node in model.graph.node:
        shape = inputs[node.input[0]].shape if node.input[:1] and node.input[0] in inputs else ()
        if node.op_type != "Conv" or len(shape) < 3 or node.input[1] not in weights:
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        channels = {shape[1]: weights[node.input[1]][1] * attributes.get("group", 1)}
        fixed = {axis: size for axis, size in channels.items() if isinstance(axis, str)}
        yield fixed
        strides = attributes.get("strides", [1] * len(shape[2:]))
        for count in range(1, _MOST_PATCHES + 1):
            sides = zip(shape[2:], strides, strict=False)
            yield fixed | {side: count * step for side, step in sides if isinstance(side, str)}


def small_integers(model: onnx.ModelProto) -> Iterator[np.ndarray]:
    """Yield the small integer constants of a graph, `[n]` with n up to 8, as Reshape has them."""
    constants = [a.t for n in model.graph.node if n.op_type == "Constant" for a in n.attribute]
    for tensor in (*model.graph.initializer, *constants):
        is_inside = tensor.data_location != onnx.TensorProto.EXTERNAL
        if tensor.data_type == onnx.TensorProto.INT64 and is_inside and np.prod(tensor.dims) <= 8:
            yield numpy_helper.to_array(tensor)


def weight_count(model: onnx.ModelProto) -> int:
    """Return the number of elements of all initialisers."""
    return sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)


def floating_dtype(model: onnx.ModelProto) -> np.dtype:
    """Return the floating type of a graph's outputs, or of its inputs; float32 if none has one."""
    for value in (*model.graph.output, *inputs_of(model)):
        if dtype_name(value).startswith(("float", "bfloat")):
            return np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
    return np.dtype(np.float32)
