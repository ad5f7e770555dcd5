"""A cache in place that holds integers: int8 by QuantizeLinear and DequantizeLinear, or packed.

Scales are one number, or an array by which the graph divides before and multiplies behind. Integers
of 4 bits are rounded and clipped, gain 8, and two neighbours become a byte; a table of all bytes
holds what they stand for.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import dims, optional_input
from attn_export.graph.lower.in_place_cache import InPlaceCache, in_place_cache
from attn_export.graph.lower.read import AttentionNode

V = TypeVar("V", ir.Value, ir.Value | None)
Shape = tuple[Size, ...]

HALVES = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1) - 8
"""The two numbers that each byte holds, `[256, 2]`."""


@dataclasses.dataclass(frozen=True)
class QuantisedCache:
    """The cache of one node, which reads it as floating point.

    Attributes:
        cache: The caches are integers; new keys and values are floating point, not yet divided.
        key: The written keys, int8 `[B, Hkv, capacity, D]`; uint8 `[B, Hkv, capacity, D / 2]` of 4
            bits.
        value: The written values, int8 or uint8, likewise.
        k_scale: The scale of keys, float32: a scalar, or an array that spreads over all keys.
        v_scale: The scale of values, likewise.
        bits: Those of an integer: 8 or 4.
    """

    cache: InPlaceCache
    key: ir.Value
    value: ir.Value
    k_scale: np.ndarray
    v_scale: np.ndarray
    bits: int


def quantised_cache(a: AttentionNode) -> QuantisedCache | None:
    """Return the cache of a node that writes integers at one place and reads up to it."""
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
    """Return the integers that a value is made from, their scale and their bits."""
    source, factor = _split_constant(value, "Mul")
    linear = _read_linear(source, "DequantizeLinear")
    if linear is not None:
        return linear[0], linear[1] * factor, 8
    packed = _packed_bytes(source)
    return None if packed is None else (packed, factor, 4)


def _packed_bytes(value: ir.Value) -> ir.Value | None:
    """Return the uint8 of which a value has the halves, `[..., D / 2, 2]` as `[..., D]`."""
    pairs = _source(value, "Reshape")
    table = _producer(pairs, "Gather")
    if pairs is None or table is None or table.attributes.get_int("axis", 0) != 0:
        return None
    numbers = _constant(table.inputs[0])
    if numbers is None or not np.array_equal(numbers, HALVES):
        return None
    stored = _source(table.inputs[1], "Cast")
    if (
        stored is None
        or stored.dtype != ir.DataType.UINT8
        or not _are_pairs(dims(pairs), dims(value))
    ):
        return None
    return stored


def _source_of_packed(value: ir.Value, scale: np.ndarray) -> ir.Value | None:
    """Return the value that was divided by a scale, rounded to 4 bits and put in bytes."""
    total = _producer(_source(value, "Cast"), "Add")
    if total is None or value.dtype != ir.DataType.UINT8:
        return None
    second, factor = _split_constant(total.inputs[1], "Mul")
    first, second = _source_of_slice(total.inputs[0], 0), _source_of_slice(second, 1)
    if first is None or first is not second or not np.array_equal(factor, 16):
        return None
    integers, offset = _split_constant(first, "Add")
    clipped, high = _split_constant(_source(integers, "Cast"), "Min")
    rounded, low = _split_constant(clipped, "Max")
    source, divisor = _split_constant(_source(rounded, "Round"), "Div")
    numbers = (offset, high, low)
    if not all(np.array_equal(x, y) for x, y in zip(numbers, (8, 7, -8), strict=True)):
        return None
    return source if np.array_equal(divisor, scale) else None


def _are_pairs(pairs: Shape, joined: Shape) -> bool:
    """Return whether `[..., n, 2]` is reshaped to `[..., 2 n]`."""
    if len(pairs) != len(joined) + 1 or not isinstance(pairs[-2], int) or pairs[-1] != 2:
        return False
    same = all(known_equal(x, y) for x, y in zip(pairs[:-2], joined[:-1], strict=True))
    return same and joined[-1] == 2 * pairs[-2]


def _source_of_slice(value: ir.Value | None, start: int) -> ir.Value | None:
    """Return the value of which a Slice takes every other element of the last axis."""
    node = _producer(value, "Slice")
    if node is None or node.inputs[0] is None:
        return None
    width = dims(node.inputs[0])[-1]
    arguments = [_constant(optional_input(node, index)) for index in range(1, 5)]
    if any(x is None or x.size != 1 for x in arguments) or not isinstance(width, int):
        return None
    first, end, axis, step = (int(x.item()) for x in arguments if x is not None)
    last = axis in (-1, len(dims(node.inputs[0])) - 1)
    return node.inputs[0] if last and (first, step) == (start, 2) and end >= width else None


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _source(value: ir.Value | None, op_type: str) -> ir.Value | None:
    """Return the first input of the node of this type that makes a value."""
    node = _producer(value, op_type)
    return None if node is None else node.inputs[0]


def _source_of_int8(value: ir.Value, scale: np.ndarray) -> ir.Value | None:
    """Return the value that was divided by a scale and rounded to int8."""
    linear = _read_linear(value, "QuantizeLinear")
    if linear is None:
        return None
    source, factor = _split_constant(linear[0], "Div")
    return source if np.array_equal(linear[1] * factor, scale) else None


def _split_constant(value: V, op_type: str) -> tuple[V | ir.Value, np.ndarray]:
    """Return the first operand of a node whose second is a constant, and the constant; else 1."""
    node = _producer(value, op_type)
    if node is not None and node.inputs[0] is not None:
        operand = _constant(node.inputs[1])
        if operand is not None:
            return node.inputs[0], operand
    return value, np.ones((), np.float32)


def _read_linear(value: ir.Value, op_type: str) -> tuple[ir.Value, np.ndarray] | None:
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
