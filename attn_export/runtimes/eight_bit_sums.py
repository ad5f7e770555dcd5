"""Options of ONNX Runtime for exact products of 8-bit integers, where they are needed.

The Python kit ships this file.
"""

from __future__ import annotations

import importlib
import mmap
from pathlib import Path

EXACT = {
    # x86 with AVX2 and without VNNI adds two products in 16 bits, which overflow.
    "session.x64quantprecision": "1",
    # KleidiAI's kernel for ARM with SME2 takes a scale for each row, not for the tensor, where
    # DynamicQuantizeLinear and MatMulInteger are one node.
    "mlas.disable_kleidiai": "1",
}
"""Entries of the session's configuration."""


def entries_for(graph: Path) -> dict[str, str]:
    """Return the entries of a session's configuration that make products of this graph exact.

    They are not for all graphs: ONNX Runtime 1.31 fails with the first where int8 has scales of
    blocks. Nor are they for all processors: products of many rows take three times as long.
    """
    return EXACT if _may_be_inexact() and _multiplies_integers(graph) else {}


def _may_be_inexact() -> bool:
    """Return whether products may be inexact: where there is no AVX512-VNNI."""
    try:  # numpy asks the processor, which may be an emulated one
        core = importlib.import_module("numpy._core._multiarray_umath")
    except ImportError:
        return True
    return not getattr(core, "__cpu_features__", {}).get("AVX512VNNI", False)


def _multiplies_integers(graph: Path) -> bool:
    """Return whether the file of a graph names an operator that multiplies integers."""
    if not graph.is_file() or not graph.stat().st_size:
        return False
    with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        return held.find(b"MatMulInteger") >= 0
