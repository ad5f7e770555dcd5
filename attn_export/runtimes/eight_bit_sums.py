"""The option of ONNX Runtime that makes products of 8-bit integers exact, where it is needed.

The Python kit ships this file.
"""

from __future__ import annotations

import importlib
import mmap
from pathlib import Path

EXACT = ("session.x64quantprecision", "1")
"""The entry of the session's configuration."""


def needs_exact_sums(graph: Path) -> bool:
    """Return whether ONNX Runtime would cut sums of products of this graph off without `EXACT`.

    The option is not for all graphs: ONNX Runtime 1.31 fails with it where int8 has scales of
    blocks. Nor is it for all processors: products of many rows take three times as long.
    """
    return _cuts_sums_off() and _multiplies_integers(graph)


def _cuts_sums_off() -> bool:
    """Return whether sums of two products may be cut off: where x86 has AVX2 and no VNNI."""
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
