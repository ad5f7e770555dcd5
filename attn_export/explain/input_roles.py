"""Roles of a graph's inputs in attention, by their types, axes and readers as well as by names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import onnx

from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array, is_floating

InputRole = Literal["cache", "mask", "positions", "lengths", ""]

_CONTINUING = frozenset({"Concat", "ScatterElements", "ScatterND", "TensorScatter"})
"""Operators that write new keys or values behind or into their first input."""


def input_roles(evaluation: Evaluation, values: Values) -> Iterator[tuple[str, Array, InputRole]]:
    """Yield the inputs of a graph: the name, the value (of any shape) and the role of each."""
    continued = {n.input[0] for n in evaluation.nodes if n.op_type in _CONTINUING}
    for end in evaluation.proto.graph.input:
        array = values.get(end.name)
        if array is not None and end.name not in evaluation.initializers:
            yield end.name, array, _role(end, array, is_continued=end.name in continued)


def _role(end: onnx.ValueInfoProto, array: Array, *, is_continued: bool) -> InputRole:
    axes, name = axes_of(end), end.name
    if name.startswith("past_") and array.ndim == 4:
        return "cache"
    if array.dtype == np.bool_ or "mask" in name:
        return "mask"
    if is_continued:
        return "cache" if array.ndim == 4 else ""
    # The last axis of queries, keys and values has a fixed size, that of a mask is the keys.
    if is_floating(array.dtype):
        return "mask" if array.ndim > 1 and axes[-1:] and axes[-1] else ""
    if "position" in name or ("length" not in name and array.ndim > 1):
        return "positions"
    return "lengths" if array.ndim == 1 or "length" in name else ""


def axes_of(end: onnx.ValueInfoProto) -> list[str]:
    """Return the name of each axis of an input or output; "" if its size is fixed."""
    return [dim.dim_param for dim in end.type.tensor_type.shape.dim]
