"""Names of the dialects, and of the files of their graphs and weights."""

from __future__ import annotations

from collections.abc import Iterable

from attn_export.errors import UsageError, choose

STANDARD, PORTABLE, ORT, CUDA = DIALECTS = ("standard", "portable", "ort", "cuda")
"""The dialects of graphs: ai.onnx with `Attention`; opset 18 without it; ONNX Runtime's operators
that are fastest on the CPU; and those that are fastest in half precision on CUDA."""

EXACT_PHASE = "level1"
"""The end of the phase of a graph whose products round no inputs, beside one whose products do."""

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

MODEL = "model.onnx"
"""The file name of the graph in the standard dialect. `graph_name` derives the other names from
it."""

ORT_NEEDED = "1.28"
"""The first release of ONNX Runtime whose CPU kernel of `Attention` passes every case. Measured on
1.22 to 1.31: 1.22 lacks the opset; 1.23 to 1.27 return NaN or uninitialised numbers for a fully
masked row."""

LINEAR_OPSET, ORT_OF_LINEAR = 27, "1.32"
"""The first opset with `LinearAttention`, and the first release of ONNX Runtime that loads it."""

WEIGHTS = "weights.safetensors"
"""The file of a bundle with the weights that are not embedded in a graph."""

QUANTISED = frozenset({
    "ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul",
    "GatherBlockQuantized", "MatMulBnb4", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits",
    "QAttention", "QGemm", "QLinearConv", "QLinearMatMul", "QMoE", "QuantizeLinear",
})  # fmt: skip
"""Operators of quantised values."""


def check_dialects(names: Iterable[str], *also: str) -> tuple[str, ...]:
    """Return names of dialects without repetition, and refuse unknown ones."""
    names, allowed = tuple(dict.fromkeys(names)), (*DIALECTS, *also)
    for name in names:
        if name not in allowed:
            raise UsageError(f"unknown dialect {name!r}; {choose(name, allowed)}")
    return names


def graph_name(dialect: str, phase: str = "") -> str:
    """Return the file name of a graph of a bundle: ``model.onnx``, ``model.ort.decode.onnx``."""
    stem, suffix = MODEL.split(".")
    return ".".join(filter(None, [stem, "" if dialect == STANDARD else dialect, phase, suffix]))


def phase_of(name: str) -> str:
    """Return the phase in the file name of a graph of a bundle; "" for a graph of any phase."""
    return next((part for part in name.split(".")[1:-1] if part not in DIALECTS), "")


def dialect_of(name: str) -> str:
    """Return the dialect in the file name of a graph of a bundle."""
    return next((part for part in name.split(".")[1:-1] if part in DIALECTS), STANDARD)
