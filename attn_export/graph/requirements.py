"""Requirements of a graph on a runtime, as keys of support tables, and its least precision."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from attn_export.dialect_names import ORT, PORTABLE, STANDARD
from attn_export.graph.ir_helpers import dims, optional_input
from attn_export.graph.load import load_graph

ATTENTION = "Attention"
MASK = 3
OPTIONAL = {MASK: "mask", 4: "past", 6: "nonpad_kv_seqlen"}
"""Inputs of ai.onnx `Attention` that not every runtime has."""

ORDER = "LessOrEqual"

FLOAT32_LEVEL = 1
"""The accuracy level of MatMulNBits that keeps inputs in float32; 0 states none."""


def features(model: ir.Model) -> tuple[str, ...]:
    """Return the features that a graph uses, sorted.

    ``Softmax`` for an operator of ai.onnx, ``com.microsoft.GroupQueryAttention`` for another's;
    ``input FLOAT16`` for the types of inputs; ``value DOUBLE``; ``opset 24``. Of some operators
    also how they are used: ``Attention(past)``, ``Attention(is_causal)``, ``Attention(mask:
    BOOL)`` and, where that is no matter of sizes alone, so that it may hide all keys,
    ``Attention(given mask: BOOL)``; ``Range(total_len)``, with the axis that it is declared to
    have; ``LessOrEqual(of one Range)``, as for a causal mask without a past; ``Cast(to
    BFLOAT16)`` and ``Cast(FLOAT to FLOAT16)``; ``DequantizeLinear(INT4)``, with the type that it
    reads, and ``DequantizeLinear(blocks)``; ``Attention(BFLOAT16)``, with the type in which it
    computes where that is rare, and ``com.microsoft.GroupQueryAttention(FLOAT)`` in any case;
    ``com.microsoft.MatMulNBits(accuracy_level 4)``.
    """
    found = {f"opset {model.opset_imports['']}"}
    found |= {f"input {value.dtype.name}" for value in model.graph.inputs if value.dtype}
    for node in model.graph.all_nodes():
        domain = node.domain or ""
        name = f"{domain}.{node.op_type}" if domain else node.op_type
        found.add(name)
        if any(value.dtype == ir.DataType.DOUBLE for value in node.outputs):
            found.add("value DOUBLE")
        if name in USES:
            found |= {f"{name}({use})" for use in USES[name](node)}
    return tuple(sorted(found))


def _of_attention(node: ir.Node) -> set[str]:
    uses = set()
    for index, name in OPTIONAL.items():
        value = optional_input(node, index)
        if value is None:
            continue
        dtype = f": {value.dtype.name}" if index == MASK and value.dtype else ""
        uses.add(name + dtype)
        if index == MASK and depends_on_contents(value):
            uses.add(f"given {name}{dtype}")
    for name in ("is_causal", "softcap"):
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.value:
            uses.add(name)
    if len(node.outputs) > 3 and node.outputs[3].name:
        uses.add("qk_matmul_output")
    return uses | (_type_of_attention(node) & {"BFLOAT16"})


def _type_of_attention(node: ir.Node) -> set[str]:
    values = (*node.outputs[:1], *node.inputs[:3])  # of some, the type is not known
    dtypes = (value.dtype for value in values if value is not None and value.dtype is not None)
    return {dtype.name for dtype in dtypes}


def _of_range(node: ir.Node) -> set[str]:
    axes = [size.value for size in dims(node.outputs[0]) if isinstance(size, ir.SymbolicDim)]
    return {axis for axis in axes if axis}


def _of_order(node: ir.Node) -> set[str]:
    sources = [_before_unsqueeze(value) for value in node.inputs if value is not None]
    made = sources[0].producer() if sources else None
    same = made is not None and made.op_type == "Range" and len(set(sources)) == 1
    return {"of one Range"} if same else set()


def _of_cast(node: ir.Node) -> set[str]:
    to, source = ir.DataType(node.attributes.get_int("to", 0)), node.inputs[0]
    if to == ir.DataType.FLOAT16 and source is not None and source.dtype == ir.DataType.FLOAT:
        return {"FLOAT to FLOAT16"}
    return {"to BFLOAT16"} if to == ir.DataType.BFLOAT16 else set()


def _of_grouped_queries(node: ir.Node) -> set[str]:
    named = {12: "k_scale", 14: "q_norm_weight"}
    uses = {name for index, name in named.items() if optional_input(node, index) is not None}
    return uses | _type_of_attention(node)


def _of_dequantisation(node: ir.Node) -> set[str]:
    read = node.inputs[0]
    dtype = {read.dtype.name} if read is not None and read.dtype else set()
    return dtype | ({"blocks"} if node.attributes.get_int("block_size", 0) else set())


def _of_packed_weights(node: ir.Node) -> set[str]:
    """Return the accuracy level where inputs may be rounded: not every engine does it."""
    level = node.attributes.get_int("accuracy_level", 0)
    return {f"accuracy_level {level}"} if level > FLOAT32_LEVEL else set()


USES = {
    ATTENTION: _of_attention, "Cast": _of_cast, "DequantizeLinear": _of_dequantisation,
    "Range": _of_range, ORDER: _of_order,
    "com.microsoft.GroupQueryAttention": _of_grouped_queries,
    "com.microsoft.MatMulNBits": _of_packed_weights,
}  # fmt: skip


def _before_unsqueeze(value: ir.Value) -> ir.Value:
    node = value.producer()
    while node is not None and node.op_type == "Unsqueeze" and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def depends_on_contents(value: ir.Value) -> bool:
    """Return whether a value depends on the contents of an input, not on sizes alone."""
    values, seen = [value], {value}
    while values:
        value = values.pop()
        node = value.producer()
        if node is None:
            if value.is_graph_input():
                return True
        elif node.op_type != "Shape":
            new = {each for each in node.inputs if each is not None} - seen
            values += new
            seen |= new
    return False


PORTABLE_UP_TO = 18
"""The newest opset whose operators every runtime has."""

MICROSOFT = "com.microsoft"
EPS = {onnx.TensorProto.FLOAT16: 2.0**-10, onnx.TensorProto.BFLOAT16: 2.0**-7}
QUANTISED = frozenset({
    "DequantizeLinear", "DynamicQuantizeLinear", "GatherBlockQuantized", "MatMulInteger",
    "MatMulNBits", "QLinearMatMul", "QuantizeLinear",
})  # fmt: skip


def foreign_features(path: str) -> list[str]:
    """Return the features of the graph in a file, as `features` names them."""
    return list(features(load_graph(Path(path))))


def dialect_of(found: tuple[str, ...]) -> str:
    """Return the dialect that a graph comes closest to, by its features."""
    if any(name.startswith(f"{MICROSOFT}.") for name in found):
        return ORT
    opsets = [int(name.split()[1]) for name in found if name.startswith("opset ")]
    plain = "Attention" not in found and all(opset <= PORTABLE_UP_TO for opset in opsets)
    return PORTABLE if plain else STANDARD


def least_eps(model: onnx.ModelProto) -> float:
    """Return the eps of the narrowest type that a graph of float32 outputs casts to, or 0."""
    outputs = {output.type.tensor_type.elem_type for output in model.graph.output}
    if outputs & EPS.keys():
        return 0.0  # its outputs state their type themselves
    casts = {a.i for n in model.graph.node if n.op_type == "Cast" for a in n.attribute}
    return max((EPS[code] for code in casts & EPS.keys()), default=0.0)


def precision_notes(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return notes for the reader on a graph that computes in fewer bits than its outputs have."""
    notes = []
    if least_eps(model):
        notes.append(
            "the graph computes in fewer bits than its outputs have: the error allowed is that of "
            "the narrower type"
        )
    quantised = sorted({node.op_type for node in model.graph.node} & QUANTISED)
    if quantised:
        notes.append(
            f"the graph quantises ({', '.join(quantised)}); the error allowed is that of rounding "
            "to its floating types alone"
        )
    return tuple(notes)
