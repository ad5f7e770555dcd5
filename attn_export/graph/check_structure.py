"""Checks of ONNX validity, of shapes, dynamic axes and operators, and the model that they read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import onnx

from attn_export.dialect_names import CUDA, ORT, PORTABLE, STANDARD
from attn_export.errors import one_line
from attn_export.results import GraphFile
from attn_export.spec import Shape


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected properties of a graph; read from a spec or a manifest.

    Attributes:
        inputs: Name and shape of every input; dynamic axes by name.
        outputs: Name and shape of every output.
        dialect: One of `DIALECTS`.
        attentions: The required number of `Attention` nodes; None if unknown.
        ours: Whether the graph is of our own module, whose operators are all known.
    """

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    dialect: str = STANDARD
    attentions: int | None = None
    ours: bool = False


def expected_of(file: GraphFile, whole: Expected) -> Expected:
    """Return the expected properties of one graph of a bundle.

    Args:
        file: The differences of the graph from the signature.
        whole: The expected properties of the graph in the standard dialect.
    """

    def own(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        found = {}
        for name, shape in shapes.items():
            fixed = [file.fixed.get(str(axis), axis) for axis in shape]
            found[name] = tuple(fixed[axis] for axis in file.layouts.get(name, range(len(fixed))))
        return found

    return dataclasses.replace(
        whole,
        inputs=own(whole.inputs),
        outputs=own(whole.outputs),
        dialect=file.dialect,
        attentions=whole.attentions if file.dialect == STANDARD else None,
    )


@dataclasses.dataclass(frozen=True)
class Checked:
    """A graph under check.

    Attributes:
        proto: Without external data.
        path: The file; its external data is beside it.
        expected: The expected properties; None for a file of unknown origin.
    """

    proto: onnx.ModelProto
    path: Path
    expected: Expected | None


@dataclasses.dataclass(frozen=True)
class CheckFinding:
    """Something wrong with a graph.

    Attributes:
        check: The name of the check.
        message: The description and the remedy.
        is_warning: Whether the ONNX standard allows it.
    """

    check: str
    message: str
    is_warning: bool = False


Check = Callable[[Checked], Iterator[str]]


def shape_of(value: onnx.ValueInfoProto) -> Shape | None:
    """Return the declared shape: sizes, names, or "" for an axis without either."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param
        for dim in value.type.tensor_type.shape.dim
    )


def show(shape: Shape | None) -> str:
    """Format a shape as text."""
    return "unknown" if shape is None else f"[{', '.join(str(axis) or '?' for axis in shape)}]"


# -- checks that the dynamic axes are dynamic, under one name each ------------------------------


def signature(graph: Checked) -> Iterator[str]:
    """Check names and order of inputs and outputs against the expected ones."""
    if graph.expected is None:
        return
    for what, values, wanted in (
        ("inputs", graph.proto.graph.input, list(graph.expected.inputs)),
        ("outputs", graph.proto.graph.output, list(graph.expected.outputs)),
    ):
        names = [value.name for value in values]
        if names != wanted:
            yield f"{what} are {', '.join(names)}, expected {', '.join(wanted)}; export it again"


def dynamic_axes(graph: Checked) -> Iterator[str]:
    """Check that every expected dynamic axis is dynamic, under its one name, up to the outputs."""
    if graph.expected is None:
        return
    wanted = {**graph.expected.inputs, **graph.expected.outputs}
    for value in (*graph.proto.graph.input, *graph.proto.graph.output):
        shape, expected = shape_of(value), wanted.get(value.name)
        if expected is None:
            continue
        if shape is None or len(shape) != len(expected):
            yield f"{value.name} is {show(shape)}, expected {show(expected)}; export it again"
            continue
        for axis, (got, want) in enumerate(zip(shape, expected, strict=True)):
            if got == want or want == "":  # "" where the maker did not name it either
                continue
            where = f"axis {axis} of {value.name}"
            if isinstance(want, str) and isinstance(got, int):
                yield f"{where} is fixed at {got}, expected the dynamic axis {want!r}; name it"
            elif isinstance(want, int) and isinstance(got, int):
                yield f"{where} is {got}, expected {want}; export it again"
            else:
                yield f"{where} is {got or '?'!r}, expected {want!r}; rename it"


def named_axes(graph: Checked) -> Iterator[str]:
    """Check that every axis of inputs and outputs has a size or name; runtimes need it."""
    for value in (*graph.proto.graph.input, *graph.proto.graph.output):
        shape = shape_of(value)
        if shape is None:
            yield f"{value.name} has no declared shape; declare it, dynamic axes by name"
        elif "" in shape:
            yield f"axis {shape.index('')} of {value.name} has neither size nor name; name it"


# -- checks that all operators belong to the dialect --------------------------------------------

OPSETS = {STANDARD: (23, 24), PORTABLE: (18,), ORT: (23, 24), CUDA: (23, 24)}
"""Opsets of ai.onnx that a graph may import, by dialect."""

ATTENTION_SINCE = 23
IR_LIMIT = {18: 8, 23: 11, 24: 12}
"""The newest IR version that belongs to an opset; a newer one shuts out runtimes for nothing."""

OWN_OPERATORS = frozenset(
    {
        "Abs", "Add", "And", "Attention", "Cast", "Clip", "Concat", "ConstantOfShape", "Cos",
        "DequantizeLinear", "Div", "DynamicQuantizeLinear", "Equal", "Expand", "Gather", "Greater",
        "GreaterOrEqual", "LayerNormalization", "Less", "LessOrEqual", "MatMul", "MatMulInteger",
        "Max", "Min", "Mul", "Neg", "Pow", "QuantizeLinear", "RMSNormalization", "Range",
        "ReduceMax", "ReduceMin", "ReduceSum", "Reshape", "Round", "Shape", "Sin", "Slice", "Split",
        "Squeeze", "Sub", "Transpose", "TensorScatter", "Trilu", "Unsqueeze", "Where",
    }
)  # fmt: skip
"""Operators to which our own module exports in the standard dialect."""

PORTABLE_OPERATORS = (OWN_OPERATORS - {"Attention", "RMSNormalization", "TensorScatter"}) | {
    "Identity", "Pad", "ReduceMean", "ScatterND", "Softmax", "Sqrt", "Tanh",
}  # fmt: skip

ORT_OPERATORS = OWN_OPERATORS | PORTABLE_OPERATORS | {
    "GroupQueryAttention", "If", "MatMulNBits", "MultiHeadAttention", "Or",
}  # fmt: skip

OPERATORS = {
    STANDARD: OWN_OPERATORS, PORTABLE: PORTABLE_OPERATORS, ORT: ORT_OPERATORS,
    CUDA: OWN_OPERATORS | {"GroupQueryAttention"},
}  # fmt: skip
"""Operators of our own module, by dialect."""

DOMAINS = dict.fromkeys((ORT, CUDA), ("", "ai.onnx", "com.microsoft"))
"""Whose operators a dialect has; by default those of ONNX."""


def attention_count(graph: Checked) -> Iterator[str]:
    """Check that there is one `Attention` node for each attention, and none was decomposed."""
    if graph.expected is None or graph.expected.attentions is None:
        return
    counts = Counter(node.op_type for node in graph.proto.graph.node)
    wanted = graph.expected.attentions
    if counts["Attention"] != wanted:
        yield f"{counts['Attention']} Attention nodes, expected {wanted}; export it again"
    if counts["Softmax"]:
        yield f"{counts['Softmax']} Softmax nodes: attention was taken apart; export it again"


def expected_operators(graph: Checked) -> Iterator[str]:
    """Check that all operators belong to the dialect."""
    if graph.expected is None:
        return
    dialect = graph.expected.dialect
    for domain, names in sorted(_by_domain(graph.proto).items()):
        if domain not in DOMAINS.get(dialect, ("", "ai.onnx")):
            yield f"{', '.join(names)} of {domain}: not in the {dialect} dialect; lower it"
        elif graph.expected.ours:
            strange = [name for name in names if name not in OPERATORS[dialect]]
            if strange:
                yield f"{', '.join(strange)}: not an operator of this module; export it again"


def opset_version(graph: Checked) -> Iterator[str]:
    """Check that the target supports the opset, and that it has the operators in use."""
    opsets = {entry.domain or "ai.onnx": entry.version for entry in graph.proto.opset_import}
    opset = opsets.get("ai.onnx", 0)
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        yield f"opset {opset} is newer than onnx {onnx.__version__} knows ({newest}); export lower"
    if opset < ATTENTION_SINCE and "Attention" in _by_domain(graph.proto).get("", ()):
        yield f"Attention at opset {opset}, which has none; declare opset {ATTENTION_SINCE}"
    dialect = None if graph.expected is None else graph.expected.dialect
    if dialect is not None and opset not in OPSETS[dialect]:
        yield f"opset {opset}, the {dialect} dialect has {OPSETS[dialect]}; export it again"


def ir_version(graph: Checked) -> Iterator[str]:
    """Check that the IR version is none that shuts out runtimes which have the opset."""
    opset = next((e.version for e in graph.proto.opset_import if not e.domain), 0)
    limit, found = IR_LIMIT.get(opset), graph.proto.ir_version
    if limit is not None and found > limit:
        yield f"IR version {found} with opset {opset}, which goes with {limit}; lower it"


def _by_domain(model: onnx.ModelProto) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for node in _nodes(model.graph):
        names = found.setdefault(node.domain, [])
        if node.op_type not in names:
            names.append(node.op_type)
    return found


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph, and of the branches within them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


# -- checks of ONNX validity, and of declared against produced shapes ---------------------------


def onnx_checker(graph: Checked) -> Iterator[str]:
    """Run the full onnx checker."""
    try:
        # By path, since it also looks at external data; a model over 2 GiB has no other way.
        onnx.checker.check_model(str(graph.path), full_check=True)
    except onnx.shape_inference.InferenceError as error:
        yield f"shapes do not fit: {one_line(error)}; mend the node or the declared shape"
    except Exception as error:  # its own, and what damaged files make of it
        yield f"{one_line(error)}; export it again or mend the node"


def strict_shape_inference(graph: Checked) -> Iterator[str]:
    """Run shape inference that stops at the first operator that it cannot infer."""
    try:
        onnx.shape_inference.infer_shapes(
            graph.proto, check_type=True, strict_mode=True, data_prop=True
        )
    except Exception as error:  # its own, and what damaged files make of it
        yield f"{one_line(error)}; mend the node's inputs or attributes"


def declared_shapes(graph: Checked) -> Iterator[str]:
    """Compare declared shapes with inferred ones; an axis declared 0 passes the checker."""
    bare = onnx.ModelProto()
    bare.CopyFrom(graph.proto)
    del bare.graph.value_info[:]
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    except Exception:
        return  # `strict_shape_inference` says so.
    produced = {v.name: shape_of(v) for v in (*inferred.graph.value_info, *inferred.graph.output)}
    values = (*graph.proto.graph.input, *graph.proto.graph.value_info, *graph.proto.graph.output)
    held = {tensor.name for tensor in graph.proto.graph.initializer}  # may well be empty
    for value in values:
        if value.name in held:
            continue
        declared, found = shape_of(value), produced.get(value.name)
        if declared is None:
            continue
        if 0 in declared:
            yield f"{value.name} is declared {show(declared)}: no tensor has an axis of 0; name it"
        elif found is not None and not _agree(declared, found):
            yield f"{value.name} is declared {show(declared)} but is {show(found)}; declare that"


def _agree(declared: Shape, found: Shape) -> bool:
    # A declared size has to be the inferred one. A declared name may be another one, or stand for
    # what inference cannot work out ("" or unk__N; 0 for an unknown total length of `Attention`).
    sizes = zip(declared, found, strict=False)
    return len(declared) == len(found) and all(
        d == f or not f or str(f).startswith("unk__") for d, f in sizes if isinstance(d, int)
    )
