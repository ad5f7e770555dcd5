"""Session options of ONNX Runtime for exact matrix products of 8-bit integers.

The Python kit ships this file.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Mapping
from pathlib import Path

_NO_KLEIDIAI = {"mlas.disable_kleidiai": "1"}
"""The entry that turns off KleidiAI's kernels for ARM. They use one scale for each row where the
graph has one for the tensor (DynamicQuantizeLinear and MatMulInteger as one node, with SME2) or one
for each block (MatMulNBits)."""

EXACT = {
    # With AVX2 and without VNNI, x86 kernels add two products in 16 bits, which can overflow.
    "session.x64quantprecision": "1",
    **_NO_KLEIDIAI,
}
"""The entries for exact sums in MatMulInteger."""

_ENTRIES: Mapping[bytes, Mapping[str, str]] = {
    b"MatMulInteger": EXACT,
    b"accuracy_level\x18\x04": _NO_KLEIDIAI,  # an attribute of MatMulNBits with the value 4
}
"""The entries that a graph needs if its file contains these bytes."""


def entries_for(graph: Path) -> dict[str, str]:
    """Return the configuration entries that make the integer products of this graph exact.

    They are not set for all graphs, because ONNX Runtime 1.31 fails with `x64quantprecision` on
    graphs in which int8 tensors have block scales. They are not set on CPUs that do not need them,
    because products of many rows take three times as long.
    """
    if not _may_be_inexact() or not graph.is_file() or not graph.stat().st_size:
        return {}
    with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        needed = [entries for name, entries in _ENTRIES.items() if data.find(name) >= 0]
    return {entry: value for entries in needed for entry, value in entries.items()}


def _may_be_inexact() -> bool:
    """Return whether products may be inexact on this CPU, which is so without AVX512-VNNI."""
    try:  # numpy reads the features from the CPU itself, which may be emulated
        core = importlib.import_module("numpy._core._multiarray_umath")
    except ImportError:
        return True
    return not getattr(core, "__cpu_features__", {}).get("AVX512VNNI", False)
