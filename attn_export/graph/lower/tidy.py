"""Cleanup after lowering: each size is computed once, and only where it is read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.graph.axis_names import axis_of_an_input, known_equal, reshape_target
from attn_export.graph.ir_helpers import constant, dims, insert, ints, nodes_of, value_before

_SHARED = frozenset({
    "Add", "And", "Cast", "Concat", "Cos", "Equal", "Expand", "Greater", "Less", "LessOrEqual",
    "Mul", "Or", "Range", "ReduceMax", "Reshape", "Shape", "Sin", "Slice", "Squeeze", "Sub",
    "Unsqueeze", "Where",
})  # fmt: skip
"""Operators whose nodes are merged if inputs and attributes are the same."""


def tidy(model: ir.Model) -> None:
    """Run all passes of this file."""
    _merge_transposes(model)
    _take_sizes_from_inputs(model)
    _share_sizes(model.graph)
    common.RemoveUnusedNodesPass()(model)
    _sink_into_branches(model)
    _raise_lengths(model)


def _merge_transposes(model: ir.Model) -> None:
    """Replace a Transpose that moves only axes of 1, and a Reshape before it, by one Reshape."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type != "Transpose" or not _only_moves_ones(node):
            continue
        source = value_before(node.inputs[0], "Reshape") or node.inputs[0]
        assert source is not None
        target = reshape_target(dims(source), dims(node.outputs[0]))
        if target:
            node.op_type = "Reshape"
            node.attributes.clear()
            node.resize_inputs(2)
            node.replace_input_with(0, source)
            node.replace_input_with(1, ints(model, *target))


def _only_moves_ones(node: ir.Node) -> bool:
    source = node.inputs[0]
    sizes = () if source is None else dims(source)
    perm = [axis for axis in node.attributes.get_ints("perm", ()) if axis < len(sizes)]
    moved = [axis for axis in perm if sizes[axis] != 1]
    return bool(perm) and moved == sorted(moved)


def _take_sizes_from_inputs(model: ir.Model) -> None:
    """Compute sizes from graph inputs or constants if possible, so that nodes can share them."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        source = node.inputs[0] if node.op_type in ("Shape", "Squeeze") else None
        if source is None:
            continue
        if node.op_type == "Squeeze" and source.const_value is not None:
            _replace_by_constant(model, node, source.const_value.numpy().squeeze())
        if node.op_type == "Squeeze" or not dims(source):
            continue
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", 99)
        axes = dims(source)[start:end]
        if all(isinstance(size, int) for size in axes):
            _replace_by_constant(model, node, np.array(axes, np.int64))
        source_axis = axis_of_an_input(model, axes[0]) if len(axes) == 1 else None
        if source_axis is not None:
            value, axis = source_axis
            node.replace_input_with(0, value)
            node.attributes["start"] = ir.AttrInt64("start", axis)
            node.attributes["end"] = ir.AttrInt64("end", axis + 1)


def _replace_by_constant(model: ir.Model, node: ir.Node, array: np.ndarray) -> None:
    """Replace the output of a node by a constant."""
    if node.outputs[0].is_graph_output() or len(node.inputs) > 1 or array.size > 1:
        return
    node.outputs[0].replace_all_uses_with(constant(model, array))


def _share_sizes(graph: ir.Graph, known: dict[object, ir.Value] | None = None) -> None:
    """Merge equal nodes of `_SHARED` operators, also with `known` ones of the enclosing graphs."""
    known = dict(known or {})
    for node in graph:
        for branch in _branches(node):
            _share_sizes(branch, known)
        if node.op_type not in _SHARED or node.domain or len(node.outputs) != 1:
            continue
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        key = (node.op_type, *map(id, node.inputs), repr(sorted(attributes.items())))
        out = node.outputs[0]
        if key not in known:
            known[key] = out
        elif not out.is_graph_output():
            out.replace_all_uses_with(known[key])
            graph.remove(node, safe=True)


def _sink_into_branches(model: ir.Model) -> None:
    """Move nodes that only one branch of an `If` reads into that branch."""
    graph = model.graph
    # Not into the body of a Loop, which would repeat them.
    branches = {x for node in graph if node.op_type == "If" for x in _branches(node)}
    for node in reversed(list(graph)):
        readers = {use.node.graph for value in node.outputs for use in value.uses()}
        if len(readers) != 1 or any(value.is_graph_output() for value in node.outputs):
            continue
        (inner,) = readers
        if isinstance(inner, ir.Graph) and inner in branches:
            graph.remove(node)
            inner.insert_before(inner[0], node)


def _raise_lengths(model: ir.Model) -> None:
    """Move the total length of contrib attention in float16 from a branch to the main graph.

    In a branch, ONNX Runtime's CUDA provider computes it on the device, and the operator reads it
    on the host before the copy has arrived.
    """
    for node in (x for x in model.graph if x.op_type == "If"):
        for attention in (x for branch in _branches(node) for x in branch):
            total = attention.inputs[6] if attention.op_type == "GroupQueryAttention" else None
            if total is not None and attention.outputs[0].dtype == ir.DataType.FLOAT16:
                _move_before(node, total)


def _move_before(node: ir.Node, value: ir.Value) -> None:
    """Move the nodes that compute a value from their graph, a branch of `node`, before `node`."""
    producer = value.producer()
    if producer is None or producer.graph is node.graph:
        return
    for source in producer.inputs:
        if source is not None:
            _move_before(node, source)
    assert producer.graph is not None  # both nodes are in graphs
    assert node.graph is not None
    producer.graph.remove(producer)
    node.graph.insert_before(node, producer)


def _branches(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()


# -- shapes ---------------------------------------------------------------------------------------


def with_types(model: ir.Model) -> ir.Model:
    """Return a graph with the types, and where possible shapes, that onnx infers.

    The shapes of outputs are kept, because onnx may set their unknown sizes to 0.
    """
    declared = {value.name: value.shape for value in model.graph.outputs}
    inferred = common.ShapeInferencePass()(model).model
    for value in inferred.graph.outputs:
        value.shape = declared[value.name]
    return inferred


def drop_inner_shapes(model: ir.Model) -> None:
    """Remove the dynamic shapes of values within the graph.

    tract infers `past_len + query_len`, and treats the declared `total_len` as another size.
    """
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output() and not all(
                isinstance(size, int) for size in dims(value)
            ):
                value.shape = None


def reshape_by_position(model: ir.Model) -> None:
    """Replace the target shapes of Reshape by constants: 0 keeps an axis, -1 infers one.

    The exporter computes them with Shape and Concat, which several runtimes do not support.
    """
    for node in nodes_of(model, "Reshape"):
        before, shape, after = node.inputs[0], node.inputs[1], node.outputs[0]
        if shape is None or shape.const_value is not None:
            continue
        if before is None or before.shape is None or after.shape is None:
            continue
        target = reshape_target(dims(before), dims(after))
        if target is None:
            continue
        node.replace_input_with(1, ints(model, *target))
        node.attributes.pop("allowzero", None)


def expand_by_position(model: ir.Model) -> None:
    """Replace the target shapes of Expand by shapes that are 1 along every axis that does not grow.

    Only the sizes of growing axes are then computed by Shape and Concat.
    """
    for node in nodes_of(model, "Expand"):
        before, after = node.inputs[0], node.outputs[0]
        if before is None or before.shape is None or after.shape is None:
            continue
        axes = range(len(after.shape))
        grown_axes = [axis for axis in axes if _grows(before.shape, after.shape, axis)]
        sources = {axis: axis_of_an_input(model, after.shape[axis]) for axis in grown_axes}
        if any(source is None for source in sources.values()):
            continue
        parts: list[ir.Value] = []
        for axis in axes:
            source = sources.get(axis)
            if source is None:
                parts.append(ints(model, 1))
            else:
                value, start = source
                size = ir.node("Shape", [value], {"start": start, "end": start + 1})
                parts.append(insert(node, size))
        node.replace_input_with(1, insert(node, ir.node("Concat", parts, {"axis": 0})))


def _grows(before: ir.Shape, after: ir.Shape, axis: int) -> bool:
    """Return whether an Expand enlarges an axis of its output; shapes align at the last axis."""
    before_axis = axis - len(after) + len(before)
    return not known_equal(after[axis], before[before_axis] if before_axis >= 0 else 1)
