"""Rooflines: how fast this machine multiplies matrices, and how fast it reads memory.

Each is tried in PyTorch and in ONNX Runtime, as candidates of the same interleaved run; the
better one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from attn_export.bench.feeds import Feed
from attn_export.bench.handmade_graphs import save_gemm, save_read
from attn_export.bench.measurements import Candidate, Cost
from attn_export.system_info import missing_package

LARGE = 2048
"""M, K and N of a GEMM that is large enough to be as fast as any."""

READ_MIB = 512
"""Well beyond the last cache of most processors."""

ROWS = 64
"""ONNX Runtime sums rows in parallel."""


def gemm_rooflines(folder: Path, sizes: Sequence[int] = (LARGE, LARGE, LARGE)) -> list[Candidate]:
    """Return a product [M, K] x [K, N] as candidates in both libraries.

    Args:
        folder: The folder to write the graph to.
        sizes: M, K and N.
    """
    M, K, N = sizes
    name = "sgemm" if M == K == N else f"sgemm {M}x{K}x{N}"
    work = Cost(flops=2.0 * M * K * N)
    graph = {
        "file": str(save_gemm(folder / f"gemm-{M}-{K}-{N}.onnx")),
        "inputs": {"a": Feed((M, K)).to_json(), "b": Feed((K, N)).to_json()},
        "outputs": {"c": Feed((M, N)).to_json()},
    }
    return [
        _in_torch(f"{name}, torch", {"gemm": list(sizes)}, work),
        Candidate(f"{name}, ORT", "roof", "graph", graph, work),
    ]


def read_rooflines(folder: Path, mib: int = READ_MIB) -> list[Candidate]:
    """Return the sum over a buffer as candidates in both libraries.

    Args:
        folder: The folder to write the graph to.
        mib: The size of the buffer.
    """
    work = Cost(bytes=float(mib << 20))
    floats = (mib << 20) // 4
    graph = {
        "file": str(save_read(folder / "read.onnx")),
        "inputs": {"x": Feed((ROWS, floats // ROWS)).to_json()},
        "outputs": {"sum": Feed((ROWS,)).to_json()},
    }
    return [
        _in_torch("memory read, torch", {"read": floats}, work),
        Candidate("memory read, ORT", "roof", "graph", graph, work),
    ]


def _in_torch(name: str, options: dict[str, object], work: Cost) -> Candidate:
    return Candidate(name, "roof", "roof", options, work, reason=missing("torch"))


def missing(package: str) -> str:
    """Return the reason that a package is unavailable, or "". Do not import the package."""
    return "" if find_spec(package) else missing_package(package)
