"""Checks of ONNX validity, shapes, dynamic axes and operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx

from attn_export.dialect_names import CUDA, MICROSOFT, ORT, PORTABLE, STANDARD
from attn_export.errors import one_line
from attn_export.graph.checked_graph import MOST_ELEMENTS, CheckedGraph, shape_of, show
from attn_export.graph.load import subgraphs
from attn_export.spec import Shape


def signature(graph: CheckedGraph) -> Iterator[str]:
    """Check names and order of inputs and outputs against the expected ones."""
    if graph.expected is None:
        return
    for label, values, expected in (
        ("inputs", graph.proto.graph.input, list(graph.expected.inputs)),
        ("outputs", graph.proto.graph.output, list(graph.expected.outputs)),
    ):
        names = [value.name for value in values]
        if names != expected:
            yield f"{label} are {', '.join(names)}, expected {', '.join(expected)}; export it again"


def dynamic_axes(graph: CheckedGraph) -> Iterator[str]:
    """Check that the axes of inputs and outputs have the expected sizes and names."""
    if graph.expected is None:
        return
    all_expected = {**graph.expected.inputs, **graph.expected.outputs}
    for value in (*graph.proto.graph.input, *graph.proto.graph.output):
        shape, expected = shape_of(value), all_expected.get(value.name)
        if expected is None:
            continue
        if shape is None or len(shape) != len(expected):
            yield f"{value.name} is {show(shape)}, expected {show(expected)}; export it again"
            continue
        for axis, (actual, wanted) in enumerate(zip(shape, expected, strict=True)):
            if actual == wanted or wanted == "":  # "" expects no name
                continue
            place = f"axis {axis} of {value.name}"
            if isinstance(wanted, str) and isinstance(actual, int):
                yield f"{place} is fixed at {actual}, expected the dynamic axis {wanted!r}; name it"
            elif isinstance(wanted, int) and isinstance(actual, int):
                yield f"{place} is {actual}, expected {wanted}; export it again"
            else:
                yield f"{place} is {actual or '?'!r}, expected {wanted!r}; rename it"


def named_axes(graph: CheckedGraph) -> Iterator[str]:
    """Check that every axis of inputs and outputs has a size or a name."""
    for value in (*graph.proto.graph.input, *graph.proto.graph.output):
        shape = shape_of(value)
        if shape is None:
            yield f"{value.name} has no declared shape; declare it, dynamic axes by name"
        elif "" in shape:
            yield f"axis {shape.index('')} of {value.name} has neither size nor name; name it"


# -- operators and opsets -----------------------------------------------------------------------

OPSETS = {STANDARD: (23, 24), PORTABLE: (18,), ORT: (23, 24), CUDA: (23, 24)}
"""Opsets of ai.onnx that a graph may import, by dialect."""

ATTENTION_SINCE = 23
IR_LIMIT = {18: 8, 23: 11, 24: 12}
"""The IR version that belongs to an opset. A newer one excludes older runtimes without need."""

OWN_OPERATORS = frozenset({
    "Abs", "Add", "And", "Attention", "Cast", "Clip", "Concat", "ConstantOfShape", "Cos",
    "DequantizeLinear", "Div", "DynamicQuantizeLinear", "Equal", "Expand", "Gather", "Greater",
    "GreaterOrEqual", "LayerNormalization", "Less", "LessOrEqual", "MatMul", "MatMulInteger",
    "Max", "Min", "Mul", "Neg", "Pow", "QuantizeLinear", "RMSNormalization", "Range",
    "ReduceMax", "ReduceMin", "ReduceSum", "Reshape", "Round", "Shape", "Sin", "Slice", "Split",
    "Squeeze", "Sub", "Transpose", "TensorScatter", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators of graphs of attn-export's own module in the standard dialect."""

PORTABLE_OPERATORS = (OWN_OPERATORS - {"Attention", "RMSNormalization", "TensorScatter"}) | {
    "Identity", "Not", "Pad", "ReduceMean", "ScatterND", "Softmax", "Sqrt", "Tanh",
}  # fmt: skip

ORT_OPERATORS = OWN_OPERATORS | PORTABLE_OPERATORS | {
    "GroupQueryAttention", "If", "MatMulNBits", "MultiHeadAttention", "Or",
}  # fmt: skip

OPERATORS = {
    STANDARD: OWN_OPERATORS, PORTABLE: PORTABLE_OPERATORS, ORT: ORT_OPERATORS,
    CUDA: OWN_OPERATORS | {"GroupQueryAttention"},
}  # fmt: skip
"""Operators of graphs of attn-export's own module, by dialect."""

DOMAINS = dict.fromkeys((ORT, CUDA), ("", "ai.onnx", MICROSOFT))
"""Operator domains that a dialect allows; by default only that of ONNX."""


def attention_count(graph: CheckedGraph) -> Iterator[str]:
    """Check that there is one `Attention` node for each attention, and no Softmax."""
    if graph.expected is None or graph.expected.attentions is None:
        return
    counts = Counter(node.op_type for node in graph.proto.graph.node)
    wanted = graph.expected.attentions
    if counts["Attention"] != wanted:
        yield f"{counts['Attention']} Attention nodes, expected {wanted}; export it again"
    if counts["Softmax"]:
        yield f"{counts['Softmax']} Softmax nodes: attention was taken apart; export it again"


def expected_operators(graph: CheckedGraph) -> Iterator[str]:
    """Check that all operators belong to the dialect."""
    if graph.expected is None:
        return
    dialect = graph.expected.dialect
    for domain, names in sorted(_by_domain(graph.proto.graph).items()):
        if domain not in DOMAINS.get(dialect, ("", "ai.onnx")):
            yield f"{', '.join(names)} of {domain}: not in the {dialect} dialect; lower it"
        elif graph.expected.ours:
            strange = [name for name in names if name not in OPERATORS[dialect]]
            if strange:
                yield f"{', '.join(strange)}: not an operator of this module; export it again"


def opset_version(graph: CheckedGraph) -> Iterator[str]:
    """Check that onnx and the dialect support the opset, and that the opset has `Attention`."""
    opsets = {entry.domain or "ai.onnx": entry.version for entry in graph.proto.opset_import}
    opset = opsets.get("ai.onnx", 0)
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        yield f"opset {opset} is newer than onnx {onnx.__version__} knows ({newest}); export lower"
    if opset < ATTENTION_SINCE and "Attention" in _by_domain(graph.proto.graph).get("", ()):
        yield f"Attention at opset {opset}, which has none; declare opset {ATTENTION_SINCE}"
    dialect = None if graph.expected is None else graph.expected.dialect
    if dialect is not None and opset not in OPSETS[dialect]:
        yield f"opset {opset}, the {dialect} dialect has {OPSETS[dialect]}; export it again"


def ir_version(graph: CheckedGraph) -> Iterator[str]:
    """Check that the IR version is not newer than the opset needs."""
    opset = next((e.version for e in graph.proto.opset_import if not e.domain), 0)
    limit, version = IR_LIMIT.get(opset), graph.proto.ir_version
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


# -- ONNX validity and declared shapes ----------------------------------------------------------


def onnx_checker(graph: CheckedGraph) -> Iterator[str]:
    """Run the full onnx checker."""
    try:
        # By path: only so are external data, and models over 2 GiB, checked.
        onnx.checker.check_model(str(graph.path), full_check=True)
    except onnx.shape_inference.InferenceError as error:
        yield f"shapes do not fit: {one_line(error)}; correct the node or the declared shape"
    except Exception as error:  # its own, and what damaged files make of it
        yield f"{one_line(error)}; export it again or correct the node"


def strict_shape_inference(graph: CheckedGraph) -> Iterator[str]:
    """Run shape inference in strict mode, which fails at the first operator it cannot infer."""
    try:
        graph.infer(graph.proto, check_type=True, strict_mode=True)
    except Exception as error:  # its own, and what damaged files make of it
        yield f"{one_line(error)}; correct the node's inputs or attributes"


def value_sizes(graph: CheckedGraph) -> Iterator[str]:
    """Check that no value of a known size has more elements than any memory holds."""
    for name, count in graph.sizes.items():
        if count > MOST_ELEMENTS:
            yield f"{name} has {count} elements, which no memory holds; correct what gives its size"


def declared_shapes(graph: CheckedGraph) -> Iterator[str]:
    """Compare declared shapes with inferred ones."""
    for name, declared, found in graph.shapes:
        if found is not None and not _agree(declared, found):
            yield f"{name} is declared {show(declared)} but is {show(found)}; declare that"


def empty_axes(graph: CheckedGraph) -> Iterator[str]:
    """Check that axes are declared 0 only where inference gives 0: some exporters mean "any"."""
    for name, declared, found in graph.shapes:
        if 0 in declared and not (found and 0 in found):
            yield f"{name} is declared {show(declared)}: no tensor has an axis of 0; name it"


def _agree(declared: Shape, inferred: Shape) -> bool:
    # A declared size must equal the inferred one, unless inference cannot determine it: "", unk__N,
    # or 0 for an unknown total length of `Attention`. A declared name agrees with anything.
    sizes = zip(declared, inferred, strict=False)
    return len(declared) == len(inferred) and all(
        d == f or not f or str(f).startswith("unk__") for d, f in sizes if isinstance(d, int)
    )
