"""Candidates of a benchmark of a bundle: its graphs, the peers of its spec, the rooflines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.bench.feeds import feeds_of, output_feeds
from attn_export.bench.measurements import Candidate, Work
from attn_export.bench.own_graphs import as_candidate, graph_options
from attn_export.bench.roofline import gemm_rooflines, not_installed, read_rooflines, work_of
from attn_export.bundle import graph_files, shapes_of
from attn_export.dialect_names import phase_of
from attn_export.parity.draw import Sizes
from attn_export.results import GraphFile
from attn_export.runtimes.ort_cpu import OrtCpu
from attn_export.runtimes.protocol import known_limit
from attn_export.schema import Manifest
from attn_export.spec import AttentionSpec, Input
from attn_export.spec.low_precision import FLOAT_CACHE

RUNTIME = "ort-cpu"
NO_SPEC = "the bundle has no spec.toml, so its PyTorch module is not known"
FRESH_PROCESS_FROM = 1 << 30
"""Size of the attention scores, in bytes, from which a candidate's process is started anew for
each of its turns, because a graph that stores its scores would fill the memory."""

STATIC, BARE = "torch static cache", "bare export, ORT"
"""Names of two peers: PyTorch with a static cache (for decodes only), and the exporter's graph."""


def torch_peers(
    kind: str, options: Mapping[str, Any], work: Work, *, static: bool, reason: str
) -> list[Candidate]:
    """Return the PyTorch candidates: eager, with a static cache, and with torch.compile.

    Args:
        kind: The kind of the candidates, whose function makes the module.
        options: The options of that function, without ``static`` and ``compile``.
        work: The work of one run.
        static: Whether to add a candidate with a static cache, and to compile that one.
        reason: The reason not to run them, or "".
    """

    def peer(name: str, *, static: bool = False, compiled: bool = False) -> Candidate:
        all_options = {**options, "static": static, "compile": compiled}
        return Candidate(name, "peer", kind, all_options, work, reason=reason)

    static_peers = [peer(STATIC, static=True)] if static else []
    return [peer("torch SDPA"), *static_peers, peer("torch.compile", static=static, compiled=True)]


@dataclasses.dataclass(frozen=True)
class BundleCandidates:
    """Factory of the candidates of a bundle's benchmark, for any sizes of its axes.

    Attributes:
        scratch: The folder for graphs that candidates need and the bundle lacks.
    """

    folder: Path
    scratch: Path
    manifest: Manifest
    spec: AttentionSpec | None

    def candidates(self, sizes: Sizes, *, decode: bool) -> list[Candidate]:
        """Return the graphs of the bundle, their peers and the rooflines.

        Args:
            sizes: The size of every axis, by name.
            decode: Whether the query is one token. The roofline is then the bandwidth of memory,
                else the speed of a matrix product.

        Raises:
            UsageError: If an input has an axis without a size.
        """
        work = self._work(sizes)
        candidates = [*self._ours(sizes), *self._peers(sizes, work, decode=decode)]
        if work.flops:
            candidates += read_rooflines(self.scratch) if decode else gemm_rooflines(self.scratch)
        return candidates

    def graph_candidate(self, name: str, folder: Path, graph: GraphFile, sizes: Sizes) -> Candidate:
        """Return a candidate that runs a graph of the bundle, or a variant of such a graph.

        Args:
            name: The name of the candidate in the workload.
            folder: The folder of the graph's file.
            graph: The graph's file name, layouts, and outputs written in place.
            sizes: The size of every axis, by name.
        """
        inputs = {
            name: Input(signature.shape, signature.dtype)
            for name, signature in self.manifest.inputs.items()
        }
        feeds = feeds_of(inputs, sizes), output_feeds(shapes_of(self.manifest.outputs), sizes)
        candidate = as_candidate(name, folder, graph, *feeds, self._work(sizes))
        return dataclasses.replace(candidate, alone=self._is_large(sizes))

    def _ours(self, sizes: Sizes) -> list[Candidate]:
        return [
            self.graph_candidate(
                " ".join(filter(None, [graph.dialect, phase_of(graph.name), RUNTIME])),
                self.folder, graph, sizes,
            )
            for graph in graph_files(self.manifest)
            # Some graphs for CUDA have nodes without a kernel in ONNX Runtime's CPU provider.
            if graph.takes(sizes) and not known_limit(OrtCpu(), graph)
        ]  # fmt: skip

    def _work(self, sizes: Sizes) -> Work:
        if self.spec is None:
            return Work(tokens=sizes["batch"] * sizes["query_len"])
        return work_of(self.spec, sizes)

    def _peers(self, sizes: Sizes, work: Work, *, decode: bool) -> list[Candidate]:
        options: dict[str, Any] = {}
        graph: dict[str, Any] = {}
        static, reason = False, NO_SPEC
        if self.spec is not None:
            reason = not_installed("torch")
            spec = _peer_spec(self.spec)
            options = {"spec": spec.to_dict(), "sizes": dict(sizes)}
            static = decode and spec.has_cache
            graph = {} if reason else self._bare(spec, sizes)
        in_torch = torch_peers("spec", options, work, static=static, reason=reason)
        alone = self._is_large(sizes)
        return [*in_torch, Candidate(BARE, "peer", "graph", graph, work, alone, reason)]

    def _bare(self, spec: AttentionSpec, sizes: Sizes) -> dict[str, Any]:
        function = "attn_export.bench.peers:bare_spec"
        job = {"function": function, "spec": spec.to_dict()}
        feeds = feeds_of(spec.inputs(), sizes), output_feeds(spec.output_shapes(), sizes)
        return graph_options(self.scratch / "bare.onnx", *feeds, export=job)

    def _is_large(self, sizes: Sizes) -> bool:
        heads = self.spec.num_heads if self.spec else 1
        keys = max(sizes["total_len"], sizes["key_len"])
        return 4 * sizes["batch"] * heads * sizes["query_len"] * keys >= FRESH_PROCESS_FROM


def _peer_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return a spec as PyTorch runs it: no quantised cache or activations, an appending cache."""
    plain = dataclasses.replace(spec, **FLOAT_CACHE, activations="none")
    return dataclasses.replace(plain, cache="append") if spec.has_cache else plain
