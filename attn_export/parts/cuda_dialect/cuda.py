"""Lowering of graphs to the form that launches the fewest kernels on CUDA.

ONNX Runtime's `GroupQueryAttention` normalises, rotates, writes the cache and attends in three
kernels, in half precision. Dry runs on sm_80 and sm_90 led to this form (docs/dry-run.md).

The form needs one query per batch element, or batch size 1: ONNX Runtime refuses several queries
after a past in larger batches.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import onnx_ir as ir
from msgspec.structs import replace

from attn_export.dialect_names import CUDA, MICROSOFT
from attn_export.errors import GraphError
from attn_export.graph import IrGraph
from attn_export.graph.axis_names import common_axis, fix_axis
from attn_export.graph.ir_helpers import dims, nodes_of, producer_of, value_before
from attn_export.graph.lower.caches import InPlaceCache, can_be_written_by_operator, in_place_cache
from attn_export.graph.lower.computed_masks import shown_and_hidden
from attn_export.graph.lower.dialects import (
    DECODE,
    PREFILL,
    NotInHalfError,
    bound_caches,
    describe,
    prepare_masks,
    query_axis,
)
from attn_export.graph.lower.inside_projections import find_norm, find_rotation, pack_projections
from attn_export.graph.lower.mask_trials import MaskTrials
from attn_export.graph.lower.mask_values import MaskGraph
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.ort import fuse_silu, fuse_sums_into_norms
from attn_export.graph.lower.ort_kernels import INT32, attributes_of, most_keys, takes_widths
from attn_export.graph.lower.read import (
    SWAP_HEADS_AND_LENGTH,
    AttentionNode,
    attentions_of,
    merge_heads,
    merged_to_output,
    read_with_merge,
    replace_node,
)
from attn_export.graph.lower.tidy import tidy

_POSITIONS = 2**15
"""The least length of the rotary tables. ONNX Runtime refuses caches that are longer than those."""

_NOTHING_HIDDEN = sys.maxsize
"""The distance of the nearest hidden key if no key is hidden."""

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NOT_FOR_CUDA = (
    "no Attention node has a KV cache of whole heads that is written in place, and no mask but a "
    "window; CUDA runs the standard dialect best"
)


def rewrite(model: ir.Model) -> dict[str, IrGraph]:
    """Return the graphs of the dialect: for one query, for batch size 1, and for all else."""
    if not nodes_of(model, "TensorScatter"):  # every cache in place is written by it
        raise GraphError(_NOT_FOR_CUDA)
    prepare_masks(model)
    attentions = attentions_of(model)
    are_half = all(a.dtype in _HALF for a in attentions)
    for a in [] if are_half else attentions:
        if in_place_cache(a) and (a.mask is None or window_of(model, a) is not None):
            raise NotInHalfError
    length = query_axis(model)
    if not length:  # the number of queries is fixed
        return {"": _lowered(model, "", {})}
    graphs = {DECODE: _lowered(model, DECODE, {length: 1})}
    batch = common_axis(model, [dims(a.query)[0] for a in attentions])
    if batch:
        graphs[PREFILL] = _lowered(model, PREFILL, {batch: 1})
    tidy(model)
    _launch_fewer_kernels(model)
    return {"": describe(model, CUDA, bound=bound_caches(model)), **graphs}


def _lowered(model: ir.Model, phase: str, fixed: dict[str, int]) -> IrGraph:
    """Fix some axes, and lower every node that fits."""
    graph, bound = model.clone(), bound_caches(model)
    for axis, size in fixed.items():
        fix_axis(graph, axis, size)
    _move_norms_after_transposes(graph)
    lowered = [_lower_for_cuda(graph, node) for node in nodes_of(graph, "Attention")]
    if not any(lowered):
        raise GraphError(_NOT_FOR_CUDA)
    tidy(graph)
    _launch_fewer_kernels(graph)
    described = describe(graph, CUDA, phase, fixed=fixed, bound=bound)
    file = replace(described.file, dtypes=_narrow_inputs(graph))
    return dataclasses.replace(described, file=file)


def _lower_for_cuda(model: ir.Model, node: ir.Node) -> bool:
    """Return whether a node is lowered: if it fits, and its mask, if it has one, is a window."""
    a = read_with_merge(node)
    cache = in_place_cache(a)
    if cache is None or not _fits(a, cache):
        return False
    window = None if a.mask is None else window_of(model, a)
    if a.mask is not None and window is None:
        return False
    op = Builder(model, node)
    attended, *present = _grouped_query_attention(op, a, cache, window)
    take_over(a.key, present[0])
    take_over(a.value, present[1])
    replace_node(model, a, [merged_to_output(op, a, attended)])
    return True


def _fits(a: AttentionNode, cache: InPlaceCache) -> bool:
    """Return whether the operator can compute the node, and may write the cache itself."""
    one_query_or_batch = 1 in (dims(a.query)[0], dims(a.query)[-2])
    written = can_be_written_by_operator(cache, a.key, a.value)
    return written and a.is_plain and one_query_or_batch and takes_widths(a)


def _grouped_query_attention(
    op: Builder, a: AttentionNode, cache: InPlaceCache, window: int | None
) -> tuple[ir.Value, ...]:
    """Add the operator, and return attention `[B, L, H·D]`, present key and present value."""
    query, key = a.query, cache.new_key
    rotation = None
    if a.head_dim % 16 == 0:  # required by the operator's rotary embedding
        rotation = find_rotation(query, key, cache.lengths)
    if rotation is not None:
        query, key = rotation.query, rotation.key
    norm = find_norm(query, key)
    if norm is not None:
        query, key = norm.query, norm.key
    merged = (
        merge_heads(op, query, a.num_heads, a.head_dim),
        merge_heads(op, key, a.num_kv_heads, a.head_dim),
        merge_heads(op, cache.new_value, a.num_kv_heads, a.v_head_dim),
    )
    packed = pack_projections(op, *merged)
    # The capacity stands for the longest length: the host knows it from a shape, whereas lengths
    # would be copied from the device at each step. The operator reads lengths on the device.
    total = op("Cast", op("Squeeze", op.size(cache.past_key, 2)), to=INT32)
    positions = max(most_keys(cache), _POSITIONS)
    inputs = [
        *(merged if packed is None else (packed, None, None)), cache.past_key, cache.past_value,
        _last_positions(op, a, cache), total,
        *((None, None) if rotation is None else rotation.tables(op, positions)),
        *([None] * 5), *((norm.query_weight, norm.key_weight) if norm is not None else ()),
    ]  # fmt: skip
    while inputs[-1] is None:
        inputs.pop()
    attributes = attributes_of(a)
    if window is not None:
        attributes["local_window_size"] = window
    if rotation is not None:
        attributes["do_rotary"] = 1
    if norm is not None:
        attributes["qk_norm_epsilon"] = norm.epsilon
    return tuple(op.add_node("GroupQueryAttention", inputs, 3, MICROSOFT, **attributes))


def _last_positions(op: Builder, a: AttentionNode, cache: InPlaceCache) -> ir.Value:
    """Return the position of the last query of each batch element, int32 `[B]`."""
    lengths = op("Cast", cache.lengths, to=INT32)
    if dims(a.query)[-2] == 1:
        return lengths
    more = op("Sub", op.size(a.query, 2), op.ints(1))
    return op("Add", lengths, op("Cast", more, to=INT32))


def _narrow_inputs(model: ir.Model) -> dict[str, str]:
    """Change the type of int64 inputs that the graph only casts to int32, to save the Cast kernel.

    Return the new type of each changed input, by name.
    """
    narrowed = {}
    for value in model.graph.inputs:
        casts = [use.node for use in value.uses()]
        if not casts or not all(_casts_to_int32(node) for node in casts):
            continue
        value.type = ir.TensorType(INT32)  # a new object, since clones share the old one
        for node in casts:
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            assert node.graph is not None  # readers of an input are in a graph
            node.graph.remove(node, safe=True)
        narrowed[str(value.name)] = "int32"
    return narrowed


def _casts_to_int32(node: ir.Node) -> bool:
    source, cast = node.inputs[0], node.outputs[0]
    return (
        node.op_type == "Cast" and source is not None and source.dtype == ir.DataType.INT64
        and node.attributes.get_int("to", 0) == INT32 and not cast.is_graph_output()
    )  # fmt: skip


def window_of(model: ir.Model, a: AttentionNode) -> int | None:
    """Return the number of last keys that a mask shows, with the query's own; None for other masks.

    The nodes of the mask are run at several sizes, as in `computed_masks`.
    """
    try:
        trials = MaskTrials(model, a)
        if a.mask is None or trials.cache is None or not trials.appends:
            return None
        mask_graph = MaskGraph(a.mask, trials)
        if a.mask in mask_graph.data_dependent:
            return None
        return _measure_window(mask_graph, causal=a.causal)
    except Exception:  # foreign graphs may raise anything; the mask stays
        return None


def _measure_window(mask_graph: MaskGraph, *, causal: bool) -> int | None:
    farthest, nearest = 0, _NOTHING_HIDDEN  # distances of visible and of hidden keys
    for trial, shown, hidden in shown_and_hidden(mask_graph):
        if not (shown | hidden).all() or not (causal or (hidden | trial.causal).all()):
            return None
        query = trial.past[:, None, None, None] + np.arange(trial.queries)[:, None]
        known = trial.shown & trial.causal
        distance = np.where(known, query - np.arange(trial.keys), -1)
        farthest = max(farthest, int(np.where(shown, distance, -1).max()))
        nearest = min(nearest, int(np.where(hidden & known, distance, _NOTHING_HIDDEN).min()))
    return nearest if farthest == nearest - 1 else None


# -- norms and gated activations in half precision, by operators that launch less ---------------

_SCALES = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 2.0**50}
"""The factor of a norm whose epsilon is its square, by type: of values far below it, the norm is
the values themselves. Float16 values with a mean square of 1e6 change by an eighth of a rounding;
products of larger ones with gates overflow."""

_MOST = 1024
"""The largest number of values that a norm takes together, so that several blocks share a row."""


def _move_norms_after_transposes(model: ir.Model) -> None:
    """Normalise heads `[B, H, L, D]` and not `[B, L, H, D]`, as the operator of attention does."""
    for node in nodes_of(model, "Transpose"):
        norm = producer_of(node.inputs[0], "RMSNormalization")
        if norm is None or len(norm.outputs[0].uses()) > 1:
            continue
        perm, axis = node.attributes.get_ints("perm", ()), norm.attributes.get_int("axis", -1)
        if tuple(perm) == SWAP_HEADS_AND_LENGTH and axis in (-1, 3):
            op, x = Builder(model, node), norm.inputs[0]
            moved = op("Transpose", x, perm=SWAP_HEADS_AND_LENGTH)
            moved.shape, moved.type = node.outputs[0].shape, node.outputs[0].type
            (out,) = op.copy_node(norm, {x: moved} if x is not None else {})
            take_over(node.outputs[0], out)
            model.graph.remove([node, norm], safe=True)


def _launch_fewer_kernels(model: ir.Model) -> None:
    """Fuse sums into norms, and gates with what they multiply."""
    fuse_sums_into_norms(model, tuple(_SCALES))
    for node in nodes_of(model, "Mul"):
        for gate, value in (node.inputs, node.inputs[::-1]):
            before = _silu_of(gate)
            if (
                before is not None
                and value is not None
                and _multiply_by_silu(model, node, value, before)
            ):
                break
    fuse_silu(model, tuple(_SCALES))


def _silu_of(gate: ir.Value | None) -> ir.Value | None:
    """Return x if a value is x * sigmoid(x), and nothing else reads it; None for other values."""
    node = producer_of(gate, "Mul")
    if node is None or len(node.outputs[0].uses()) > 1:
        return None
    for x, sigmoid in (node.inputs, node.inputs[::-1]):
        if x is not None and x is value_before(sigmoid, "Sigmoid"):
            return x
    return None


def _multiply_by_silu(model: ir.Model, node: ir.Node, value: ir.Value, gate: ir.Value) -> bool:
    """Replace a product by a gated norm that changes nothing; return whether its type has one."""
    scale, shape = _SCALES.get(value.dtype or ir.DataType.UNDEFINED), dims(value)
    if scale is None or not shape or shape != dims(gate) or not isinstance(shape[-1], int):
        return False
    size = max(n for n in range(1, min(shape[-1], _MOST) + 1) if shape[-1] % n == 0)
    op = Builder(model, node)
    assert value.dtype is not None
    scales = op.array(np.full(size, scale, value.dtype.numpy()))
    gated = op(
        "GatedRMSNorm", value, scales, gate, domain=MICROSOFT, epsilon=scale**2, activation="silu"
    )
    take_over(node.outputs[0], gated)
    model.graph.remove(node, safe=True)
    return True
