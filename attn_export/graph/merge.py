"""Initialisers of equal values become one, without a copy of large ones."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

LARGE = 2**20
"""The largest number of elements that are compared by a copy of their bytes."""


def merge_equal_weights(model: ir.Model) -> None:
    """Keep one of several initialisers of the same type, shape and bytes."""
    common.DeduplicateInitializersPass(size_limit=LARGE)(model)
    kept: dict[tuple[object, ...], list[ir.Value]] = {}
    outputs = set(model.graph.outputs)
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.size <= LARGE or value in outputs:
            continue
        alike = kept.setdefault((tensor.dtype, tuple(tensor.shape)), [])
        twin = next((other for other in alike if same_bytes(other.const_value, tensor)), None)
        if twin is None:
            alike.append(value)
            continue
        value.replace_all_uses_with(twin)
        del model.graph.initializers[name]


def same_bytes(one: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> bool:
    """Return whether two tensors of one type and shape hold the same bytes."""
    if one is None or other is None or one is other:
        return one is other
    rows = zip(np.atleast_2d(one.numpy()), np.atleast_2d(other.numpy()), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in rows)
