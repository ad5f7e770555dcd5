"""Conversion of the exporter's graph to canonical form.

In canonical form a graph is small, has the module's names, and has no traces of the machine.

Each pass is one function on an `onnx_ir.Model` that leaves a correct graph behind.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants

from attn_export.graph.axis_names import name_sums_of_axes
from attn_export.graph.fuse_cache import fuse_attention
from attn_export.graph.ir_helpers import (
    constant,
    constant_array,
    constant_name,
    insert,
    ints,
    merge_equal_constants,
    nodes_of,
    optional_input,
    producer_of,
)
from attn_export.graph.lower.tidy import expand_by_position, reshape_by_position
from attn_export.graph.ort_compat import make_ort_compatible

STACK_TRACE = "pkg.torch.onnx.stack_trace"
TORCH = re.compile(r"^torch/|-packages/torch/")
NAME_SCOPES = "pkg.torch.onnx.name_scopes"


def canonicalize(
    model: ir.Model, outputs: Sequence[str], relations: Mapping[str, str]
) -> dict[str, str]:
    """Bring an exported model into canonical form, in place.

    Returns:
        The origin ``package/file.py:line`` of each node, by the name of the node.
    """
    parameters = set(model.graph.initializers)
    name_sums_of_axes(model, relations)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    # A weight that is used twice is transposed twice; as one node it can be folded.
    common.CommonSubexpressionEliminationPass()(model)
    fold_weight_transposes(model)
    reshape_by_position(model)
    expand_by_position(model)
    slice_pieces(model)
    fold_constants(
        model,
        onnx_shape_inference=False,
        # Folding nodes that read weights would lose the weights' names; runtimes fold them.
        should_fold=lambda node: (
            False if any(x is not None and x.name in parameters for x in node.inputs) else None
        ),
    )
    common.IdentityEliminationPass()(model)
    fuse_attention(model)
    make_ort_compatible(model)
    merge_equal_constants(model, large=True)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    _name_outputs(model, outputs)
    if any(model.graph.subgraphs()):  # a name in a body may be no name outside it
        common.NameFixPass()(model)
    drop_unused_outputs(model)
    common.RemoveUnusedOpsetsPass()(model)
    name_constants(model, keep=parameters)
    name_nodes(model)
    origins = node_origins(model)
    strip_metadata(model)
    return origins


def _name_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Name the outputs, and make each a separate value, as those of the bodies of loops."""
    for graph in (model.graph, *model.graph.subgraphs()):
        _separate_outputs(graph)
    for value, name in zip(model.graph.outputs, names, strict=True):
        value.name = name


def _separate_outputs(graph: ir.Graph) -> None:
    """Copy outputs by Identity that another graph computes, or that are inputs or other outputs.

    ONNX Runtime takes the last of two equal outputs of a body for both, before it is computed.
    """
    taken: set[ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        producer = value.producer()
        if value in taken or producer is None or producer.graph is not graph:
            copy = ir.node("Identity", [value], name=f"{value.name}_copy_{index}")
            copy.outputs[0].name = copy.name
            copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
            graph.append(copy)
            value = graph.outputs[index] = copy.outputs[0]
        taken.add(value)


def fold_weight_transposes(model: ir.Model) -> None:
    """Replace Transpose of a weight by the transposed weight, `[in, out]`, under the same name.

    Linear layers export as Transpose(weight) -> MatMul. Runtimes that do not fold constants would
    run the Transpose each time.
    """
    for node in nodes_of(model, "Transpose"):
        source = node.inputs[0]
        if source is None or source.const_value is None or len(source.uses()) != 1:
            continue
        perm = node.attributes.get_ints("perm")
        # A view on the memory of the module; the data are transposed when they are written.
        array = source.const_value.numpy().transpose(perm)
        source.const_value = ir.tensor(array, name=source.name)
        source.shape = ir.Shape(array.shape)
        node.outputs[0].replace_all_uses_with(source)


def slice_pieces(model: ir.Model) -> None:
    """Replace items of SplitToSequence by Slice: pieces of a size that is computed.

    Few runtimes have sequences, and onnxscript's constant folding raises an error for such sizes.
    """
    for item in nodes_of(model, "SequenceAt"):
        pieces = producer_of(item.inputs[0], "SplitToSequence")
        number = constant_array(item.inputs[1])
        size = optional_input(pieces, 1) if pieces is not None else None
        if pieces is None or number is None or size is None or size.const_value is not None:
            continue
        many = producer_of(size, "Concat") is not None or bool(size.shape)
        if number < 0 or many:  # from the end; of many sizes
            continue
        edges = []
        for edge in (int(number), int(number) + 1):
            by = constant(model, np.array(edge, size.dtype.numpy() if size.dtype else np.int64))
            product = insert(item, ir.node("Mul", [size, by]), like=size)
            flat = ir.node("Reshape", [product, ints(model, 1)])
            edges.append(insert(item, flat, like=size, shape=ir.Shape([1])))
        axis = ints(model, pieces.attributes.get_int("axis", 0))
        piece = ir.node("Slice", [pieces.inputs[0], *edges, axis])
        sliced = insert(item, piece, like=item.outputs[0])
        item.outputs[0].replace_all_uses_with(sliced, replace_graph_outputs=True)
    if nodes_of(model, "SplitToSequence"):  # they must be gone
        common.RemoveUnusedNodesPass()(model)


def drop_unused_outputs(model: ir.Model) -> None:
    """Remove unread outputs of `Attention` nodes; those before a read one get an empty name."""
    graph_outputs = set(model.graph.outputs)
    for node in nodes_of(model, "Attention"):
        for output in node.outputs:
            if not output.uses() and output not in graph_outputs:
                output.name = ""
        used = max(i for i, output in enumerate(node.outputs) if output.name) + 1
        node.resize_outputs(used)
        if used < 4:
            node.attributes.pop("qk_matmul_output_mode", None)


def name_constants(model: ir.Model, keep: Set[str]) -> None:
    """Name small constants by their contents, so that names do not depend on the exporter."""
    taken = set(model.graph.initializers)
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or name in keep or tensor.size > 16:
            continue
        new = constant_name(tensor)
        if new not in taken:
            value.name = new
            taken.add(new)


def name_nodes(model: ir.Model) -> None:
    """Name nodes by submodule and operator (``q_proj/MatMul``), and values by their nodes."""
    counts: dict[str, int] = {}
    graph_values = {*model.graph.inputs, *model.graph.outputs}
    names = {value.name for value in (*graph_values, *model.graph.initializers.values())}
    for node in model.graph:
        # A list literal: the submodules from the outside in, then the traced operation.
        scopes = ast.literal_eval(node.metadata_props.get(NAME_SCOPES, "[]"))[:-1]
        name = "/".join([*(s for s in scopes if s and not s.startswith("_empty")), node.op_type])
        counts[name] = counts.get(name, 0) + 1
        node.name = name if counts[name] == 1 else f"{name}_{counts[name]}"
        for index, value in enumerate(node.outputs):
            if value.name and value not in graph_values:
                name = f"{node.name}.{index}" if index else f"{node.name}.out"
                value.name = f"{name}.value" if name in names else name


def node_origins(model: ir.Model) -> dict[str, str]:
    """Return the origin of each node in the module, as ``package/file.py:line``."""
    origins = {}
    for node in model.graph:
        frames = re.findall(r'File "([^"]+)", line (\d+)', node.metadata_props.get(STACK_TRACE, ""))
        module_frames = [frame for frame in frames if not TORCH.search(Path(frame[0]).as_posix())]
        if module_frames and node.name:
            file, line = module_frames[-1]
            origins[node.name] = f"{'/'.join(Path(file).parts[-2:])}:{line}"
    return origins


def strip_metadata(model: ir.Model) -> None:
    """Remove stack traces, host paths and all other metadata and doc strings."""
    common.ClearMetadataAndDocStringPass()(model)
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [value for node in model.graph for value in node.outputs]
    for value in values:
        value.metadata_props.clear()
        value.doc_string = None
        if value.const_value is not None:
            value.const_value.metadata_props.clear()
            if isinstance(value.const_value, ir.TensorProtoTensor):  # which has no setter
                value.const_value.raw.ClearField("doc_string")
            else:
                value.const_value.doc_string = None
    for part in (model, model.graph):
        part.metadata_props.clear()
        part.doc_string = None
