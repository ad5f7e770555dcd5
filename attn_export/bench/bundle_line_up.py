"""Candidates of a benchmark of a bundle: its graphs, the peers of its spec, the rooflines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.bench.dims import work_of
from attn_export.bench.feeds import Sizes, feeds_of, known_feeds
from attn_export.bench.measurements import Candidate, Cost
from attn_export.bench.own_graphs import as_candidate
from attn_export.bench.roofline import gemm_rooflines, missing, read_rooflines
from attn_export.bundle import graph_files
from attn_export.spec import AttentionSpec, Input

RUNTIME = "ort-cpu"
NO_SPEC = "the bundle has no spec.toml: its module is not known here"
ALONE_FROM = 1 << 30
"""Bytes of scores from which a graph that may write them out lives for its own turns only."""

Manifest = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Entrants:
    """Candidates of a benchmark, at any sizes.

    Attributes:
        folder: The bundle's.
        scratch: For graphs that are made on the way.
        spec: Where the bundle has one.
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
        work = Cost(tokens=sizes["batch"] * sizes["query_len"])
        if self.spec is not None:
            work = work_of(self.spec, sizes)
        found = [*self._ours(sizes, work), *self._peers(sizes, work, decode=decode)]
        if work.flops:
            found += read_rooflines(self.scratch) if decode else gemm_rooflines(self.scratch)
        return found

    def _ours(self, sizes: Sizes, work: Cost) -> list[Candidate]:
        inputs = {
            name: Input(tuple(entry["shape"]), entry["dtype"])
            for name, entry in self.manifest["inputs"].items()
        }
        outputs = {name: entry["shape"] for name, entry in self.manifest["outputs"].items()}
        found = []
        for graph in graph_files(self.manifest):
            if graph.takes(sizes):
                name = " ".join([graph.dialect, *(["decode"] if graph.fixed else []), RUNTIME])
                feeds = feeds_of(inputs, sizes), known_feeds(outputs, sizes)
                made = as_candidate(name, self.folder, graph, *feeds, work)
                found.append(dataclasses.replace(made, alone=self._is_large(sizes)))
        return found

    def _peers(self, sizes: Sizes, work: Cost, *, decode: bool) -> list[Candidate]:
        reason = missing("torch") if self.spec else NO_SPEC
        # Peers grow their cache by concatenation, or have a static one of their own.
        appending = _appending(self.spec)
        has_cache = appending is not None and appending.has_cache
        spec = {} if appending is None else appending.to_dict()

        def torch_peer(name: str, *, static: bool, compiled: bool) -> Candidate:
            options = {
                "spec": spec, "sizes": dict(sizes), "static": static, "compile": compiled,
            }  # fmt: skip
            return Candidate(name, "peer", "spec", options, work, reason=reason)

        static = decode and has_cache
        found = [torch_peer("torch SDPA", static=False, compiled=False)]
        if static:
            found.append(torch_peer("torch static cache", static=True, compiled=False))
        found.append(torch_peer("torch.compile", static=static, compiled=True))
        bare = self._bare(appending, sizes) if appending is not None and not reason else {}
        alone = self._is_large(sizes)
        name = "bare export, ORT"
        return [*found, Candidate(name, "peer", "graph", bare, work, alone=alone, reason=reason)]

    def _bare(self, spec: AttentionSpec, sizes: Sizes) -> dict[str, Any]:
        inputs = feeds_of(spec.inputs(), sizes)
        outputs = known_feeds(spec.output_shapes(), sizes)
        return {
            "file": str(self.scratch / "bare.onnx"),
            "inputs": {name: feed.to_json() for name, feed in inputs.items()},
            "outputs": {name: feed.to_json() for name, feed in outputs.items()},
            "export": {"what": "bare spec", "spec": spec.to_dict()},
        }

    def _is_large(self, sizes: Sizes) -> bool:
        heads = self.spec.num_heads if self.spec else 1
        keys = max(sizes["total_len"], sizes["key_len"])
        return 4 * sizes["batch"] * heads * sizes["query_len"] * keys >= ALONE_FROM


def _appending(spec: AttentionSpec | None) -> AttentionSpec | None:
    if spec is None or not spec.has_cache:
        return spec
    return dataclasses.replace(spec, cache="append")
