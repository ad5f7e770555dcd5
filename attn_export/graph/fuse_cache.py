"""Canonical form of the attention of a user's module: one node with its cache.

A module of the user's concatenates its cache, and often repeats K/V heads, in front of
`scaled_dot_product_attention`. The `Attention` operator does both itself. Each pass is one
function on an `onnx_ir.Model` that leaves a correct graph behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.graph.axis_names import Size, known_equal
from attn_export.graph.ir_helpers import dims, nodes_of, optional_input

LAYOUT = frozenset(
    {"Cast", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators that only cut out, or lay out otherwise, what they are given."""

HEADS, LENGTH = 1, 2
"""Axes of `[B, H, S, D]`."""


def fuse_attention(model: ir.Model) -> None:
    """Run all passes of this file; each needs the previous one."""
    drop_whole_slices(model)
    share_heads(model)
    # The nodes that repeated the heads would count as readers of the cache.
    common.RemoveUnusedNodesPass()(model)
    fuse_caches(model)


def drop_whole_slices(model: ir.Model) -> None:
    """Leave out slices of everything, as `x[:, :, None]` makes them."""
    for node in nodes_of(model, "Slice"):
        source, out = node.inputs[0], node.outputs[0]
        if source is None or out.is_graph_output() or not _is_whole(node):
            continue
        out.replace_all_uses_with(source)
        model.graph.remove(node, safe=True)


def share_heads(model: ir.Model) -> None:
    """Give `Attention` the K/V heads before they were repeated for its query heads.

    `repeat_interleave`, and the `repeat_kv` of Hugging Face, which write the repeated heads to
    memory, and `expand` of a single head. Query head h uses K/V head h // q_per_kv then, which is
    what the operator means as well.
    """
    for node in nodes_of(model, "Attention"):
        if optional_input(node, 4) is not None:
            continue
        key, value = (_before_repeating(x) for x in node.inputs[1:3])
        if key is None or value is None or dims(key)[HEADS] != dims(value)[HEADS]:
            continue
        node.replace_input_with(1, key)
        node.replace_input_with(2, value)


def fuse_caches(model: ir.Model) -> None:
    """Move the Concat of past and new keys and values into the `Attention` that reads them.

    Not where `is_causal` is set: with a past the operator hides keys after P + i, and PyTorch
    those after i. Nor where nobody else reads what is concatenated: ONNX Runtime refuses a past
    without a present.
    """
    for node in nodes_of(model, "Attention"):
        if optional_input(node, 4) is not None:
            continue
        joins = [_cache_concat(node.inputs[index]) for index in (1, 2)]
        if node.attributes.get_int("is_causal", 0) or not _fit(node, joins):
            continue
        node.resize_inputs(max(6, len(node.inputs)))
        node.resize_outputs(max(3, len(node.outputs)))
        for index, join in enumerate(joins):
            assert join is not None  # `_fit` would have said so
            past, new = join.inputs
            node.replace_input_with(1 + index, new)
            node.replace_input_with(4 + index, past)
            _take_over(join.outputs[0], node.outputs[1 + index])
            model.graph.remove(join, safe=True)
    # A reader of the Concat may have come before the Attention. An order that is right stays.
    model.graph.sort()


def _cache_concat(value: ir.Value | None) -> ir.Node | None:
    """Return the Concat that appends to a cache along the length, if `value` is its output."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    past = node.inputs[0]
    if past is None or len(dims(past)) != 4 or not _is_handed_in(past):
        return None
    return node if node.attributes.get_int("axis", 0) % 4 == LENGTH else None


def _is_handed_in(value: ir.Value) -> bool:
    """Return whether a value is, or was cut from, an input: a cache, and no prefix or sink."""
    while not value.is_graph_input():
        node = value.producer()
        if node is None or node.op_type not in LAYOUT or node.inputs[0] is None:
            return False
        value = node.inputs[0]
    return True


def _fit(node: ir.Node, joins: Sequence[ir.Node | None]) -> bool:
    """Return whether two Concats can become the cache of `node`."""
    key, value = joins
    if key is None or value is None or key is value:
        return False
    lengths = [dims(past)[LENGTH] for join in (key, value) if (past := join.inputs[0]) is not None]
    if not known_equal(*lengths):
        return False
    outputs = [join.outputs[0] for join in (key, value)]
    read = all(out.is_graph_output() or len(out.uses()) > 1 for out in outputs)
    return read and not any(_leads_to(out, node) for out in outputs)


def _leads_to(value: ir.Value, node: ir.Node) -> bool:
    """Return whether `node` needs `value` in another way than as its key or value."""
    uses = [use for use in value.uses() if use.node is not node or use.idx not in (1, 2)]
    seen: set[ir.Node] = set()
    while uses:
        reader = uses.pop().node
        # What a branch within another node reads is taken to lead there.
        if reader is node or reader.graph is not node.graph:
            return True
        if reader not in seen:
            seen.add(reader)
            uses += [use for out in reader.outputs for use in out.uses()]
    return False


def _take_over(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new`, for its readers and in name."""
    new.shape, new.type = old.shape, old.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name, old.name = old.name, None


def _is_whole(node: ir.Node) -> bool:
    """Return whether a Slice leaves out nothing."""
    starts, ends = _numbers(node.inputs[1]), _numbers(node.inputs[2])
    steps = optional_input(node, 4)
    if not starts or not ends or (steps is not None and set(_numbers(steps) or [0]) != {1}):
        return False
    return not any(starts) and min(ends) == np.iinfo(np.int64).max


def _before_repeating(value: ir.Value | None) -> ir.Value | None:
    """Return `[B, Hkv, S, D]` if `value` `[B, H, S, D]` repeats each of its heads."""
    if value is None or len(dims(value)) != 4:
        return None
    heads = dims(value)[HEADS]
    single = _made_by(value, "Expand")
    if single:
        source = single[0].inputs[0]
        return source if source is not None and _one_head_of(source, value) else None
    nodes = _made_by(value, "Reshape", "Expand", "Unsqueeze")
    if not nodes:
        return None
    _, expand, lift = nodes
    source = lift.inputs[0]
    if source is None or len(dims(source)) != 4 or _numbers(lift.inputs[1]) != [HEADS + 1]:
        return None
    B, G, S, D = dims(source)
    if not isinstance(heads, int) or not isinstance(G, int):
        return None
    # The exporter does not always note the shape in between; its target is a constant then.
    repeated = _are([B, G, heads // G, S, D], dims(expand.outputs[0]))
    repeated = repeated or _numbers(expand.inputs[1]) == [1, 1, heads // G, 1, 1]
    return source if repeated and _are([B, heads, S, D], dims(value)) else None


def _one_head_of(source: ir.Value, value: ir.Value) -> bool:
    """Return whether `value` `[B, H, S, D]` can only be `source` `[B, 1, S, D]`, repeated."""
    B, H, S, D = dims(value)
    return isinstance(H, int) and _are([B, 1, S, D], dims(source))


def _made_by(value: ir.Value, *op_types: str) -> list[ir.Node]:
    """Return the nodes that made `value`, last first, if they are of these types; else none."""
    nodes: list[ir.Node] = []
    source: ir.Value | None = value
    for op_type in op_types:
        node = source.producer() if source is not None else None
        if node is None or node.op_type != op_type:
            return []
        nodes.append(node)
        source = node.inputs[0]
    return nodes


def _are(sizes: Sequence[Size], others: Sequence[Size]) -> bool:
    """Return whether all sizes are known to be equal."""
    return len(sizes) == len(others) and all(map(known_equal, sizes, others))


def _numbers(value: ir.Value | None) -> list[int] | None:
    """Return the numbers in a constant."""
    if value is None or value.const_value is None:
        return None
    return [int(number) for number in value.const_value.numpy().ravel()]
