"""Recognition of KV caches: written in place, and there in the layer's type or in float16.

A cache in place is a `TensorScatter` node in front of an `Attention` node.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import (
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
