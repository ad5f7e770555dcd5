"""A cache in place that holds integers: QuantizeLinear, TensorScatter and DequantizeLinear.

Scales are one number, or an array by which the graph divides before and multiplies behind.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import optional_input
from attn_export.graph.lower.in_place_cache import InPlaceCache, in_place_cache
from attn_export.graph.lower.read import AttentionNode


@dataclasses.dataclass(frozen=True)
class QuantisedCache:
    """The cache of one node, which reads it as floating point.

    Attributes:
        cache: The caches are int8; new keys and values are floating point, not yet divided.
        key: The written keys, int8 `[B, Hkv, capacity, D]`.
        value: The written values, int8 `[B, Hkv, capacity, Dv]`.
        k_scale: The scale of keys, float32: a scalar, or an array that spreads over `key`.
        v_scale: The scale of values, likewise.
    """

    cache: InPlaceCache
    key: ir.Value
    value: ir.Value
    k_scale: np.ndarray
    v_scale: np.ndarray


def quantised_cache(a: AttentionNode) -> QuantisedCache | None:
    """Return the cache of a node that writes integers at one place and reads up to it."""
    keys, values = _read(a.key), _read(a.value)
    if keys is None or values is None:
        return None
    (key, k_scale), (value, v_scale) = keys, values
    cache = in_place_cache(dataclasses.replace(a, key=key, value=value))
    if cache is None:
        return None
    new_key, new_value = _before(cache.new_key, k_scale), _before(cache.new_value, v_scale)
    if new_key is None or new_value is None:
        return None
    cache = dataclasses.replace(cache, new_key=new_key, new_value=new_value)
    return QuantisedCache(cache, key, value, k_scale, v_scale)


def _read(value: ir.Value) -> tuple[ir.Value, np.ndarray] | None:
    """Return the integers that a value is made from, and their scale."""
    source, factor = _without(value, "Mul")
    held = _linear(source, "DequantizeLinear")
    return None if held is None else (held[0], held[1] * factor)


def _before(value: ir.Value, scale: np.ndarray) -> ir.Value | None:
    """Return the value that was divided by a scale and rounded to int8."""
    held = _linear(value, "QuantizeLinear")
    if held is None:
        return None
    source, factor = _without(held[0], "Div")
    return source if np.array_equal(held[1] * factor, scale) else None


def _without(value: ir.Value, op_type: str) -> tuple[ir.Value, np.ndarray]:
    """Return what is multiplied with, or divided by, a constant, and the constant; else 1."""
    node = value.producer()
    if node is not None and node.op_type == op_type and node.inputs[0] is not None:
        factor = _constant(node.inputs[1])
        if factor is not None:
            return node.inputs[0], factor
    return value, np.ones((), np.float32)


def _linear(value: ir.Value, op_type: str) -> tuple[ir.Value, np.ndarray] | None:
    """Return the input and the scale of a node whose integers are int8 and whose zero is 0."""
    node = value.producer()
    if node is None or node.op_type != op_type or node.inputs[0] is None:
        return None
    scale, zero = _constant(node.inputs[1]), _constant(optional_input(node, 2))
    if scale is None or scale.ndim or zero is None or zero.dtype != np.int8 or zero.any():
        return None
    return node.inputs[0], scale


def _constant(value: ir.Value | None) -> np.ndarray | None:
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()
