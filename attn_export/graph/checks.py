"""Run of all checks, and checks of operators, types, unused nodes, metadata and external data."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from attn_export.dialect_names import CUDA, LINEAR_OPSET, MICROSOFT, ORT, PORTABLE, STANDARD
from attn_export.errors import one_line
from attn_export.graph.check_structure import (
    RULES,
    Check,
    CheckedGraph,
    CheckFinding,
    Expected,
    project_rule,
    standard_rule,
)
from attn_export.graph.load import external_problems, load_proto, subgraphs

# -- operators and opsets -----------------------------------------------------------------------

_OPSETS = {STANDARD: (23, 24, LINEAR_OPSET), PORTABLE: (18,), ORT: (23, 24), CUDA: (23, 24)}
"""Opsets of ai.onnx that a graph may import, by dialect."""
_ATTENTION_SINCE = 23
_IR_LIMIT = {18: 8, 23: 11, 24: 12, LINEAR_OPSET: 13}
"""The IR version that belongs to an opset. A newer one excludes older runtimes without need."""

_OWN_OPERATORS = frozenset({
    "Abs", "Add", "And", "Attention", "Cast", "CausalConvWithState", "Clip", "Concat",
    "ConstantOfShape", "Cos", "DequantizeLinear", "Div", "DynamicQuantizeLinear", "Equal", "Exp",
    "Expand", "Gather", "Greater", "GreaterOrEqual", "LayerNormalization", "Less", "LessOrEqual",
    "LinearAttention", "MatMul", "MatMulInteger", "Max", "Min", "Mul", "Neg", "Pow",
    "QuantizeLinear", "RMSNormalization", "Range", "Reciprocal", "ReduceMax", "ReduceMin",
    "ReduceSum", "Reshape", "Round", "Shape", "Sin", "Slice", "Softplus", "Split", "Sqrt",
    "Squeeze", "Sub", "TensorScatter", "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators of graphs of attn-export's own module in the standard dialect."""

_PORTABLE_OPERATORS = {name for name in _OWN_OPERATORS if onnx.defs.has(name, 18)} | {
    "Conv", "Identity", "Not", "Pad", "ReduceMean", "Scan", "ScatterND", "Softmax", "Tanh",
}  # fmt: skip

_ORT_OPERATORS = _OWN_OPERATORS | _PORTABLE_OPERATORS | {
    "GroupQueryAttention", "If", "MatMulNBits", "MultiHeadAttention", "Or",
}  # fmt: skip

OPERATORS = {
    STANDARD: _OWN_OPERATORS, PORTABLE: _PORTABLE_OPERATORS, ORT: _ORT_OPERATORS,
    CUDA: _OWN_OPERATORS | {"GroupQueryAttention"},
}  # fmt: skip
"""Operators of graphs of attn-export's own module, by dialect."""

_DOMAINS = dict.fromkeys((ORT, CUDA), ("", "ai.onnx", MICROSOFT))
"""Operator domains that a dialect allows; by default only that of ONNX."""


@standard_rule
def attention_count(graph: CheckedGraph) -> Iterator[str]:
    """Check that there is one `Attention` node for each attention, and no Softmax."""
    if graph.expected is None or graph.expected.attentions is None:
        return
    counts = Counter(node.op_type for node in graph.proto.graph.node)
    wanted = graph.expected.attentions
    if (count := counts["Attention"] + counts["LinearAttention"]) != wanted:
        yield f"{count} Attention nodes, expected {wanted}; export it again"
    if counts["Softmax"]:
        yield f"{counts['Softmax']} Softmax nodes: attention was taken apart; export it again"


@standard_rule
def expected_operators(graph: CheckedGraph) -> Iterator[str]:
    """Check that all operators belong to the dialect."""
    if graph.expected is None:
        return
    dialect = graph.expected.dialect
    for domain, names in sorted(_by_domain(graph.proto.graph).items()):
        if domain not in _DOMAINS.get(dialect, ("", "ai.onnx")):
            yield f"{', '.join(names)} of {domain}: not in the {dialect} dialect; lower it"
        elif graph.expected.ours:
            strange = [name for name in names if name not in OPERATORS[dialect]]
            if strange:
                yield f"{', '.join(strange)}: not an operator of this module; export it again"


@standard_rule
def opset_version(graph: CheckedGraph) -> Iterator[str]:
    """Check that onnx and the dialect support the opset, and that the opset has `Attention`."""
    opsets = {entry.domain or "ai.onnx": entry.version for entry in graph.proto.opset_import}
    opset = opsets.get("ai.onnx", 0)
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        yield f"opset {opset} is newer than onnx {onnx.__version__} knows ({newest}); export lower"
    if opset < _ATTENTION_SINCE and "Attention" in _by_domain(graph.proto.graph).get("", ()):
        yield f"Attention at opset {opset}, which has none; declare opset {_ATTENTION_SINCE}"
    dialect = None if graph.expected is None else graph.expected.dialect
    if dialect is not None and opset not in _OPSETS[dialect]:
        yield f"opset {opset}, the {dialect} dialect has {_OPSETS[dialect]}; export it again"


@standard_rule
def accuracy_level(graph: CheckedGraph) -> Iterator[str]:
    """Check that a graph that rounds inputs of products is otherwise the one that does not."""
    if graph.expected is None or not graph.expected.exact:
        return
    from attn_export.graph.accuracy_level import other_difference  # few graphs need it

    problem = other_difference(graph.proto, graph.path.with_name(graph.expected.exact))
    if problem:
        yield f"{problem}; build it again"


@project_rule
def ir_version(graph: CheckedGraph) -> Iterator[str]:
    """Check that the IR version is not newer than the opset needs."""
    opset = next((e.version for e in graph.proto.opset_import if not e.domain), 0)
    limit, version = _IR_LIMIT.get(opset), graph.proto.ir_version
    if limit is not None and version > limit:
        yield f"IR version {version} with opset {opset}, which goes with {limit}; lower it"


def _by_domain(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """Return the operators of a graph and its subgraphs, by domain, in order."""
    operators: dict[str, list[str]] = {}
    for node in _nodes(graph):
        names = operators.setdefault(node.domain, [])
        if node.op_type not in names:
            names.append(node.op_type)
    return operators


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from _nodes(inner)


# -- types, unused parts, metadata and files ----------------------------------------------------

SCALES = {"DequantizeLinear": 1, "QuantizeLinear": 1, "MatMulNBits": 2}
"""The index of the input that holds scales, by operator."""

_HOST_PATH = re.compile(
    r"(?:^|[\s\"'`(\[<{=:,;])"
    r"(?P<path>/(?:[\w.+@~-]+/)+[\w.+@~-]+|[A-Za-z]:[\\/][\w\\/.+@~-]+|\\\\[\w.-]+\\\S+|file://\S+)"
)


@project_rule
def no_float64(graph: CheckedGraph) -> Iterator[str]:
    """Check that no input and no output is float64, which few runtimes support.

    Within the graph, float64 is allowed to a user's module (a table of angles, for example), but
    not to attn-export's own.
    """
    model = graph.proto.graph
    ours = graph.expected is not None and graph.expected.ours
    for value in (*model.input, *model.output, *(model.value_info if ours else ())):
        if value.type.tensor_type.elem_type == TensorProto.DOUBLE:
            yield f"{value.name} is float64; convert the module with .float() before the export"
    if ours:
        yield from _float64_inside(model)


def _float64_inside(graph: onnx.GraphProto) -> Iterator[str]:
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.DOUBLE:
            yield f"the initializer {tensor.name} is float64; make it float32 in the module"
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.DOUBLE:
                yield f"{_name(node)} casts to float64; compute in float32 instead"
            elif attribute.t.data_type == TensorProto.DOUBLE:
                yield f"{_name(node)} holds float64; make it float32 in the module"


@standard_rule
def quantisation_scales(graph: CheckedGraph) -> Iterator[str]:
    """Check that the constant scales of quantised values are finite, and not 0 before a division.

    Quantisers write 0 for a block of zeros, and some write negative ones.
    """
    initializers = {tensor.name: tensor for tensor in graph.proto.graph.initializer}
    nodes = graph.proto.graph.node
    computed = {node.output[1] for node in nodes if node.op_type == "DynamicQuantizeLinear"}
    for node in nodes:
        scales = initializers.get(_scales(node, computed))
        if scales is None or scales.data_location == TensorProto.EXTERNAL:
            continue
        values = onnx.numpy_helper.to_array(scales).astype("float64")
        for problem, wrong in (
            ("not finite", ~np.isfinite(values)),
            ("0", (node.op_type == "QuantizeLinear") & (values == 0)),
        ):
            if wrong.any():
                yield (
                    f"{_name(node)}: {int(wrong.sum())} of {values.size} scales in {scales.name} "
                    f"are {problem}; quantise the weight again"
                )
                break


def _scales(node: onnx.NodeProto, computed: Set[str]) -> str:
    """Return the name of the scales that a node reads, or "".

    Scales that DynamicQuantizeLinear computes are multiplied with the constant one of the weight.
    """
    if node.op_type == "Mul" and not computed.isdisjoint(node.input):
        return next((name for name in node.input if name not in computed), "")
    return node.input[SCALES[node.op_type]] if node.op_type in SCALES else ""


@project_rule
def no_dead_nodes(graph: CheckedGraph) -> Iterator[str]:
    """Check that every node and every initialiser is used."""
    model, read = graph.proto.graph, names_read_in(graph.proto.graph)
    for node in model.node:
        if not read.intersection(filter(None, node.output)):
            yield f"the outputs of {_name(node)} are not used; remove it"
    for tensor in model.initializer:
        if tensor.name not in read:
            yield f"the initializer {tensor.name} is not used; remove it"


@project_rule
def no_unread_inputs(graph: CheckedGraph) -> Iterator[str]:
    """Check that every input is read: an export may have lost what a mask or positions do.

    A user's module may ignore an input, as its run in PyTorch then shows.
    """
    if graph.expected is not None and not graph.expected.ours:
        return
    model, read = graph.proto.graph, names_read_in(graph.proto.graph)
    for value in model.input:
        if value.name not in read:
            yield f"the input {value.name} is not read; export it again or remove it"


@project_rule
def no_duplicate_initializers(graph: CheckedGraph) -> Iterator[str]:
    """Check that no two initialisers have the same type, shape and values.

    Tensors in external data are compared by their place in the file.
    """
    seen: dict[tuple[object, ...], str] = {}
    for tensor in graph.proto.graph.initializer:
        key = (tensor.data_type, tuple(tensor.dims), _digest(tensor))
        if key in seen:
            yield f"{tensor.name} and {seen[key]} hold the same values; keep one of them"
        seen.setdefault(key, tensor.name)


@project_rule
def no_host_paths(graph: CheckedGraph) -> Iterator[str]:
    """Check that metadata and doc strings hold no path of the exporting machine."""
    for location, text in _texts(graph.proto):
        match = _HOST_PATH.search(text)
        if match:
            yield f"{location} holds the path {match['path']!r}; strip metadata and doc strings"


@standard_rule
def external_data(graph: CheckedGraph) -> Iterator[str]:
    """Check that external data lies inside the model's folder and is complete."""
    yield from external_problems(graph.proto, graph.path.parent)


def names_read_in(graph: onnx.GraphProto) -> set[str]:
    """Return the names that a graph and its subgraphs read, or give as outputs."""
    nodes = list(_nodes(graph))
    graphs = [graph, *(inner for node in nodes for inner in subgraphs(node))]
    outputs = {output.name for each in graphs for output in each.output}
    return outputs.union(*(node.input for node in nodes))


def _digest(tensor: TensorProto) -> object:
    if tensor.data_location == TensorProto.EXTERNAL:
        return tuple(sorted((entry.key, entry.value) for entry in tensor.external_data))
    raw = tensor.HasField("raw_data")
    data = tensor.raw_data if raw else onnx.numpy_helper.to_array(tensor).tobytes()
    return hashlib.sha256(data).digest()


def _texts(model: onnx.ModelProto) -> Iterator[tuple[str, str]]:
    """Yield doc strings and metadata of a model and its parts, with their location."""
    graph = model.graph
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    parts: list[tuple[str, Any]] = [("the model", model), ("the graph", graph)]
    parts += [(_name(node), node) for node in graph.node]
    parts += [(value.name, value) for value in values]
    for location, part in parts:
        yield f"the doc string of {location}", part.doc_string
        for entry in part.metadata_props:
            yield f"{entry.key} of {location}", entry.value


def _name(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else f"an unnamed {node.op_type}"


# -- all checks ---------------------------------------------------------------------------------

CHECKS = RULES
"""All checks in the order of their definitions, and whether each is a rule of this project."""


def check_graph(path: Path, expected: Expected | None = None) -> list[CheckFinding]:
    """Return the findings of every check on an ONNX file."""
    graph = CheckedGraph(load_proto(path), path, expected)
    return [finding for check in CHECKS for finding in _findings(check, graph)]


def _findings(check: Check, graph: CheckedGraph) -> list[CheckFinding]:
    try:
        warns = graph.expected is None and CHECKS[check]
        return [CheckFinding(check.__name__, message, warns) for message in check(graph)]
    except Exception as error:  # damaged files may raise anything, by names that are not UTF-8
        message = f"could not look at the graph ({one_line(error)}); it is damaged, export it again"
        return [CheckFinding(check.__name__, message)]
