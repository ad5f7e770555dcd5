"""Recognition of KV caches: written in place, and there in the layer's type, float16 or integers.

A cache in place is a `TensorScatter` node in front of an `Attention` node. Integers of 8 bits are
int8, written by QuantizeLinear and read by DequantizeLinear. The scale is one number, or an array
by which the graph divides before these nodes and multiplies after. Integers of 4 bits are rounded,
clipped and increased by 8, and two neighbouring channels are packed into a byte. A table of all
bytes unpacks them.
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
    set_type,
    slice_of_last_axis,
    trace_back,
    value_before,
)
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.read import SWAP_LAST_AXES, AttentionNode

LENGTH = 2
"""The axis of `[B, Hkv, capacity, D]` along which a cache grows."""


@dataclasses.dataclass(frozen=True)
class InPlaceCache:
    """The cache of an `Attention` node, which reads past and new keys of it.

    Attributes:
        past_key: `[B, Hkv, capacity, D]`.
        past_value: `[B, Hkv, capacity, Dv]`.
        new_key: `[B, Hkv, L, D]`.
        new_value: `[B, Hkv, L, Dv]`.
        lengths: The number of past keys of each batch element, int64 `[B]`.
    """

    past_key: ir.Value
    past_value: ir.Value
    new_key: ir.Value
    new_value: ir.Value
    lengths: ir.Value


def in_place_cache(a: AttentionNode) -> InPlaceCache | None:
    """Return the cache in place of a node; None if it has none.

    Keys and values must be written at the same index, and be read up to the last new one.
    """
    if a.packed or a.past_key is not None or a.valid_keys is None:
        return None
    keys, values = _scatter(a.key), _scatter(a.value)
    if keys is None or values is None or not dims(a.query):
        return None
    (past_key, new_key, lengths), (past_value, new_value, value_lengths) = keys, values
    length = dims(a.query)[LENGTH]
    one_key_per_query = bool(dims(new_key)) and known_equal(dims(new_key)[LENGTH], length)
    if lengths is not value_lengths or not one_key_per_query:
        return None
    if not _is_sum(a.valid_keys, lengths, length):
        return None
    return InPlaceCache(past_key, past_value, new_key, new_value, lengths)


def float16_cache(a: AttentionNode) -> InPlaceCache | None:
    """Return the float16 cache of a node that casts it to its own type; None if it has none."""
    key, value = _before_widening(a.key), _before_widening(a.value)
    if key is None or value is None:
        return None
    return in_place_cache(dataclasses.replace(a, key=key, value=value))


def _before_widening(value: ir.Value) -> ir.Value | None:
    source = value_before(value, "Cast")
    return source if source is not None and source.dtype == ir.DataType.FLOAT16 else None


def is_bound(past: ir.Value, present: ir.Value) -> bool:
    """Return whether the caller may give `past` and `present` the same buffer.

    They must be graph input and output, and besides Shape only one node may read `past`.
    """
    readers = [use for use in past.uses() if use.node.op_type != "Shape"]
    return past.is_graph_input() and len(readers) == 1 and present.is_graph_output()


def can_be_written_by_operator(cache: InPlaceCache, key: ir.Value, value: ir.Value) -> bool:
    """Return whether one operator may write the cache and attend to it.

    The caller may bind the cache, and only attention reads the written keys and values.
    """
    are_bound = is_bound(cache.past_key, key) and is_bound(cache.past_value, value)
    return are_bound and len(key.uses()) == 1 and len(value.uses()) == 1


def transpose_value_cache(op: Builder, a: AttentionNode, cache: InPlaceCache) -> ir.Value:
    """Return the written value cache, whose layout becomes `[B, Hkv, Dv, capacity]`."""
    past, present = cache.past_value, a.value
    scatter = present.producer()
    assert scatter is not None  # that is how the cache was found
    past.shape = present.shape = ir.Shape([dims(past)[axis] for axis in SWAP_LAST_AXES])
    new = op("Transpose", cache.new_value, perm=SWAP_LAST_AXES)
    new_shape = ir.Shape([dims(cache.new_value)[axis] for axis in SWAP_LAST_AXES])
    set_type(new, a.dtype, new_shape)
    value = op("TensorScatter", past, new, cache.lengths, axis=3)
    take_over(present, value)
    return value


def source_of_number(value: ir.Value) -> ir.Value:
    """Return the origin of a number, through nodes that leave it unchanged."""
    return trace_back(value, {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


def _scatter(value: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return past, new keys and start of the TensorScatter of a cache `[B, Hkv, capacity, D]`."""
    node = producer_of(value, "TensorScatter")
    if node is None or len(dims(value)) != 4 or node.attributes.get_int("axis", -2) % 4 != LENGTH:
        return None
    past, new, start = node.inputs[0], node.inputs[1], optional_input(node, 2)
    if past is None or new is None or start is None:
        return None
    is_linear = node.attributes.get_string("mode", "linear") == "linear"
    return (past, new, start) if is_linear else None


def _is_sum(total: ir.Value, lengths: ir.Value, new: Size) -> bool:
    """Return whether `total` is provably `lengths` plus the number of new keys."""
    node = producer_of(source_of_number(total), "Add")
    if node is None:
        return False
    first, second = (source_of_number(x) for x in node.inputs if x is not None)
    if second is source_of_number(lengths):
        first, second = second, first
    return first is source_of_number(lengths) and _is_length(second, new)


def _is_length(value: ir.Value, size: Size) -> bool:
    """Return whether a value is provably the number `size`: a constant, or an axis of that name."""
    number = constant_array(value)
    if number is not None:
        return number.size == 1 and number.item() == size
    index = 0
    gather = producer_of(value, "Gather")
    if gather is not None:
        indices, source = constant_array(gather.inputs[1]), gather.inputs[0]
        if indices is None or source is None:
            return False
        index, value = int(indices.item()), source_of_number(source)
    node = producer_of(value, "Shape")
    if node is None or node.inputs[0] is None:
        return False
    known = dims(node.inputs[0])[node.attributes.get_int("start", 0) :]
    return len(known) > index and known_equal(known[index], size)


V = TypeVar("V", ir.Value, ir.Value | None)

NIBBLES = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1) - 8
"""The two integers that each byte holds, `[256, 2]`."""


@dataclasses.dataclass(frozen=True)
class QuantisedCache:
    """The cache of integers of an `Attention` node, which reads it dequantised.

    Attributes:
        cache: The cache. Past keys and values are integers; new ones are floating, before they
            are divided by the scale.
        key: The written keys, int8 `[B, Hkv, capacity, D]`, or uint8 `[B, Hkv, capacity, D / 2]`
            for 4 bits.
        k_scale: The scale of keys, float32: a scalar, or an array that broadcasts to the keys.
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
    if numbers is None or not np.array_equal(numbers, NIBBLES):
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
