"""Peers that our graphs are measured against: each is one function, run in a process of its own.

`@peer` makes it a candidate of `bench` and of `scripts/bench_peers`. It imports itself what it
needs, so that who lists the peers loads none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from attn_export.parts.benchmarks.feeds import Feed, Make, Prepared, filled
from attn_export.parts.benchmarks.measurements import Candidate, Work
from attn_export.runtimes.child_main import load_function
from attn_export.system_info import missing_package

STATIC, BARE = "torch static cache", "bare export, ORT"
"""Names of two peers: PyTorch with a static cache (for decodes only), and the exporter's graph."""


class _Peer(NamedTuple):
    """A row: the function as ``"MODULE:FUNCTION"``, and what the arguments of `peer` say."""

    name: str
    kind: str
    needs: tuple[str, ...]
    decodes: bool | None
    stores_scores: bool


PEERS: list[_Peer] = []
"""All peers, in the order of their definitions."""


def peer(
    name: str, *needs: str, decodes: bool | None = None, stores_scores: bool = False
) -> Callable[[Make], Make]:
    """Return a decorator that makes a function a peer.

    `needs`: The packages that it imports. `decodes`: Whether it is for steps with a cache; None for
    all workloads. `stores_scores`: Whether its process must end after a turn if scores are large.
    """

    def add(make: Make) -> Make:
        kind = f"{make.__module__}:{make.__name__}"
        PEERS.append(_Peer(name, kind, needs, decodes, stores_scores))
        return make

    return add


def peers_of(
    options: Mapping[str, Any], work: Work, *, decodes: bool, large: bool, reason: str = ""
) -> list[Candidate]:
    """Return the peers of a workload, in the order of their definitions.

    `options`: What each peer gets: ``module``, the function that makes the layer in PyTorch, and
    ``layer``, its options; ``graph``, the options of the bare exporter's graph; ``static``, whether
    to compile it with a static cache.
    """
    return [
        Candidate(
            row.name, "peer", row.kind, options, work, large and row.stores_scores,
            reason or next(filter(None, map(not_installed, row.needs)), ""),
        )
        for row in PEERS
        if row.decodes in (None, decodes)
    ]  # fmt: skip


def not_installed(package: str) -> str:
    """Return a message if a package is not installed, else "". The package is not imported."""
    return "" if find_spec(package) else missing_package(package)


def _layer(options: Mapping[str, Any], threads: int, *, static: bool, compiled: bool) -> Prepared:
    make: Make = load_function(options["module"])
    return make({**options["layer"], "static": static, "compile": compiled}, threads)


@peer("torch SDPA", "torch")
def _eager(options: Mapping[str, Any], threads: int) -> Prepared:
    return _layer(options, threads, static=False, compiled=False)


@peer("torch math", "torch", stores_scores=True)
def _math(options: Mapping[str, Any], threads: int) -> Prepared:
    """Compute attention step by step with all scores in memory, as models do without SDPA."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    layer = _layer(options, threads, static=False, compiled=False)

    def run() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return layer.run()

    return Prepared(run, {**layer.facts, "kernel": "math"})


@peer(STATIC, "torch", decodes=True)
def _static(options: Mapping[str, Any], threads: int) -> Prepared:
    return _layer(options, threads, static=True, compiled=False)


@peer("torch.compile", "torch")
def _compiled(options: Mapping[str, Any], threads: int) -> Prepared:
    return _layer(options, threads, static=options["static"], compiled=True)


@peer(BARE, "torch", stores_scores=True)
def _bare(options: Mapping[str, Any], threads: int) -> Prepared:
    from attn_export.parts.benchmarks.own_graphs import make_in_ort

    return make_in_ort(options["graph"], threads)


@peer("OpenVINO f32", "openvino", "torch", decodes=False, stores_scores=True)
def make_in_openvino(options: Mapping[str, Any], threads: int) -> Prepared:
    """Load the exporter's graph. Its inputs share memory with numpy; OpenVINO makes its outputs."""
    from attn_export.parts.benchmarks.own_graphs import ensure_graph_file
    from attn_export.runtimes.engines.openvino import sdk

    openvino, graph = sdk(), options["graph"]
    core = openvino.Core()
    model = core.read_model(ensure_graph_file(graph))
    config = {
        # The default precision is bfloat16 on processors that have it.
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
    }
    request = core.compile_model(model, "CPU", config).create_infer_request()
    arrays = []
    for number, port in enumerate(model.inputs):
        array = filled(Feed.from_json(graph["inputs"][port.get_any_name()]), seed=number)
        request.set_tensor(port.get_any_name(), openvino.Tensor(array, shared_memory=True))
        arrays.append(array)

    def run() -> object:
        request.infer()
        return arrays

    return Prepared(run, {"device": "CPU", "precision": "f32"})
