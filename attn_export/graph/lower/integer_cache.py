"""Recognition of an in-place cache of integers.

Integers of 8 bits are int8, written by QuantizeLinear and read by DequantizeLinear. The scale is
one number, or an array by which the graph divides before these nodes and multiplies after. Integers
of 4 bits are rounded, clipped and increased by 8, and two neighbouring channels are packed into a
byte. A table of all bytes unpacks them.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import (
    constant_array,
    dims,
    optional_input,
    producer_of,
    slice_of_last_axis,
    value_before,
)
from attn_export.graph.lower.in_place_cache import InPlaceCache, in_place_cache
from attn_export.graph.lower.read import AttentionNode

V = TypeVar("V", ir.Value, ir.Value | None)

HALVES = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1) - 8
"""The two integers that each byte holds, `[256, 2]`."""


@dataclasses.dataclass(frozen=True)
class QuantisedCache:
    """The cache of integers of an `Attention` node, which reads it dequantised.

    Attributes:
        cache: The cache. Past keys and values are integers; new ones are floating, before they
            are divided by the scale.
        key: The written keys, int8 `[B, Hkv, capacity, D]`, or uint8 `[B, Hkv, capacity, D / 2]`
            for 4 bits.
        value: The written values, of the same types.
        k_scale: The scale of keys, float32: a scalar, or an array that broadcasts to the keys.
        v_scale: The scale of values, likewise.
        bits: The bits of an integer, 8 or 4.
    """

    cache: InPlaceCache
    key: ir.Value
    value: ir.Value
    k_scale: np.ndarray
    v_scale: np.ndarray
    bits: int


def quantised_cache(a: AttentionNode) -> QuantisedCache | None:
    """Return the in-place cache of integers of a node; None if it has none."""
    keys, values = _stored_integers(a.key), _stored_integers(a.value)
    if keys is None or values is None:
        return None
    (key, k_scale, bits), (value, v_scale, value_bits) = keys, values
    cache = in_place_cache(dataclasses.replace(a, key=key, value=value))
    if cache is None or bits != value_bits:
        return None
    find_source = _source_of_int8 if bits == 8 else _source_of_packed
    new_key, new_value = find_source(cache.new_key, k_scale), find_source(cache.new_value, v_scale)
    if new_key is None or new_value is None:
        return None
    cache = dataclasses.replace(cache, new_key=new_key, new_value=new_value)
    return QuantisedCache(cache, key, value, k_scale, v_scale, bits)


def _stored_integers(value: ir.Value) -> tuple[ir.Value, np.ndarray, int] | None:
    """Return the integers that a value dequantises, their scale and their bits, or None."""
    source, factor = _split_constant(value, "Mul")
    linear = _read_linear(source, "DequantizeLinear")
    if linear is not None:
        return linear[0], linear[1] * factor, 8
    packed = _packed_bytes(source)
    return None if packed is None else (packed, factor, 4)


def _packed_bytes(value: ir.Value) -> ir.Value | None:
    """Return the uint8 `[..., D / 2]` that a value `[..., D]` unpacks, or None."""
    pairs = value_before(value, "Reshape")
    table = producer_of(pairs, "Gather")
    if pairs is None or table is None or table.attributes.get_int("axis", 0) != 0:
        return None
    numbers = constant_array(table.inputs[0])
    if numbers is None or not np.array_equal(numbers, HALVES):
        return None
    stored = value_before(table.inputs[1], "Cast")
    if stored is None or stored.dtype != ir.DataType.UINT8:
        return None
    return stored if _are_pairs(dims(pairs), dims(value)) else None


def _source_of_packed(value: ir.Value, scale: np.ndarray) -> ir.Value | None:
    """Return the value before division by a scale, rounding to 4 bits and packing, or None."""
    total = producer_of(value_before(value, "Cast"), "Add")
    if total is None or value.dtype != ir.DataType.UINT8:
        return None
    second, factor = _split_constant(total.inputs[1], "Mul")
    first, second = _every_second(total.inputs[0], 0), _every_second(second, 1)
    if first is None or first is not second or not np.array_equal(factor, 16):
        return None
    integers, offset = _split_constant(first, "Add")
    clipped, high = _split_constant(value_before(integers, "Cast"), "Min")
    rounded, low = _split_constant(clipped, "Max")
    source, divisor = _split_constant(value_before(rounded, "Round"), "Div")
    numbers = (offset, high, low)
    if not all(np.array_equal(x, y) for x, y in zip(numbers, (8, 7, -8), strict=True)):
        return None
    return source if np.array_equal(divisor, scale) else None


def _are_pairs(pairs: tuple[Size, ...], merged: tuple[Size, ...]) -> bool:
    """Return whether the shapes are `[..., n, 2]` and `[..., 2 n]`."""
    if len(pairs) != len(merged) + 1 or not isinstance(pairs[-2], int) or pairs[-1] != 2:
        return False
    same = all(known_equal(x, y) for x, y in zip(pairs[:-2], merged[:-1], strict=True))
    return same and merged[-1] == 2 * pairs[-2]


def _every_second(value: ir.Value | None, start: int) -> ir.Value | None:
    """Return the value of which a Slice takes every second element of the last axis, or None."""
    parts = slice_of_last_axis(value)
    if parts is None:
        return None
    source, first, end, step = parts
    return source if (first, end, step) == (start, dims(source)[-1], 2) else None


def _source_of_int8(value: ir.Value, scale: np.ndarray) -> ir.Value | None:
    """Return the value before division by a scale and rounding to int8, or None."""
    linear = _read_linear(value, "QuantizeLinear")
    if linear is None:
        return None
    source, factor = _split_constant(linear[0], "Div")
    return source if np.array_equal(linear[1] * factor, scale) else None


def _split_constant(value: V, op_type: str) -> tuple[V | ir.Value, np.ndarray]:
    """Return operand and constant of a node `operand op constant`; else the value itself and 1."""
    node = producer_of(value, op_type)
    if node is not None and node.inputs[0] is not None:
        operand = constant_array(node.inputs[1])
        if operand is not None:
            return node.inputs[0], operand
    return value, np.ones((), np.float32)


def _read_linear(value: ir.Value, op_type: str) -> tuple[ir.Value, np.ndarray] | None:
    """Return input and scalar scale of a (De)QuantizeLinear of int8 with zero point 0, or None."""
    node = producer_of(value, op_type)
    if node is None or node.inputs[0] is None:
        return None
    scale, zero = constant_array(node.inputs[1]), constant_array(optional_input(node, 2))
    if scale is None or scale.ndim or zero is None or zero.dtype != np.int8 or zero.any():
        return None
    return node.inputs[0], scale
