"""Minimal work of a layer, and rooflines: the speed at which this machine does such work.

Rooflines multiply matrices and read memory. They are measured in PyTorch and in ONNX Runtime, as
candidates of the same interleaved run. The faster library gives the roofline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import onnx
import onnx.parser

from attn_export.bench.feeds import Feed
from attn_export.bench.measurements import Candidate, Work
from attn_export.bench.own_graphs import graph_options
from attn_export.spec import AttentionSpec
from attn_export.system_info import missing_package
from attn_export.tensorfile import numpy_dtype

# -- rooflines ----------------------------------------------------------------------------------

GEMM = """
<ir_version: 11, opset_import: ["" : 23]>
attention (float[M, K] a, float[K, N] b) => (float[M, N] c) { c = MatMul (a, b) }
"""

SUM = """
<ir_version: 11, opset_import: ["" : 23]>
attention (float[M, N] x) => (float[M] sum) {
    axes = Constant <value = int64[1] {1}> ()
    sum = ReduceSum <keepdims = 0> (x, axes)
}
"""

LARGE = 2048
"""M, K and N of the GEMM. Larger ones reach no more FLOP/s."""

READ_MIB = 512
"""The size of the buffer that is read: much more than the last-level cache of most processors."""

ROWS = 64
"""The first axis of that buffer. ONNX Runtime computes the sums of different rows in parallel."""


def gemm_rooflines(folder: Path, sizes: Sequence[int] = (LARGE, LARGE, LARGE)) -> list[Candidate]:
    """Return the candidates that multiply [M, K] by [K, N], one for each library.

    Args:
        folder: The folder to write the graph to.
        sizes: M, K and N.
    """
    M, K, N = sizes
    name = "sgemm" if M == K == N else f"sgemm {M}x{K}x{N}"
    work = Work(flops=2.0 * M * K * N)
    graph = graph_options(
        _save(GEMM, folder / f"gemm-{M}-{K}-{N}.onnx"),
        {"a": Feed((M, K)), "b": Feed((K, N))},
        {"c": Feed((M, N))},
    )
    return [
        _in_torch(f"{name}, torch", {"gemm": list(sizes)}, work),
        Candidate(f"{name}, ORT", "roof", "graph", graph, work),
    ]


def read_rooflines(folder: Path, mib: int = READ_MIB) -> list[Candidate]:
    """Return the candidates that sum the elements of a float32 buffer, one for each library.

    Args:
        folder: The folder to write the graph to.
        mib: The size of the buffer in MiB.
    """
    work = Work(bytes=float(mib << 20))
    floats = (mib << 20) // 4
    graph = graph_options(
        _save(SUM, folder / "read.onnx"),
        {"x": Feed((ROWS, floats // ROWS))},
        {"sum": Feed((ROWS,))},
    )
    return [
        _in_torch("memory read, torch", {"read": floats}, work),
        Candidate("memory read, ORT", "roof", "graph", graph, work),
    ]


def _in_torch(name: str, options: dict[str, object], work: Work) -> Candidate:
    return Candidate(name, "roof", "roof", options, work, reason=not_installed("torch"))


def not_installed(package: str) -> str:
    """Return a message if a package is not installed, else "". The package is not imported."""
    return "" if find_spec(package) else missing_package(package)


def _save(text: str, path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(text), path)
    return path


# -- the minimal work of a layer ----------------------------------------------------------------


def work_of(spec: AttentionSpec, sizes: Mapping[str, int]) -> Work:
    """Return the minimal work of one run of a layer.

    With a sliding window only the number of tokens is set; FLOPs and bytes are 0.

    Args:
        spec: The spec of the layer.
        sizes: The sizes of its dynamic axes, by name.
    """
    B, L, P = sizes["batch"], sizes["query_len"], sizes["past_len"]
    new_keys = sizes["key_len"] if spec.cross else L
    S = P + new_keys
    if spec.window_left is not None or spec.window_right is not None:
        return Work(tokens=B * L)
    H, Hkv, D, Dv, E = (
        spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.embed_dim,
    )  # fmt: skip
    pairs = L * P + L * (L + 1) / 2 if spec.causal else L * S
    if spec.kv_latent_dim:
        return _latent_work(spec, B, L, S, pairs)
    by_query, by_key = E * H * D + H * Dv * E, spec.kdim * Hkv * D + spec.vdim * Hkv * Dv
    flops = 2 * B * (pairs * H * (D + Dv) + L * by_query + new_keys * by_key)
    size = numpy_dtype(spec.dtype).itemsize
    keys = S * (spec.kdim + spec.vdim) if spec.cross else S * Hkv * sum(spec.stored_widths)
    key_size = size
    if spec.has_cache:
        key_size = numpy_dtype(spec.inputs()["past_key"].dtype).itemsize
    return Work(float(flops), float(B * keys * key_size + size * (by_query + by_key)), B * L)


def _latent_work(spec: AttentionSpec, B: int, L: int, S: int, pairs: float) -> Work:
    """Return the work of multi-head latent attention, whose heads share one key of width R + C."""
    H, R, C = spec.num_heads, spec.rotary_dim, spec.kv_latent_dim
    inside = spec.q_latent_dim or spec.embed_dim
    up = H * (spec.head_dim - R + spec.v_head_dim) * C
    weights = (
        spec.embed_dim * (spec.q_latent_dim + C + R) + inside * H * spec.head_dim + up
        + H * spec.v_head_dim * spec.embed_dim
    )  # fmt: skip
    flops = 2 * B * (pairs * H * (R + 2 * C) + L * weights)
    itemsize = numpy_dtype(spec.dtype).itemsize
    return Work(float(flops), float(itemsize * (B * S * (R + C) + weights)), B * L)
