"""The graph that a comparison judges: its file, its form, its names, and its bundle."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import PAGE, REPORT, write_manifest
from attn_export.errors import GraphError, UsageError, printable
from attn_export.report.data import to_json
from attn_export.report.html import to_html
from attn_export.results import GraphFile, Report
from attn_export.runtimes.child import limited
from attn_export.runtimes.protocol import Limits
from attn_export.source_location import line_in
from attn_export.system_info import versions

if TYPE_CHECKING:
    import onnx

    from attn_export.graph.signature_check import TensorNames
    from attn_export.jobs.reference import Reference


@dataclasses.dataclass(frozen=True)
class ComparedGraph:
    """The graph that is judged.

    Attributes:
        path: Its file.
        model: Its content, without external data.
        file: The description of the graph: layouts, bound buffers, sizes.
        names: Its names of inputs and outputs.
    """

    path: Path
    model: onnx.ModelProto
    file: GraphFile
    names: TensorNames | None = None

    @classmethod
    def read(cls, path: Path, limits: Limits) -> ComparedGraph:
        """Read a graph.

        Args:
            path: The file.
            limits: The limits of the process that reads it.

        Raises:
            GraphError: If it cannot be read.
        """
        from attn_export.graph.load import load_proto, refuse_bad_data
        from attn_export.graph.requirements import dialect_of

        if not path.is_file():
            raise GraphError(f"cannot read {path}: no such file")
        model = load_proto(path)
        refuse_bad_data(model, path)
        module = "attn_export.graph.requirements:foreign_features"
        found = tuple(limited(module, str(path), limits, path=str(path)))
        return cls(path, model, GraphFile(path.name, dialect_of(found), features=found))

    def matched_to(self, reference: Reference, names: Mapping[str, str]) -> ComparedGraph:
        """Return the graph with its names, and the axes that have one size in it.

        Args:
            reference: The module or graph that it is compared with.
            names: Its names by those of the reference, as the user gave them.

        Raises:
            UsageError: If `names` names what is not there.
            GraphError: If its inputs or outputs are not those of the reference.
        """
        from attn_export.graph.signature_check import (
            TensorNames,
            TensorSpec,
            inputs_of,
            match_graph_file,
            matched_names,
        )

        inputs = [value.name for value in inputs_of(self.model)]
        outputs = [value.name for value in self.model.graph.output]
        _check_names(self.path, names, reference, {*inputs, *outputs})
        shown, whose = str(self.path), reference.whose
        found = TensorNames(
            matched_names(shown, "inputs", inputs, list(reference.inputs), names, whose),
            matched_names(shown, "outputs", outputs, list(reference.outputs), names, whose),
        )
        wanted_inputs = {
            found.inputs[n]: TensorSpec(wanted.shape, wanted.dtype)
            for n, wanted in reference.inputs.items()
        }
        wanted_outputs = {
            found.outputs[n]: TensorSpec(shape, reference.dtypes[n])
            for n, shape in reference.outputs.items()
        }
        file = match_graph_file(
            self.model, shown, self.file, wanted_inputs, wanted_outputs, reference.whose
        )
        return dataclasses.replace(self, file=file, names=found)


def _check_names(
    path: Path, names: Mapping[str, str], reference: Reference, theirs: set[str]
) -> None:
    ours = {*reference.inputs, *reference.outputs}
    for name, other in names.items():
        if name not in ours or other not in theirs:
            where, unknown, known = (
                (reference.whose, name, ours) if name not in ours else (path, other, theirs)
            )
            raise UsageError(
                f"names: {where} has no input or output {printable(unknown, 60)}; choose from "
                f"{printable(', '.join(sorted(known)), 150)}"
            )


# -- the bundle of a comparison: the graph as it is, its cases, their truth, and the report -----

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
        "dtypes": {},
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
