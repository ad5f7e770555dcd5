"""Graphs of a subject that compute what its module computes, without the build of a bundle."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch

from attn_export import Subject
from attn_export.commands.bundle_graphs import lower_all
from attn_export.dialect_names import STANDARD
from attn_export.export.capture import sizes_to_try
from attn_export.export.export import export
from attn_export.export.trees import to_numpy
from attn_export.graph.checks import check_graph
from attn_export.graph.save import save_graphs
from attn_export.runtimes.worker import to_case_layout, to_graph_layout
from attn_export.schema import GraphFile
from attn_export.temp_folders import scratch

OTHERS = 3
"""The number of other sizes at which a graph is compared."""


def right_graphs(subject: Subject, *dialects: str) -> dict[str, onnx.GraphProto]:
    """Return the graphs of a subject by file, which pass the checks and are its module."""
    graphs, _ = lower_all(export(subject), dialects or (STANDARD,))
    with scratch() as folder:
        save_graphs({graph.file.name: graph.model for graph in graphs}, folder)
        for file in (graph.file for graph in graphs):
            path = folder / file.name
            assert check_graph(path) == []
            assert disagreement(subject, path, file) == "", file.name
        return {path.name: onnx.load(path).graph for path in folder.glob("*.onnx")}


def operators(graph: onnx.GraphProto) -> list[str]:
    return [node.op_type for node in graph.node]


def disagreement(subject: Subject, path: Path, file: GraphFile | None = None) -> str:
    """Return where a graph is not the module: at the example's sizes and at others; "" if not."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names, layouts = [each.name for each in session.get_inputs()], file.layouts if file else {}
    tried = itertools.chain([subject.example_sizes], sizes_to_try(subject))
    taken = (sizes for sizes in tried if file is None or file.takes(sizes))
    for sizes in itertools.islice(taken, OTHERS + 1):
        inputs = subject.draw(sizes, "stranger")
        with torch.inference_mode():
            wanted = to_numpy(subject.call(subject.module, inputs))
        given = {name: array for name, array in to_numpy(inputs).items() if name in names}
        outputs = session.run(list(subject.outputs), to_graph_layout(given, layouts, {}))
        got = to_case_layout(dict(zip(subject.outputs, outputs, strict=True)), layouts)
        for name, array in wanted.items():
            if array.shape != got[name].shape or not np.allclose(
                got[name], array, rtol=1e-3, atol=1e-4, equal_nan=True
            ):
                return f"{name} differs at {dict(sizes)}"
    return ""
