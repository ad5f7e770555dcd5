"""The bundle of a comparison: the graph as it is, its cases, their truth, and the report."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import PAGE, REPORT, write_manifest
from attn_export.errors import printable
from attn_export.report.data import to_json
from attn_export.report.html import to_html
from attn_export.source_location import line_in
from attn_export.system_info import versions

if TYPE_CHECKING:
    import onnx

    from attn_export.results import GraphFile, Report

STACK_TRACE = "pkg.torch.onnx.stack_trace"
"""The metadata in which PyTorch's exporter keeps the lines that a node came from."""

EMBEDDED_BELOW = 2**30
"""Graphs whose weights take fewer bytes are written in one file."""


def write_bundle(
    folder: Path,
    graphs: Mapping[str, tuple[Path, onnx.ModelProto, GraphFile]],
    ends: tuple[dict[str, Any], dict[str, Any]],
    report: Report,
) -> None:
    """Write the graphs, the report and the manifest beside golden vectors that are there.

    Args:
        folder: The folder of the bundle.
        graphs: By the name in the bundle: the file, its content without external data, and how
            it is run.
        ends: Dtype and shape of every input, and of every output, by name.
        report: The report.

    Raises:
        UsageError: If a name of the graph is none that a manifest may hold.
        GraphError: If the external data of a graph cannot be read.
    """
    for name, (path, model, _) in graphs.items():
        copy_graph(path, model, folder / name)
    (folder / REPORT).write_text(to_json(report), encoding="utf-8")
    (folder / PAGE).write_text(to_html(report, None), encoding="utf-8")
    manifest: dict[str, Any] = {
        "name": report.name,
        "versions": versions(),
        "graphs": {
            name: _entry(model, file, origins(model)) for name, (_, model, file) in graphs.items()
        },
        "inputs": ends[0],
        "outputs": ends[1],
        "weights": "as the graph that was compared holds them",
    }
    write_manifest(folder, manifest)


def copy_graph(path: Path, model: onnx.ModelProto, target: Path) -> None:
    """Copy a graph; one with external data gets that within it, or in one file beside it.

    Args:
        path: The file.
        model: Its content, without external data.
        target: The file to write.
    """
    import onnx

    from attn_export.graph.load import load_model, tensors_of

    if not any(t.data_location == onnx.TensorProto.EXTERNAL for t in tensors_of(model)):
        shutil.copyfile(path, target)
        return
    whole = load_model(path)
    large = sum(len(t.raw_data) for t in tensors_of(whole)) >= EMBEDDED_BELOW
    onnx.save_model(
        whole,
        target,
        save_as_external_data=large,
        location=f"{target.name}.data" if large else None,
    )


def _entry(model: onnx.ModelProto, file: GraphFile, nodes: Mapping[str, str]) -> dict[str, Any]:
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    return {
        "dialect": file.dialect,
        "needs": {"opset": opsets.get("ai.onnx", 0), "ir_version": model.ir_version},
        "fixed": {},  # the axes have these sizes in the whole bundle
        "layouts": {},
        "bound": {},
        "features": list(file.features),
        "attentions": None,
        "ours": False,
        "foreign": True,
        "nodes": dict(nodes),
    }


def origins(model: onnx.ModelProto) -> dict[str, str]:
    """Return where in the exported module each node came from, as PyTorch's exporter states it."""
    found = {}
    for node in model.graph.node:
        trace = next((p.value for p in node.metadata_props if p.key == STACK_TRACE), "")
        line = line_in(trace)
        if node.name and line:
            found[printable(node.name, 500)] = printable(line, 500)
    return found
