"""Lowering of `Attention` nodes to the fastest form in ONNX Runtime, for many queries or one.

If no form is faster, the node stays where ONNX Runtime computes it as specified; elsewhere it
becomes opset 18. docs/performance.md explains the choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT
from attn_export.graph.axis_names import known_equal
from attn_export.graph.ir_helpers import (
    constant_array,
    dims,
    nodes_of,
    producer_of,
    set_type,
    value_before,
)
from attn_export.graph.lower import ort_kernels
from attn_export.graph.lower.caches import (
    InPlaceCache,
    can_be_written_by_operator,
    float16_cache,
    in_place_cache,
    is_bound,
    transpose_value_cache,
)
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.lower.ort_kernels import fold
from attn_export.graph.lower.portable import (
    attend,
    before_expand,
    decompose,
    lower_to_portable,
    mask_may_be_shorter,
)
from attn_export.graph.lower.read import (
    AttentionNode,
    read_with_merge,
    replace_node,
    split_to_output,
)

_Branch = Callable[[Builder], Sequence[ir.Value]]

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16


def lower_node(model: ir.Model, node: ir.Node, *, one_query: bool = False) -> None:
    """Lower a node for any number of queries, or for one."""
    a = read_with_merge(node)
    outputs = _attend_one_query(Builder(model, node), a) if one_query else None
    if outputs is None:
        outputs = _attend_any_length(Builder(model, node), a)
    if outputs is not None:
        replace_node(model, a, outputs)
    elif not _runs_as_it_is(a):
        lower_to_portable(model, node)


def _attend_any_length(op: Builder, a: AttentionNode) -> Sequence[ir.Value] | None:
    """Add attention, and return the outputs of the node; None if no form fits it."""
    cache = _cache(op, a)
    fits_causal_kernel = _fits_causal_kernel(a, cache)
    if cache is not None and holds_values_transposed(a, cache):
        return [_attend_transposed_cache(op, a, cache)]
    if cache is not None and fits_causal_kernel:
        return [_if_cache_is_empty(op, a, cache, lambda inner: _without_kernel(inner, a, 1))]
    if _fits_full_kernel(a):
        return [ort_kernels.full_attention(op, a)]
    if fits_causal_kernel:
        if a.past_key is None:
            return ort_kernels.causal_attention(op, a)
        return _attend_after_past(op, a)
    return None


def _attend_one_query(op: Builder, a: AttentionNode) -> Sequence[ir.Value] | None:
    """Add attention of one query, and return the outputs of the node; None if no form fits it."""
    if dims(a.query)[-2] != 1 or a.packed or not a.is_plain:
        return None
    if not appends_to_cache(a):
        return None
    # A single query is the last one, and sees all keys.
    a = dataclasses.replace(a, causal=False)
    cache = _cache(op, a)
    if cache is not None:
        if holds_values_transposed(a, cache):
            value = transpose_value_cache(op, a, cache)
            return [fold(op, a, a.key, value, transposed=True)]
        by_kernel = a.q_per_kv == 1 or ort_kernels.rotation_inside(a, cache) is not None
        if by_kernel and _can_write(a, cache):
            return [ort_kernels.in_place_attention(op, a, cache)]
        return [fold(op, a, a.key, a.value)]
    if a.q_per_kv > 1 and a.past_key is not None and a.past_value is not None:
        key = op("Concat", a.past_key, a.key, axis=2)
        value = op("Concat", a.past_value, a.value, axis=2)
        return [fold(op, a, key, value), key, value]
    return None


def _cache(op: Builder, a: AttentionNode) -> InPlaceCache | None:
    """Return the in-place cache of a node, with new keys and values cast to the node's type."""
    cache = float16_cache(a)
    if cache is None:
        return in_place_cache(a)
    new_key, new_value = (
        set_type(op("Cast", x, to=a.dtype), a.dtype, x.shape)
        for x in (cache.new_key, cache.new_value)
    )
    return dataclasses.replace(cache, new_key=new_key, new_value=new_value)


def appends_to_cache(a: AttentionNode) -> bool:
    """Return whether a node has a cache to which it appends one key per query."""
    cache = in_place_cache(a) or float16_cache(a)
    new = a.key if cache is None else cache.new_key
    cached = cache is not None or a.past_key is not None
    return cached and bool(dims(new)) and known_equal(dims(new)[-2], dims(a.query)[-2])


def holds_values_transposed(a: AttentionNode, cache: InPlaceCache) -> bool:
    """Return whether V is cached as `[B, Hkv, Dv, capacity]`, which is faster for shared heads.

    In a whole model the kernel that also rotates is faster.
    """
    if ort_kernels.rotation_inside(a, cache) is not None and _can_write(a, cache):
        return False
    whole = a.value.is_graph_output() and len(a.value.uses()) == 1
    return a.q_per_kv > 1 and a.is_plain and whole and is_bound(cache.past_value, a.value)


def _fits_full_kernel(a: AttentionNode) -> bool:
    unseen = a.output(1) is None and a.output(2) is None
    hides = a.causal or a.mask is not None or a.valid_keys is not None or a.past_key is not None
    return a.is_plain and unseen and not hides and not a.softcap and a.dtype == FLOAT


def _fits_causal_kernel(a: AttentionNode, cache: InPlaceCache | None) -> bool:
    """Return whether the causal kernel can compute the node, with one new key per query."""
    if a.valid_keys is not None and cache is None:
        return False
    new_key = a.key if cache is None else cache.new_key
    is_plain = a.is_plain and a.dtype in (FLOAT, FLOAT16)
    if not a.causal or not is_plain or not ort_kernels.takes_widths(a):
        return False
    if a.mask is not None and (a.dtype != FLOAT or not _mask_spans_all_keys(a)):
        return False
    return bool(dims(new_key)) and known_equal(dims(new_key)[-2], dims(a.query)[-2])


def _mask_spans_all_keys(a: AttentionNode) -> bool:
    """Return whether the mask is known, from its shape, to be as long as the keys."""
    assert a.mask is not None
    keys = dims(a.mask)[-1] if len(dims(a.mask)) in (2, 4) else 1
    return keys != 1 and not mask_may_be_shorter(a, keys)


def _can_write(a: AttentionNode, cache: InPlaceCache) -> bool:
    """Return whether contrib GroupQueryAttention can write the cache of one query itself."""
    fits = can_be_written_by_operator(cache, a.key, a.value)
    return a.mask is None and ort_kernels.takes_widths(a) and fits and a.dtype == FLOAT


def _attend_transposed_cache(op: Builder, a: AttentionNode, cache: InPlaceCache) -> ir.Value:
    """Add attention over a cache in place, whose V becomes `[B, Hkv, Dv, capacity]`."""
    value = transpose_value_cache(op, a, cache)

    def attend_all_keys(inner: Builder) -> list[ir.Value]:
        attended, _ = decompose(inner, a, a.query, a.key, value, transposed=True)
        return [split_to_output(inner, a, attended)]

    if not _fits_causal_kernel(a, cache):
        return attend_all_keys(op)[0]
    return _if_cache_is_empty(op, a, cache, attend_all_keys)


def _if_cache_is_empty(
    op: Builder, a: AttentionNode, cache: InPlaceCache, otherwise: _Branch
) -> ir.Value:
    """Add an If: attention among new tokens for an empty cache, else `otherwise`."""

    def attend_new_keys(inner: Builder) -> Sequence[ir.Value]:
        new = dataclasses.replace(a, key=cache.new_key, value=cache.new_value, valid_keys=None)
        if a.mask is not None:
            new = dataclasses.replace(new, mask=_mask_of_new_keys(inner, a, a.mask))
        return ort_kernels.causal_attention(inner, new)[:1]

    longest = op("ReduceMax", cache.lengths, keepdims=0)
    is_first = op("Equal", longest, op.scalar(0))
    (attended,) = op.add_if(is_first, attend_new_keys, otherwise, a.dtype)
    return attended


def _mask_of_new_keys(op: Builder, a: AttentionNode, mask: ir.Value) -> ir.Value:
    """Return the mask of the first L keys."""
    mask = before_expand(mask)
    kept = op("Slice", mask, op.ints(0), op.size(a.query, 2), op.ints(-1))
    return set_type(kept, mask.dtype, ir.Shape([*dims(mask)[:-1], dims(a.query)[2]]))


def _attend_after_past(op: Builder, a: AttentionNode) -> Sequence[ir.Value]:
    """Add an If: the causal kernel for an empty past or batch size 1, else no kernel."""
    assert a.past_key is not None
    is_empty = op("Equal", op.size(a.past_key, 2), op.ints(0))
    single = op("Equal", op.size(a.query, 0), op.ints(1))
    fits = op("Squeeze", op("Or", is_empty, single))
    return op.add_if(
        fits,
        lambda inner: ort_kernels.causal_attention(inner, a),
        lambda inner: _without_kernel(inner, a, 3),
        a.dtype,
    )


def _runs_as_it_is(a: AttentionNode) -> bool:
    """Return whether ONNX Runtime computes the node as the specification defines it.

    It requires masks of 2 or 4 axes with all queries and keys. With a past, `is_causal` is wrong
    unless there is one new key per query.
    """
    if a.causal and a.past_key is not None and not appends_to_cache(a):
        return False
    if a.mask is None:
        return True
    return _mask_spans_all_keys(a) and known_equal(dims(a.mask)[-2], dims(a.query)[-2])


def _without_kernel(op: Builder, a: AttentionNode, count: int) -> Sequence[ir.Value]:
    """Return the outputs of a copy of the node if ONNX Runtime computes it, else of its parts."""
    if not _runs_as_it_is(a):
        return attend(op, a)[:count]
    attended, *present = op.copy_node(a.node, {}, count)
    return [attended if a.packed else split_to_output(op, a, attended), *present]


# -- norms and activations as ONNX Runtime's own operators, which do the work of several nodes --

_SKIPS = {
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}
"""The norm of a sum, which is an output, too, by the operator of the norm."""

_Dtypes: TypeAlias = Sequence[ir.DataType]


def fuse_for_ort(model: ir.Model) -> None:
    """Fuse sums into norms, and the activations of gated MLPs."""
    fuse_sums_into_norms(model)
    fuse_silu(model)


def fuse_sums_into_norms(model: ir.Model, dtypes: _Dtypes = (ir.DataType.FLOAT,)) -> None:
    """Replace the norm of a sum of equal shapes by a node that returns both."""
    for op_type, fused in _SKIPS.items():
        for node in nodes_of(model, op_type):
            total = node.inputs[0]
            add = producer_of(total, "Add")
            if add is None or total is None or not _fits(add, node, dtypes):
                continue
            epsilon = node.attributes.get_float("epsilon", 1e-5)
            outputs = Builder(model, add).add_node(
                fused, [*add.inputs, *node.inputs[1:]], 4, MICROSOFT, epsilon=epsilon
            )
            outputs[1].name = outputs[2].name = ""
            take_over(node.outputs[0], outputs[0])
            take_over(total, outputs[3])
            model.graph.remove([node, add], safe=True)


def _fits(add: ir.Node, norm: ir.Node, dtypes: _Dtypes) -> bool:
    """Return whether one node may add two values `[…, E]` and normalise the sum."""
    total, weights = norm.inputs[0], [x for x in norm.inputs[1:] if x is not None]
    shapes = [dims(x) for x in add.inputs if x is not None]
    if total is None or total.dtype not in dtypes or len(dims(total)) not in (2, 3):
        return False
    same = all(
        len(shape) == len(dims(total)) and all(map(known_equal, shape, dims(total)))
        for shape in shapes
    )
    of_last_axis = norm.attributes.get_int("axis", -1) in (-1, len(dims(total)) - 1)
    vectors = all(constant_array(x) is not None and len(dims(x)) == 1 for x in weights)
    return same and of_last_axis and vectors and len(norm.outputs) == 1


def fuse_silu(model: ir.Model, dtypes: _Dtypes = (ir.DataType.FLOAT,)) -> None:
    """Replace x * Sigmoid(x) by QuickGelu with an alpha of 1, where a product reads it.

    Far below 0 its error is 5e-8. Among the products of a gated MLP it is below a rounding; what is
    read by itself stays exact.
    """
    for node in nodes_of(model, "Mul"):
        x = value_before(node.inputs[1], "Sigmoid")
        readers = {use.node.op_type for use in node.outputs[0].uses()}
        is_silu = x is not None and x is node.inputs[0] and x.dtype in dtypes
        if is_silu and readers and readers <= {"Mul", "MatMul"}:
            silu = Builder(model, node)("QuickGelu", x, domain=MICROSOFT, alpha=1.0)
            take_over(node.outputs[0], silu)
            model.graph.remove(node, safe=True)
