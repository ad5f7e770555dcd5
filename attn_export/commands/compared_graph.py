"""The graph that a comparison judges, and the bundle of a comparison."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle.golden import read_index
from attn_export.bundle.manifest import GOLDEN, manifest_content
from attn_export.errors import UsageError, printable
from attn_export.graph import Graph
from attn_export.report.html import write_report
from attn_export.results import CHANGED, Report, TensorNames
from attn_export.runtimes.child import limited
from attn_export.runtimes.protocol import Limits
from attn_export.schema import GraphFile, TensorSignature
from attn_export.source_location import line_in
from attn_export.system_info import versions

if TYPE_CHECKING:
    import onnx

    from attn_export.reference.reference import Reference


def read_compared(path: Path, limits: Limits) -> Graph[onnx.ModelProto]:
    """Return a graph without its external data, with the dialect and features of its nodes."""
    from attn_export.graph.load import load_proto, refuse_bad_data
    from attn_export.graph.requirements import dialect_of

    model = load_proto(path)
    refuse_bad_data(model, path)
    function = "attn_export.graph.requirements:foreign_features"
    features = tuple(limited(function, str(path), limits, path=str(path)))
    return Graph(model, GraphFile(path.name, dialect_of(features), features=features), path)


def match_names(
    graph: Graph[onnx.ModelProto], reference: Reference, names: Mapping[str, str]
) -> TensorNames:
    """Return all names in a graph by those of a reference, after its inputs and outputs match."""
    from attn_export.graph.signature_check import inputs_of, match_graph_file, matched_names

    for value in graph.model.graph.output:
        if value.name in reference.undeclared:
            value.type.tensor_type.ClearField("shape")
    inputs = [value.name for value in inputs_of(graph.model)]
    outputs = [value.name for value in graph.model.graph.output]
    _check_names(graph.path, names, reference, {*inputs, *outputs})
    interface, shown, whose = reference.interface, str(graph.path), reference.whose
    matched = TensorNames(
        matched_names(shown, "inputs", inputs, list(interface.inputs), names, whose),
        matched_names(shown, "outputs", outputs, list(interface.output_shapes), names, whose),
    )
    expected_inputs = {
        matched.inputs[n]: TensorSignature(expected.dtype, expected.shape)
        for n, expected in interface.inputs.items()
    }
    expected_outputs = {
        matched.outputs[n]: TensorSignature(reference.dtypes[n], shape)
        for n, shape in interface.output_shapes.items()
    }
    match_graph_file(
        graph.model, shown, graph.file, expected_inputs, expected_outputs, whose, may_fix=False
    )
    return matched


def _check_names(
    path: Path, names: Mapping[str, str], reference: Reference, graph_names: set[str]
) -> None:
    reference_names = {*reference.interface.inputs, *reference.interface.output_shapes}
    for name, graph_name in names.items():
        for where, unknown, known in (
            (reference.whose, name, reference_names),
            (path, graph_name, graph_names),
        ):
            if unknown not in known:
                raise UsageError(
                    f"names: {where} has no input or output {printable(unknown, 60)}; choose from "
                    f"{printable(', '.join(sorted(known)), 150)}"
                )


# -- the bundle of a comparison ----------------------------------------------------------------

STACK_TRACE = "pkg.torch.onnx.stack_trace"
"""The key of a node's metadata in which PyTorch's exporter stores a stack trace."""

_EMBEDDED_BELOW = 2**30
"""The size of weights in bytes from which a graph is written with external data."""

_ALIGNMENT = 64
"""That of tensors in the file of external data, in bytes."""


def write_bundle(
    folder: Path,
    graphs: Sequence[Graph[onnx.ModelProto]],
    ends: tuple[Mapping[str, TensorSignature], Mapping[str, TensorSignature]],
    report: Report,
    caches: Mapping[str, str],
) -> None:
    """Write the graphs, the report and the manifest into a folder that has the golden vectors."""
    for graph in graphs:
        _copy_graph(graph.path, graph.model, folder / graph.file.name)
    inputs, outputs = ends
    cases = {case.name for case in read_index(folder / GOLDEN).cases}
    unchanged = [name for name in inputs if f"{CHANGED}{name}" not in cases]
    write_report(folder, report, {
        "name": report.name,
        "versions": versions(),
        "graphs": {graph.file.name: _entry(graph.model, graph.file) for graph in graphs},
        "inputs": inputs,
        "outputs": outputs,
        **({"caches": caches} if caches else {}),
        **({"unchanged": unchanged} if unchanged else {}),
        "weights": "as the graph that was compared holds them",
    })  # fmt: skip


def reduce_bundle(
    folder: Path, report: Report, reduce: Callable[[Path], tuple[str, ...]]
) -> Report:
    """Reduce the golden vectors of a bundle, and return the report with notes on it."""
    notes = reduce(folder / GOLDEN)
    if notes:
        report = dataclasses.replace(report, notes=(*report.notes, *notes))
        write_report(folder, report, manifest_content(folder))
    return report


def _copy_graph(path: Path, model: onnx.ModelProto, target: Path) -> None:
    """Copy a graph. External data is embedded, or written to one file if it is large."""
    import onnx

    from attn_export.graph.load import load_model, weight_files

    files = weight_files(model, path.parent)
    if not files:
        shutil.copyfile(path, target)
    elif sum(file.stat().st_size for file in files) < _EMBEDDED_BELOW:
        onnx.save_model(load_model(path), target)
    else:
        _copy_large(path, target)


def _copy_large(path: Path, target: Path) -> None:
    """Copy a graph, with the external data of one tensor in memory at a time."""
    from onnx import TensorProto
    from onnx.external_data_helper import set_external_data

    from attn_export.graph.load import embed, load_proto, refuse_bad_data, tensors_of

    model, data = load_proto(path), target.with_name(f"{target.name}.data")
    refuse_bad_data(model, path)
    with data.open("wb") as file:
        for tensor in tensors_of(model):
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            embed(tensor, path.parent)
            file.write(bytes(-file.tell() % _ALIGNMENT))
            set_external_data(tensor, data.name, file.tell(), len(tensor.raw_data))
            file.write(tensor.raw_data)
            tensor.ClearField("raw_data")
    target.write_bytes(model.SerializeToString())


def _entry(model: onnx.ModelProto, file: GraphFile) -> dict[str, Any]:
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    return {
        "dialect": file.dialect,
        "needs": {"opset": opsets.get("ai.onnx", 0), "ir_version": model.ir_version},
        "fixed": {},
        "layouts": {},
        "dtypes": {},
        "bound": {},
        "features": list(file.features),
        "attentions": None,
        "ours": False,
        "foreign": True,
        "nodes": _origins(model),
    }


def _origins(model: onnx.ModelProto) -> dict[str, str]:
    """Return the line of the exported module that each node came from, by PyTorch's metadata."""
    lines = {}
    for node in model.graph.node:
        trace = next((p.value for p in node.metadata_props if p.key == STACK_TRACE), "")
        line = line_in(trace)
        if node.name and line:
            lines[printable(node.name, 500)] = printable(line, 500)
    return lines
