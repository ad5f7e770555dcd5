"""Recognition of a KV cache in place: `TensorScatter` nodes in front of an `Attention` node."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import dims, optional_input
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.read import AttentionNode

SAME_NUMBER = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that do not change the value of a number."""

LENGTH = 2
"""The axis of `[B, Hkv, capacity, D]` along which a cache grows."""

TRANSPOSED = (0, 1, 3, 2)


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
    keys, values = _scatter(a.key), _scatter(a.value)
    if a.packed or a.past_key is not None or a.valid_keys is None:
        return None
    if keys is None or values is None:
        return None
    (past_key, new_key, lengths), (past_value, new_value, value_lengths) = keys, values
    new_length = dims(new_key)[LENGTH] if dims(new_key) else None
    if (
        lengths is not value_lengths
        or not dims(a.query)
        or not known_equal(dims(a.query)[LENGTH], new_length)
    ):
        return None
    if not _is_sum(a.valid_keys, lengths, dims(a.query)[LENGTH]):
        return None
    return InPlaceCache(past_key, past_value, new_key, new_value, lengths)


def float16_cache(a: AttentionNode) -> InPlaceCache | None:
    """Return the float16 cache of a node that casts it to its own type; None if it has none."""
    key, value = _before_widening(a.key), _before_widening(a.value)
    if key is None or value is None:
        return None
    return in_place_cache(dataclasses.replace(a, key=key, value=value))


def _before_widening(value: ir.Value) -> ir.Value | None:
    node = value.producer()
    source = None if node is None or node.op_type != "Cast" else node.inputs[0]
    return source if source is not None and source.dtype == ir.DataType.FLOAT16 else None


def is_bound(past: ir.Value, present: ir.Value) -> bool:
    """Return whether the caller may give `past` and `present` the same buffer.

    They must be graph input and output, and besides Shape only one node may read `past`.

    Args:
        past: The cache that the graph reads.
        present: The cache that it returns.
    """
    readers = [use for use in past.uses() if use.node.op_type != "Shape"]
    return past.is_graph_input() and len(readers) == 1 and present.is_graph_output()


def transpose_value_cache(op: Builder, a: AttentionNode, cache: InPlaceCache) -> ir.Value:
    """Change the layout of the value cache to `[B, Hkv, Dv, capacity]`, and return the written one.

    Args:
        op: Builder of the nodes.
        a: The `Attention` node as plain values.
        cache: The cache of the node.
    """
    past, present = cache.past_value, a.value
    scatter = present.producer()
    assert scatter is not None  # that is how the cache was found
    past.shape = present.shape = ir.Shape([dims(past)[axis] for axis in TRANSPOSED])
    new = op("Transpose", cache.new_value, perm=TRANSPOSED)
    new.dtype, new.shape = a.dtype, ir.Shape([dims(cache.new_value)[x] for x in TRANSPOSED])
    value = op("TensorScatter", past, new, cache.lengths, axis=3)
    take_over(present, value)
    return value


def source_of_number(value: ir.Value) -> ir.Value:
    """Return the origin of a number, through nodes that leave it unchanged."""
    node = value.producer()
    while node is not None and node.op_type in SAME_NUMBER and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _scatter(value: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return past, new keys and start of the TensorScatter of a cache `[B, Hkv, capacity, D]`."""
    node = value.producer()
    if node is None or node.op_type != "TensorScatter" or len(dims(value)) != 4:
        return None
    attributes, start = node.attributes, optional_input(node, 2)
    if attributes.get_int("axis", -2) % 4 != LENGTH:
        return None
    if attributes.get_string("mode", "linear") != "linear" or start is None:
        return None
    past, new = node.inputs[0], node.inputs[1]
    return None if past is None or new is None else (past, new, start)


def _is_sum(total: ir.Value, lengths: ir.Value, new: Size) -> bool:
    """Return whether `total` is provably `lengths` plus the number of new keys."""
    node = source_of_number(total).producer()
    if node is None or node.op_type != "Add":
        return False
    first, second = (source_of_number(x) for x in node.inputs if x is not None)
    if second is source_of_number(lengths):
        first, second = second, first
    return first is source_of_number(lengths) and _is_length(second, new)


def _is_length(value: ir.Value, size: Size) -> bool:
    if value.const_value is not None:
        return value.const_value.size == 1 and value.const_value.numpy().item() == size
    node = value.producer()
    index = 0
    if node is not None and node.op_type == "Gather":
        indices, value_of = node.inputs[1], node.inputs[0]
        if indices is None or indices.const_value is None or value_of is None:
            return False
        index, node = int(indices.const_value.numpy().item()), source_of_number(value_of).producer()
    if node is None or node.op_type != "Shape" or node.inputs[0] is None:
        return False
    known = dims(node.inputs[0])[node.attributes.get_int("start", 0) :]
    return len(known) > index and known_equal(known[index], size)
