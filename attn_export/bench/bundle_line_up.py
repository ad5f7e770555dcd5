"""Candidates of a benchmark of a bundle: its graphs, the peers of its spec, the rooflines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.bench.dims import work_of
from attn_export.bench.feeds import Feed, Sizes, feeds_of, known_feeds
from attn_export.bench.measurements import Candidate, Cost
from attn_export.bench.own_graphs import as_candidate
from attn_export.bench.roofline import gemm_rooflines, missing, read_rooflines
from attn_export.bundle import graph_files
from attn_export.dialect_names import phase_of
from attn_export.results import GraphFile
from attn_export.runtimes.ort_cpu import OrtCpu
from attn_export.runtimes.protocol import known_limit
from attn_export.spec import AttentionSpec, Input
from attn_export.spec.low_precision import FLOAT_CACHE

RUNTIME = "ort-cpu"
NO_SPEC = "the bundle has no spec.toml: its module is not known here"
ALONE_FROM = 1 << 30
"""Bytes of scores from which a graph that may write them out lives for its own turns only."""

STATIC, BARE = "torch static cache", "bare export, ORT"

Manifest = Mapping[str, Any]


def torch_peers(
    kind: str, options: Mapping[str, Any], work: Cost, *, static: bool, reason: str
) -> list[Candidate]:
    """Return PyTorch as candidates: as it is, with a static cache, compiled.

    Args:
        kind: The kind of candidate, which makes the module.
        options: Its options beside ``static`` and ``compile``.
        work: The work of one run.
        static: Whether a static cache takes part.
        reason: The reason not to run them, or "".
    """

    def peer(name: str, *, static: bool = False, compiled: bool = False) -> Candidate:
        more = {**options, "static": static, "compile": compiled}
        return Candidate(name, "peer", kind, more, work, reason=reason)

    held = [peer(STATIC, static=True)] if static else []
    return [peer("torch SDPA"), *held, peer("torch.compile", static=static, compiled=True)]


def bare_options(
    file: Path, inputs: Mapping[str, Feed], outputs: Mapping[str, Feed], job: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of the bare exporter's graph as a candidate.

    Args:
        file: The graph, which is exported if it is missing.
        inputs: Its inputs.
        outputs: Its outputs.
        job: The job that exports it.
    """
    return {
        "file": str(file),
        "inputs": {name: feed.to_json() for name, feed in inputs.items()},
        "outputs": {name: feed.to_json() for name, feed in outputs.items()},
        "export": job,
    }


@dataclasses.dataclass(frozen=True)
class Entrants:
    """Candidates of a benchmark, at any sizes.

    Attributes:
        folder: The bundle's.
        scratch: For graphs that are made on the way.
        spec: The spec, if the bundle has one.
    """

    folder: Path
    scratch: Path
    manifest: Manifest
    spec: AttentionSpec | None

    def at(self, sizes: Sizes, *, decode: bool) -> list[Candidate]:
        """Return the candidates at these sizes.

        Args:
            sizes: The sizes of every axis that bench supports.
            decode: Whether one token is new, and memory is what limits.

        Raises:
            UsageError: If an input has an axis without a size.
        """
        work = self._work(sizes)
        found = [*self._ours(sizes), *self._peers(sizes, work, decode=decode)]
        if work.flops:
            found += read_rooflines(self.scratch) if decode else gemm_rooflines(self.scratch)
        return found

    def own(self, name: str, folder: Path, graph: GraphFile, sizes: Sizes) -> Candidate:
        """Return a graph of the bundle, or another form of one, as a candidate.

        Args:
            name: Its name in the contest.
            folder: The folder of its file.
            graph: Its file, its layouts, and what is written in place.
            sizes: The sizes of every axis that bench supports.
        """
        inputs = {
            name: Input(tuple(entry["shape"]), entry["dtype"])
            for name, entry in self.manifest["inputs"].items()
        }
        outputs = {name: entry["shape"] for name, entry in self.manifest["outputs"].items()}
        feeds = feeds_of(inputs, sizes), known_feeds(outputs, sizes)
        made = as_candidate(name, folder, graph, *feeds, self._work(sizes))
        return dataclasses.replace(made, alone=self._is_large(sizes))

    def _ours(self, sizes: Sizes) -> list[Candidate]:
        return [
            self.own(
                " ".join(filter(None, [graph.dialect, phase_of(graph.name), RUNTIME])),
                self.folder, graph, sizes,
            )
            for graph in graph_files(self.manifest)
            # ONNX Runtime's CPU has no kernels for some of the graphs that are for CUDA.
            if graph.takes(sizes) and not known_limit(OrtCpu(), graph)
        ]  # fmt: skip

    def _work(self, sizes: Sizes) -> Cost:
        if self.spec is None:
            return Cost(tokens=sizes["batch"] * sizes["query_len"])
        return work_of(self.spec, sizes)

    def _peers(self, sizes: Sizes, work: Cost, *, decode: bool) -> list[Candidate]:
        reason = missing("torch") if self.spec else NO_SPEC
        # Peers grow their cache by concatenation, or have a static one of their own.
        appending = _appending(self.spec)
        has_cache = appending is not None and appending.has_cache
        spec = {} if appending is None else appending.to_dict()

        found = torch_peers(
            "spec", {"spec": spec, "sizes": dict(sizes)}, work, static=decode and has_cache,
            reason=reason,
        )  # fmt: skip
        bare = self._bare(appending, sizes) if appending is not None and not reason else {}
        alone = self._is_large(sizes)
        return [*found, Candidate(BARE, "peer", "graph", bare, work, alone=alone, reason=reason)]

    def _bare(self, spec: AttentionSpec, sizes: Sizes) -> dict[str, Any]:
        job = {"what": "bare spec", "spec": spec.to_dict()}
        feeds = feeds_of(spec.inputs(), sizes), known_feeds(spec.output_shapes(), sizes)
        return bare_options(self.scratch / "bare.onnx", *feeds, job)

    def _is_large(self, sizes: Sizes) -> bool:
        heads = self.spec.num_heads if self.spec else 1
        keys = max(sizes["total_len"], sizes["key_len"])
        return 4 * sizes["batch"] * heads * sizes["query_len"] * keys >= ALONE_FROM


def _appending(spec: AttentionSpec | None) -> AttentionSpec | None:
    if spec is None:
        return None
    # Peers keep floating point: integers need a cache in place, and operators of ONNX.
    plain = dataclasses.replace(spec, **FLOAT_CACHE, activations="none")
    return dataclasses.replace(plain, cache="append") if spec.has_cache else plain
