"""Checks that all operators belong to the dialect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx

from attn_export.graph.checks.model import Checked

OPSETS = {"standard": (23, 24), "portable": (18,), "ort": (23, 24)}
"""Of ai.onnx, by dialect."""

ATTENTION_SINCE = 23
IR_LIMIT = {18: 8, 23: 11, 24: 12}
"""The newest IR version that belongs to an opset; a newer one shuts out runtimes for nothing."""

OWN_OPERATORS = frozenset(
    {
        "Abs", "Add", "And", "Attention", "Cast", "Clip", "Concat", "ConstantOfShape", "Cos",
        "Div", "Equal", "Expand", "Gather", "Greater", "GreaterOrEqual", "LayerNormalization",
        "LessOrEqual", "MatMul", "Max", "Mul", "Neg", "Pow", "RMSNormalization", "Range",
        "ReduceMax", "Reshape", "Shape", "Sin", "Slice", "Split", "Squeeze", "Sub", "Transpose",
        "TensorScatter", "Trilu", "Unsqueeze", "Where",
    }
)  # fmt: skip
"""What our own module exports to in the standard dialect."""

PORTABLE_OPERATORS = (OWN_OPERATORS - {"Attention", "RMSNormalization", "TensorScatter"}) | {
    "Identity", "Less", "Pad", "ReduceMean", "ScatterND", "Softmax", "Sqrt", "Tanh",
}  # fmt: skip

ORT_OPERATORS = OWN_OPERATORS | PORTABLE_OPERATORS | {
    "GroupQueryAttention", "If", "MultiHeadAttention", "Or",
}  # fmt: skip

OPERATORS = {"standard": OWN_OPERATORS, "portable": PORTABLE_OPERATORS, "ort": ORT_OPERATORS}
"""What our own module becomes, by dialect."""

DOMAINS = {"ort": ("", "ai.onnx", "com.microsoft")}
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


def opset_and_ir(graph: Checked) -> Iterator[str]:
    """Check that the target supports the versions, and that these have the operators in use."""
    opsets = {entry.domain or "ai.onnx": entry.version for entry in graph.proto.opset_import}
    opset, ir_version = opsets.get("ai.onnx", 0), graph.proto.ir_version
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        yield f"opset {opset} is newer than onnx {onnx.__version__} knows ({newest}); export lower"
    uses_attention = "Attention" in _by_domain(graph.proto).get("", ())
    if uses_attention and opset < ATTENTION_SINCE:
        yield f"Attention at opset {opset}, which has none; declare opset {ATTENTION_SINCE}"
    wanted = OPSETS[graph.expected.dialect] if graph.expected is not None else (opset,)
    if graph.expected is not None and opset not in wanted:
        yield f"opset {opset}, the {graph.expected.dialect} dialect has {wanted}; export it again"
    limit = IR_LIMIT.get(opset)
    if limit is not None and ir_version > limit:
        yield f"IR version {ir_version} with opset {opset}, which goes with {limit}; lower it"


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
