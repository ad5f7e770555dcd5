"""Candidates of a benchmark of a bundle: its graphs, the peers of its spec, the rooflines.

A roofline is the speed at which this machine multiplies matrices or reads memory. It is measured in
PyTorch and in ONNX Runtime; the faster library gives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx.parser

from attn_export.bundle.manifest import shapes_of
from attn_export.cases.draw import Sizes
from attn_export.dialect_names import WEIGHTS, phase_of
from attn_export.interface import Input
from attn_export.parts.benchmarks.feeds import Feed, feeds_of, output_feeds
from attn_export.parts.benchmarks.measurements import Candidate, Work
from attn_export.parts.benchmarks.own_graphs import as_candidate, graph_options
from attn_export.parts.benchmarks.peers import not_installed, peers_of
from attn_export.runtimes.decode_inputs import IDS
from attn_export.runtimes.engines.ort_cpu import OrtCpu
from attn_export.runtimes.protocol import known_limit
from attn_export.schema import GraphFile, Manifest
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import numpy_dtype

RUNTIME = "ort-cpu"
_LAYERS = "attn_export.parts.benchmarks.torch_layers"
_NO_SPEC = "the bundle has no spec.toml, so its PyTorch module is not known"
FRESH_PROCESS_FROM = 1 << 30
"""Size of the attention scores or of the weights, in bytes, from which a candidate's process is
started anew for each of its turns, because several of them would fill the memory."""


@dataclasses.dataclass(frozen=True)
class BundleCandidates:
    """Factory of the candidates of a bundle's benchmark, for any sizes of its axes."""

    folder: Path
    scratch: Path
    manifest: Manifest
    spec: AttentionSpec | None

    def candidates(self, sizes: Sizes, *, decode: bool) -> list[Candidate]:
        """Return the graphs of the bundle, their peers and the rooflines.

        `decode`: Whether the query is one token. The roofline is then the bandwidth of memory, else
        the speed of a matrix product.
        """
        work = self._work(sizes)
        candidates = [*self._ours(sizes), *self._peers(sizes, work, decode=decode)]
        if work.flops:
            candidates += read_rooflines(self.scratch) if decode else gemm_rooflines(self.scratch)
        return candidates

    def graph_candidate(self, name: str, folder: Path, graph: GraphFile, sizes: Sizes) -> Candidate:
        """Return a candidate that runs a graph of the bundle, or a variant of such a graph."""
        inputs = {
            name: Input(signature.shape, signature.dtype)
            for name, signature in self.manifest.inputs.items()
        }
        given = feeds_of(inputs, sizes)
        logits = self.manifest.outputs.get("logits")
        if IDS in given and logits and isinstance(logits.shape[-1], int):
            given[IDS] = dataclasses.replace(given[IDS], fill=None, below=logits.shape[-1])
        feeds = given, output_feeds(shapes_of(self.manifest.outputs), sizes)
        candidate = as_candidate(name, folder, graph, *feeds, self._work(sizes))
        return dataclasses.replace(candidate, alone=self._is_large(sizes))

    def _ours(self, sizes: Sizes) -> list[Candidate]:
        return [
            self.graph_candidate(
                " ".join(filter(None, [graph.dialect, phase_of(graph.name), RUNTIME])),
                self.folder, graph, sizes,
            )
            for graph in self.manifest.shipped
            # Some graphs for CUDA have nodes without a kernel in ONNX Runtime's CPU provider.
            if graph.takes(sizes) and not known_limit(OrtCpu(), graph)
        ]  # fmt: skip

    def _work(self, sizes: Sizes) -> Work:
        if self.spec is None:
            return Work(tokens=sizes["batch"] * sizes["query_len"])
        return work_of(self.spec, sizes)

    def _peers(self, sizes: Sizes, work: Work, *, decode: bool) -> list[Candidate]:
        if IDS in self.manifest.inputs:
            return []
        if self.spec is None:
            return peers_of({}, work, decodes=False, large=False, reason=_NO_SPEC)
        spec = self.spec  # PyTorch's layers append to a cache
        spec = dataclasses.replace(spec, cache="append") if spec.has_cache else spec
        decodes = decode and spec.has_cache
        export = {"function": f"{_LAYERS}:bare_spec", "spec": spec.to_dict()}
        feeds = feeds_of(spec.inputs(), sizes), output_feeds(spec.output_shapes(), sizes)
        options = {
            "module": f"{_LAYERS}:make_layer",
            "layer": {"spec": spec.to_dict(), "sizes": dict(sizes)},
            "graph": graph_options(self.scratch / "bare.onnx", *feeds, export=export),
            "static": decodes,
        }
        return peers_of(options, work, decodes=decodes, large=self._is_large(sizes))

    def _is_large(self, sizes: Sizes) -> bool:
        weights = self.folder / WEIGHTS
        if weights.is_file() and weights.stat().st_size >= FRESH_PROCESS_FROM:
            return True
        heads = self.spec.num_heads if self.spec else 1
        keys = max(sizes["total_len"], sizes["key_len"])
        return 4 * sizes["batch"] * heads * sizes["query_len"] * keys >= FRESH_PROCESS_FROM


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

_READ_MIB = 512
"""The size of the buffer that is read: much more than the last-level cache of most processors."""

ROWS = 64
"""The first axis of that buffer. ONNX Runtime computes the sums of different rows in parallel."""


def gemm_rooflines(folder: Path, sizes: Sequence[int] = (LARGE, LARGE, LARGE)) -> list[Candidate]:
    """Return the candidates that multiply [M, K] by [K, N], one for each library."""
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


def read_rooflines(folder: Path, mib: int = _READ_MIB) -> list[Candidate]:
    """Return the candidates that sum the elements of a float32 buffer, one for each library.

    `mib`: The size of the buffer in MiB.
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


def _save(text: str, path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(text), path)
    return path


# -- the minimal work of a layer ----------------------------------------------------------------


def work_of(spec: AttentionSpec, sizes: Mapping[str, int]) -> Work:
    """Return the minimal work of one run of a layer.

    With a sliding window only the number of tokens is set; FLOPs and bytes are 0.
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
    keys = S * (spec.kdim + spec.vdim) if spec.cross else S * Hkv * sum(spec.cache_widths)
    return Work(float(flops), float(size * (B * keys + by_query + by_key)), B * L)


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
