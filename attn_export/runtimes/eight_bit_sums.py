"""Options of ONNX Runtime for exact products of 8-bit integers, where they are needed.

The Python kit ships this file.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Mapping
from pathlib import Path

BY_ROW = {"mlas.disable_kleidiai": "1"}
"""The entry of the session's configuration against kernels of KleidiAI for ARM that take a scale
for each row, not for the tensor (DynamicQuantizeLinear and MatMulInteger as one node, with SME2) or
for the block (MatMulNBits)."""

EXACT = {
    # x86 with AVX2 and without VNNI adds two products in 16 bits, which overflow.
    "session.x64quantprecision": "1",
    **BY_ROW,
}

ENTRIES: Mapping[bytes, Mapping[str, str]] = {
    b"MatMulInteger": EXACT,
    b"accuracy_level\x18\x04": BY_ROW,  # the attribute of MatMulNBits, of protobuf's int 4
}
"""The entries for graphs whose files have these bytes."""


def entries_for(graph: Path) -> dict[str, str]:
    """Return the entries of a session's configuration that make products of this graph exact.

    They are not for all graphs: ONNX Runtime 1.31 fails with `x64quantprecision` where int8 has
    scales of blocks. Nor are they for all processors: products of many rows take three times as
    long.
    """
    if not _may_be_inexact() or not graph.is_file() or not graph.stat().st_size:
        return {}
    with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        found = [entries for name, entries in ENTRIES.items() if held.find(name) >= 0]
    return {entry: value for entries in found for entry, value in entries.items()}


def _may_be_inexact() -> bool:
    """Return whether products may be inexact: where there is no AVX512-VNNI."""
    try:  # numpy asks the processor, which may be an emulated one
        core = importlib.import_module("numpy._core._multiarray_umath")
    except ImportError:
        return True
    return not getattr(core, "__cpu_features__", {}).get("AVX512VNNI", False)
