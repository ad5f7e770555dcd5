"""Properties of a graph of any origin that decide where it can run, and how exactly."""

from __future__ import annotations

from pathlib import Path

import onnx

from attn_export.dialect_names import ORT, PORTABLE, STANDARD
from attn_export.graph.load import load_graph
from attn_export.graph.requirements import features

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
