"""Fusion of cache concatenation and head repetition into `Attention` nodes.

Users' modules concatenate past and new keys, and often repeat K/V heads, before they call
`scaled_dot_product_attention`. The `Attention` operator does both itself. Each pass is one
function on an `onnx_ir.Model` that leaves a correct graph behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import (
    PAST_KEY_INPUT,
    PAST_VALUE_INPUT,
    constant_numbers,
    dims,
    nodes_of,
    optional_input,
    producer_of,
    trace_back,
    value_before,
)

_PAST_OPERATORS = frozenset(
    {"Cast", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators that only select, convert or rearrange elements of their first input."""

_HEADS, _LENGTH = 1, 2
"""Axes of `[B, H, S, D]`."""


def fuse_attention(model: ir.Model) -> None:
    """Run all passes of this file in the order in which they depend on each other."""
    drop_whole_slices(model)
    share_heads(model)
    # The nodes that repeated the heads would count as readers of the cache.
    common.RemoveUnusedNodesPass()(model)
    fuse_caches(model)


def drop_whole_slices(model: ir.Model) -> None:
    """Remove Slice nodes that select everything, as `x[:, :, None]` exports them."""
    for node in nodes_of(model, "Slice"):
        source, out = node.inputs[0], node.outputs[0]
        if source is None or out.is_graph_output() or not _is_whole(node):
            continue
        out.replace_all_uses_with(source)
        model.graph.remove(node, safe=True)


def share_heads(model: ir.Model) -> None:
    """Replace keys and values with repeated heads by those before the repetition.

    This covers `repeat_interleave`, `repeat_kv` of Hugging Face, and `expand` of a single head. In
    all of them query head h uses K/V head h // q_per_kv, as in the operator.
    """
    for node in nodes_of(model, "Attention"):
        if optional_input(node, PAST_KEY_INPUT) is not None:
            continue
        key, value = (_unrepeated(x) for x in node.inputs[1:3])
        if key is None or value is None or dims(key)[_HEADS] != dims(value)[_HEADS]:
            continue
        node.replace_input_with(1, key)
        node.replace_input_with(2, value)


def fuse_caches(model: ir.Model) -> None:
    """Move the Concat of past and new keys and values into the `Attention` that reads them.

    Nodes with `is_causal` are left alone: with a past, the operator hides keys after P + i, and
    PyTorch those after i. So are nodes whose concatenated keys and values are read by no other
    node: ONNX Runtime refuses a past without a present.
    """
    for node in nodes_of(model, "Attention"):
        if optional_input(node, PAST_KEY_INPUT) is not None:
            continue
        concats = [_cache_concat(node.inputs[index]) for index in (1, 2)]
        if node.attributes.get_int("is_causal", 0) or not _can_fuse(node, concats):
            continue
        node.resize_inputs(max(PAST_VALUE_INPUT + 1, len(node.inputs)))
        node.resize_outputs(max(3, len(node.outputs)))
        for index, concat in enumerate(concats):
            assert concat is not None  # `_can_fuse` has checked this
            past, new = concat.inputs
            node.replace_input_with(1 + index, new)
            node.replace_input_with(PAST_KEY_INPUT + index, past)
            _replace_value(concat.outputs[0], node.outputs[1 + index])
            model.graph.remove(concat, safe=True)
    # A reader of the Concat may come before the Attention. The sort is stable.
    model.graph.sort()


def _cache_concat(value: ir.Value | None) -> ir.Node | None:
    """Return the Concat that computes `value` if it appends to a cache along the length."""
    node = producer_of(value, "Concat")
    if node is None or len(node.inputs) != 2:
        return None
    past = node.inputs[0]
    # A cache is part of a graph input; a constant prefix is none.
    if (
        past is None
        or len(dims(past)) != 4
        or not trace_back(past, _PAST_OPERATORS).is_graph_input()
    ):
        return None
    return node if node.attributes.get_int("axis", 0) % 4 == _LENGTH else None


def _can_fuse(node: ir.Node, concats: Sequence[ir.Node | None]) -> bool:
    """Return whether two Concats can become the cache of `node`."""
    key, value = concats
    if key is None or value is None or key is value:
        return False
    past_key, past_value = key.inputs[0], value.inputs[0]
    assert past_key is not None  # `_cache_concat` has checked both
    assert past_value is not None
    if not known_equal(dims(past_key)[_LENGTH], dims(past_value)[_LENGTH]):
        return False
    outputs = (key.outputs[0], value.outputs[0])
    are_read = all(out.is_graph_output() or len(out.uses()) > 1 for out in outputs)
    return are_read and not any(_leads_to(out, node) for out in outputs)


def _leads_to(value: ir.Value, node: ir.Node) -> bool:
    """Return whether `node` depends on `value` by any path other than its key and value inputs."""
    uses = [use for use in value.uses() if use.node is not node or use.idx not in (1, 2)]
    seen: set[ir.Node] = set()
    while uses:
        reader = uses.pop().node
        # A reader in a subgraph is assumed to lead to `node`.
        if reader is node or reader.graph is not node.graph:
            return True
        if reader not in seen:
            seen.add(reader)
            uses += [use for out in reader.outputs for use in out.uses()]
    return False


def _replace_value(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new` for all readers; `new` takes its name."""
    new.shape, new.type = old.shape, old.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name, old.name = old.name, None


def _is_whole(node: ir.Node) -> bool:
    """Return whether a Slice selects everything."""
    starts, ends = constant_numbers(node.inputs[1]), constant_numbers(node.inputs[2])
    steps = optional_input(node, 4)
    if not starts or not ends or (steps is not None and set(constant_numbers(steps) or [0]) != {1}):
        return False
    return not any(starts) and min(ends) == np.iinfo(np.int64).max


def _unrepeated(value: ir.Value | None) -> ir.Value | None:
    """Return the `[B, Hkv, S, D]` whose heads `value` `[B, H, S, D]` repeats, or None."""
    if value is None or len(dims(value)) != 4:
        return None
    source = value_before(value, "Expand")
    if source is not None:
        return source if _repeats_one_head(source, value) else None
    expand = producer_of(value_before(value, "Reshape"), "Expand")
    lift = None if expand is None else producer_of(expand.inputs[0], "Unsqueeze")
    source = None if lift is None else lift.inputs[0]
    if expand is None or lift is None or source is None or len(dims(source)) != 4:
        return None
    (B, G, S, D), heads = dims(source), dims(value)[_HEADS]
    if constant_numbers(lift.inputs[1]) != [_HEADS + 1]:
        return None
    if not isinstance(heads, int) or not isinstance(G, int):
        return None
    # If the exporter did not note the shape of the Expand, its target is a constant.
    repeated = _all_equal([B, G, heads // G, S, D], dims(expand.outputs[0]))
    repeated = repeated or constant_numbers(expand.inputs[1]) == [1, 1, heads // G, 1, 1]
    return source if repeated and _all_equal([B, heads, S, D], dims(value)) else None


def _repeats_one_head(source: ir.Value, value: ir.Value) -> bool:
    """Return whether an Expand of `source` to `value` `[B, H, S, D]` only repeats its one head."""
    B, H, S, D = dims(value)
    return isinstance(H, int) and _all_equal([B, 1, S, D], dims(source))


def _all_equal(sizes: Sequence[Size], others: Sequence[Size]) -> bool:
    """Return whether two shapes are known to be equal."""
    return len(sizes) == len(others) and all(map(known_equal, sizes, others))
