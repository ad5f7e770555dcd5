"""Layers with integers by others: torchao, OpenVINO, and stock ONNX Runtime, as candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

from attn_export import AttentionSpec, Subject
from attn_export.bench.feeds import feeds_of, known_feeds
from attn_export.bench.measurements import Candidate, Cost
from attn_export.bench.own_graphs import as_candidate
from attn_export.bench.peers_spec import TORCHAO
from attn_export.dialect_names import PORTABLE, STANDARD
from attn_export.export.export import export
from attn_export.graph.lower import lower
from attn_export.graph.save import save_graphs
from attn_export.results import GraphFile
from measuring import genai_peer

OPENVINO: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "OpenVINO int8": (PORTABLE, {"weights_dtype": "int8"}),
    "OpenVINO int4": (STANDARD, {"weights_dtype": "int4", "block_size": 128}),
}
"""The dialect, and fields of the spec. OpenVINO rounds the inputs of products by itself."""

STOCK = "MatMulNBits, level 4"
"""Our graph with int4 whose products round their inputs to 8 bits by block."""

NAMES = (*(f"torchao {name}" for name in TORCHAO), *OPENVINO, STOCK, genai_peer.NAME)

SLOW = "int4 weights"
MANY_TOKENS = 64
"""torchao's prototype of int4 takes 20 s for 512 tokens: from here on it is left out."""


def peers(
    layer: Mapping[str, Any], sizes: Mapping[str, int], folder: Path, int4: tuple[Path, GraphFile]
) -> Iterator[Candidate]:
    """Yield the candidates for a layer.

    Args:
        layer: The fields of its spec, in float32, with a cache in place.
        sizes: The sizes of the axes.
        folder: A folder for graphs, which holds them already where they were asked for before.
        int4: The folder and the graph of the layer with int4 weights in the `ort` dialect.
    """
    work = Cost(tokens=sizes["batch"] * sizes["query_len"])
    decodes = sizes["past_len"] > 0
    plain = dict(layer) | {"cache": "append" if decodes else "none"}
    for name in TORCHAO:
        options = {
            "spec": plain, "sizes": dict(sizes), "static": decodes, "compile": True,
            "torchao": name,
        }  # fmt: skip
        slow = "takes 20 s" if name == SLOW and work.tokens > MANY_TOKENS else ""
        yield Candidate(f"torchao {name}", "peer", "spec", options, work, reason=slow)
    for name, (dialect, fields) in OPENVINO.items():
        spec = AttentionSpec.from_dict({**layer, "cache": "append", **fields})
        inputs = feeds_of(spec.inputs(), sizes)
        options = {
            "file": str(graph_of(spec, dialect, folder / name.replace(" ", "-"))),
            "inputs": {name: feed.to_json() for name, feed in inputs.items()},
        }
        yield Candidate(name, "peer", "openvino", options, work)
    place, graph = int4
    spec = AttentionSpec.from_dict({**layer, "weights_dtype": "int4", "block_size": 32})
    feeds = feeds_of(spec.inputs(), sizes), known_feeds(spec.output_shapes(), sizes)
    stock = dataclasses.replace(graph, name=at_level_4(place, graph.name))
    yield dataclasses.replace(as_candidate(STOCK, place, stock, *feeds, work), role="peer")
    place = folder / "genai"
    place.mkdir(exist_ok=True)
    yield genai_peer.genai(layer, sizes, place, work)


def graph_of(spec: AttentionSpec, dialect: str, folder: Path) -> Path:
    """Return the file of a layer's graph in a dialect; it is written if it is missing.

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


def at_level_4(folder: Path, name: str) -> str:
    """Write a graph whose MatMulNBits round their inputs to 8 bits; return the file's name.

    Args:
        folder: The folder of the graph.
        name: The file name of the graph.
    """
    model = onnx.load(folder / name, load_external_data=False)
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    if not products:
        raise ValueError(f"{name} has no MatMulNBits")
    for node in products:
        (level,) = (each for each in node.attribute if each.name == "accuracy_level")
        level.i = 4
    (folder / f"level4.{name}").write_bytes(model.SerializeToString())
    return f"level4.{name}"
