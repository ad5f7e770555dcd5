"""Recognition of KV caches: written in place, and there in the layer's type, float16 or integers.

A cache in place is a `TensorScatter` node in front of an `Attention` node. A cache of integers is
recognised by value, whatever nodes round and read it: int8, or two neighbouring channels of 4 bits
in a uint8, the first in the lower half, each increased by 8. The scale is one number, or one for
each channel.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import (
    chain,
    computed,
    constant_array,
    dims,
    optional_input,
    producer_of,
    set_type,
    trace_back,
    value_before,
)
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.read import SWAP_LAST_AXES, AttentionNode
from attn_export.quantiser import cached_integers

_LENGTH = 2
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
    length = dims(a.query)[_LENGTH]
    one_key_per_query = bool(dims(new_key)) and known_equal(dims(new_key)[_LENGTH], length)
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
    if node is None or len(dims(value)) != 4 or node.attributes.get_int("axis", -2) % 4 != _LENGTH:
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


_MOST_CHANNELS = 2**16
"""The largest number of channels of all heads with which a cache is tried."""

_BITS = {ir.DataType.INT8: 8, ir.DataType.UINT8: 4}
"""The bits of an integer, by the type in which a cache stores them."""


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
    new_key = _before_rounding(cache.new_key, k_scale, bits)
    new_value = _before_rounding(cache.new_value, v_scale, bits)
    if new_key is None or new_value is None:
        return None
    cache = dataclasses.replace(cache, new_key=new_key, new_value=new_value)
    return QuantisedCache(cache, key, value, k_scale, v_scale, bits)


def _stored_integers(value: ir.Value) -> tuple[ir.Value, np.ndarray, int] | None:
    """Return the integers that a value dequantises, their scale and their bits, or None.

    It is proven by the value of each byte that may be stored.
    """
    stored = next((x for x in chain(value) if producer_of(x, "TensorScatter")), None)
    if stored is None or stored.dtype not in _BITS or len(dims(stored)) != 4:
        return None
    bits = _BITS[stored.dtype]
    every_byte = _trial(np.arange(256).astype(np.uint8).view(stored.dtype.numpy()), stored)
    if every_byte is None or not _same_length(value, stored):
        return None
    found, integers = computed(value, {stored: every_byte}), cached_integers(every_byte, bits)
    if found is None or found.shape != integers.shape or found.dtype != np.float32:
        return None
    ones = np.argmax(integers == 1, axis=2)[:, :, None]
    scale = np.take_along_axis(found, ones, axis=2)[0]  # [Hkv, 1, D]
    if not (scale > 0).all() or not np.allclose(found, integers * scale, rtol=1e-6, atol=0):
        return None
    return stored, np.asarray(scale.flat[0]) if np.ptp(scale) == 0 else scale, bits


def _before_rounding(written: ir.Value, scale: np.ndarray, bits: int) -> ir.Value | None:
    """Return the value that is divided by a scale and rounded to the integers written, or None."""
    end = 2 ** (bits - 1)
    ties = np.arange(-end - 1, end + 1) + 0.5
    some = np.concatenate([ties - 1e-3, ties + 1e-3, [-9.3 * end, 9.3 * end]])
    rounds = False  # to even: exact ties can only be tried at some scales
    for source in chain(written):
        is_source = rounds and source.dtype == ir.DataType.FLOAT and _same_length(source, written)
        quotients = _trial(some, source) if is_source else None
        if quotients is not None:
            rounded = np.clip(np.round(quotients), -end, end - 1)
            found = computed(written, {source: (quotients * scale).astype(np.float32)})
            if found is not None and np.array_equal(cached_integers(found, bits), rounded):
                return source
        rounds |= any(producer_of(source, op_type) for op_type in ("Round", "QuantizeLinear"))
    return None


def _same_length(one: ir.Value, other: ir.Value) -> bool:
    """Return whether two values `[B, H, L, D]` have provably the same L."""
    sizes, others = dims(one), dims(other)
    return len(sizes) == len(others) == 4 and known_equal(sizes[_LENGTH], others[_LENGTH])


def _trial(values: np.ndarray, like: ir.Value) -> np.ndarray | None:
    """Return `[2, heads, N, width]`: N values in an order of its own for each channel and row.

    It is None if a value `[B, heads, L, width]` does not have these sizes, or too large ones.
    """
    heads, width = dims(like)[1::2] if len(dims(like)) == 4 else (0, 0)
    if not isinstance(heads, int) or not isinstance(width, int):
        return None
    if min(heads, width) < 1 or heads * width > _MOST_CHANNELS:
        return None
    every = np.broadcast_to(values[:, None], (2, heads, len(values), width))
    return np.random.default_rng(0).permuted(every, axis=2)
