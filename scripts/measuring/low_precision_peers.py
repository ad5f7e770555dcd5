"""Candidates of other libraries for layers with integers: torchao, OpenVINO, onnxruntime-genai."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attn_export import AttentionSpec, Subject
from attn_export.dialect_names import PORTABLE, STANDARD
from attn_export.export.export import export
from attn_export.graph.lower import lower
from attn_export.graph.save import save_graphs
from attn_export.parts.benchmarks.feeds import feeds_of
from attn_export.parts.benchmarks.measurements import Candidate, Work
from attn_export.parts.benchmarks.own_graphs import graph_options
from measuring import genai_peer, torchao_peer

OPENVINO: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "OpenVINO int8": (PORTABLE, {"weights_dtype": "int8"}),
    "OpenVINO int4": (STANDARD, {"weights_dtype": "int4"}),
}
"""Dialect and fields of the spec for each. OpenVINO rounds the inputs of products by default."""

IN_OPENVINO = "attn_export.parts.benchmarks.peers:make_in_openvino"

NAMES = (*(f"torchao {name}" for name in torchao_peer.TORCHAO), *OPENVINO, genai_peer.NAME)

SLOW = "int4 weights"
MANY_TOKENS = 64
"""Largest number of tokens for torchao's prototype of int4, which takes 20 s for 512 tokens."""


def peers(layer: Mapping[str, Any], sizes: Mapping[str, int], folder: Path) -> Iterator[Candidate]:
    """Yield the candidates for a layer.

    Args:
        layer: The fields of the layer's spec, in float32, with a cache in genai_folder.
        sizes: The sizes of the axes.
        folder: A folder for graphs, in which graphs of earlier calls are used again.
    """
    work = Work(tokens=sizes["batch"] * sizes["query_len"])
    decodes = sizes["past_len"] > 0
    plain = dict(layer) | {"cache": "append" if decodes else "none"}
    for name in torchao_peer.TORCHAO:
        options = {"spec": plain, "sizes": dict(sizes), "static": decodes, "torchao": name}
        slow = "takes 20 s" if name == SLOW and work.tokens > MANY_TOKENS else ""
        kind = torchao_peer.KIND
        yield Candidate(f"torchao {name}", "peer", kind, options, work, reason=slow)
    for name, (dialect, fields) in OPENVINO.items():
        spec = AttentionSpec.from_dict({**layer, "cache": "append", **fields})
        file = graph_of(spec, dialect, folder / name.replace(" ", "-"))
        options = {"graph": graph_options(file, feeds_of(spec.inputs(), sizes), {})}
        yield Candidate(name, "peer", IN_OPENVINO, options, work)
    genai_folder = folder / "genai"
    genai_folder.mkdir(exist_ok=True)
    yield genai_peer.genai(layer, sizes, genai_folder, work)


def graph_of(spec: AttentionSpec, dialect: str, folder: Path) -> Path:
    """Return the file of a layer's graph in a dialect, which is written if it is missing.

    Args:
        spec: The layer.
        dialect: The dialect.
        folder: The folder of the graph.
    """
    folder.mkdir(exist_ok=True)
    files = list(folder.glob("*.onnx"))
    if not files:
        graph = lower(export(Subject.from_spec(spec)).model, dialect)[""]
        save_graphs({graph.file.name: graph.model}, folder)
        files = [folder / graph.file.name]
    return files[0]
