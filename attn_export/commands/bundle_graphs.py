"""Lowering and checks of the graphs of a bundle, and its manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.dialect_names import (
    CUDA,
    DIALECTS,
    LINEAR_OPSET,
    MODEL,
    ORT,
    ORT_NEEDED,
    ORT_OF_LINEAR,
    PORTABLE,
    graph_name,
)
from attn_export.errors import ExportError, GraphError
from attn_export.graph import IrGraph
from attn_export.results import Verdict
from attn_export.schema import GraphFile, TensorSignature
from attn_export.system_info import versions

if TYPE_CHECKING:
    import onnx_ir as ir

    from attn_export.export.subject import Subject
    from attn_export.graph.check_structure import Expected

ALL = "all"
_CAST_NOTE = (
    "weights, inputs and outputs are bfloat16 and are cast to float32 in the graph: few runtimes "
    "compute in bfloat16, and ONNX Runtime on the CPU does not"
)
_CUDA_NOTE = (
    "the graphs in the cuda dialect compute in bfloat16: only a GPU can prove their numbers"
)


def first_graphs(dialects: Sequence[str]) -> list[GraphFile]:
    """Return the graph that every build has, so that runtimes can start before the export."""
    first = DIALECTS[0] if ALL in dialects else dialects[0]
    return [GraphFile(graph_name(first), first)]


def lower_all(
    exported: IrGraph, dialects: Sequence[str], *, rounds_inputs: bool = False
) -> tuple[list[IrGraph], tuple[str, ...]]:
    """Lower the canonical graph to dialects.

    `rounds_inputs`: Whether products with integers round their inputs in the dialect ``ort``. Then
        graphs that do not are there, too, after those that do.

    Returns:
        The graphs, and notes on the dialects that do not fit.
    """
    from attn_export.graph.ir_helpers import nodes_of

    graphs: list[IrGraph] = []
    notes: list[str] = []
    in_place = bool(nodes_of(exported.model, "TensorScatter"))
    for dialect in DIALECTS if ALL in dialects else dialects:
        if dialect == CUDA and dialect not in dialects and not in_place:
            continue  # it is for caches that are written in place
        try:
            graphs += _lowered(exported, dialect, rounds_inputs=rounds_inputs)
        except (ExportError, GraphError) as error:
            if dialect in dialects:
                raise
            if dialect == CUDA and isinstance(error, GraphError):  # most graphs do not fit it
                continue
            notes.append(f"not in the {dialect} dialect: {error}")
    return graphs, (*notes, *cache_notes(exported.model))


WRITING = ("ScatterElements", "ScatterND", "Where")
"""Operators as which `index_copy`, `index_put`, `slice_scatter` and `where` are exported."""

_MOVING = ("Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that may lie between a cache and the node that writes it."""


def cache_notes(model: ir.Model) -> Iterator[str]:
    """Yield notes on caches that the module writes itself: no operator is known to do the same."""
    from attn_export.graph.ir_helpers import nodes_of, trace_back

    for node in (node for op_type in WRITING for node in nodes_of(model, op_type)):
        old = node.inputs[1:] if node.op_type == "Where" else node.inputs[:1]
        sources = [trace_back(x, _MOVING) for x in old if x is not None]
        source = next((x for x in sources if x.is_graph_input() and len(x.shape or ()) > 2), None)
        written = [node.outputs[0]]
        for value in written:
            written += [u.node.outputs[0] for u in value.uses() if u.node.op_type in _MOVING]
        is_read = any(use.node.op_type not in _MOVING for x in written for use in x.uses())
        if source is not None and is_read and any(x.is_graph_output() for x in written):
            yield (
                f"{source.name} is written at indices of the module's own ({node.op_type}), so it "
                "is not bound in place, and there is no graph for decoding; a layer of "
                'AttentionSpec(cache="in-place") writes it from past_length on'
            )


def _lowered(exported: IrGraph, dialect: str, *, rounds_inputs: bool = False) -> Iterable[IrGraph]:
    """Return the graphs of a dialect. Those of `CUDA` compute in bfloat16 if the subject has it."""
    from attn_export.graph.lower import NotInHalfError, lower

    try:
        graphs = lower(exported.model, dialect, packs_bytes=rounds_inputs)
    except NotInHalfError:
        if exported.in_bfloat16 is None:
            raise
        graphs = lower(exported.in_bfloat16(), dialect)
    made = [dataclasses.replace(graph, origins=exported.origins) for graph in graphs.values()]
    if dialect != ORT or not rounds_inputs:
        return made
    from attn_export.graph.accuracy_level import with_rounded_inputs

    both = [each for graph in made for each in with_rounded_inputs(graph)]
    return sorted(both, key=lambda graph: not graph.file.exact)


def bfloat16_notes(graphs: Sequence[IrGraph]) -> tuple[str, ...]:
    """Return notes on the dtypes in which the graphs of a bfloat16 subject compute."""
    on_cuda = any(graph.file.dialect == CUDA for graph in graphs)
    return (_CAST_NOTE, _CUDA_NOTE) if on_cuda else (_CAST_NOTE,)


def save_checked(graphs: Sequence[IrGraph], expected: Expected, folder: Path) -> None:
    """Write the graphs and their weights, and check each written file."""
    from attn_export.graph.check_structure import expected_of
    from attn_export.graph.checks import check_graph
    from attn_export.graph.save import save_graphs

    save_graphs({graph.file.name: graph.model for graph in graphs}, folder)
    for graph in graphs:
        findings = check_graph(folder / graph.file.name, expected_of(graph.file, expected))
        if findings:
            first, *more = (f"{finding.check}: {finding.message}" for finding in findings)
            where = "" if graph.file.name == MODEL else f"{graph.file.name}: "
            raise GraphError(where + first + (f" (and {len(more)} more findings)" if more else ""))


def remove_refuted(
    folder: Path,
    graphs: Sequence[IrGraph],
    verdicts: Sequence[Verdict],
    dialects: Sequence[str],
) -> dict[str, str]:
    """Remove graphs in which attention was recognised that the module does not compute.

    Graphs of a dialect that the user named are kept, so that the build fails.

    Returns:
        A note on each removed graph, by its file name.
    """
    notes: dict[str, str] = {}
    for graph in graphs:
        name = graph.file.name
        wrong = [v for v in verdicts if v.graph == name and v.status != "passed"]
        if graph.recognised and wrong and graph.file.dialect not in dialects:
            (folder / name).unlink()
            notes[name] = (
                f"not in the {graph.file.dialect} dialect: as one node, the attention that the "
                f"module writes out gives other numbers in {wrong[0].case}"
            )
    return notes


def manifest_of(
    name: str,
    subject: Subject,
    graphs: Sequence[IrGraph],
    dtypes: Mapping[str, str],
) -> dict[str, Any]:
    """Return the content of a bundle's manifest, as `write_manifest` takes it."""
    expected = subject.expected()
    content: dict[str, Any] = {
        "name": name,
        "versions": versions(),
        "graphs": {graph.file.name: _graph_entry(graph, expected) for graph in graphs},
        "inputs": _input_signatures(subject),
        "outputs": _output_signatures(subject, dtypes),
        "weights": "linear weights are stored [in, out], as MatMul reads them",
    }
    from attn_export.cases.draw import largest

    interface, caches = subject.interface(), dict(subject.roles.caches)
    for graph in graphs:
        caches |= graph.file.bound
    further: dict[str, Any] = {
        "bounds": {
            axis: [allowed[0], largest(allowed)] for axis, allowed in interface.all_bounds.items()
        },
        "caches": caches,
        "kept": dict(subject.kept or {}),
    }
    further["roles"] = subject.roles.with_total(subject.sums)
    return content | {key: value for key, value in further.items() if value}


def _graph_entry(graph: IrGraph, expected: Expected) -> dict[str, Any]:
    """Return the manifest's entry of a graph; `expected` is that of the standard dialect."""
    from attn_export.graph.check_structure import expected_of

    file, expected_here = graph.file, expected_of(graph.file, expected)
    needs: dict[str, object] = {
        "opset": graph.model.opset_imports[""],
        "ir_version": graph.model.ir_version,
    }
    if file.dialect != PORTABLE:
        newest = graph.model.opset_imports[""] >= LINEAR_OPSET
        needs["onnxruntime"] = ORT_OF_LINEAR if newest else ORT_NEEDED
    lines = {
        str(node.name): _origin_of(str(node.name), graph.origins) for node in graph.model.graph
    }
    return {
        **{
            name: getattr(file, name)
            for name in GraphFile.__struct_fields__
            if name not in ("name", *([] if file.exact else ["exact"]))
        },
        "needs": needs,
        "attentions": expected_here.attentions,
        "ours": expected_here.ours,
        "nodes": {name: origin for name, origin in lines.items() if origin},
    }


def _origin_of(name: str, origins: Mapping[str, str]) -> str:
    """Return the origin of a node, or of the node that it was lowered from, or ""."""
    while name and name not in origins:
        name = name.rpartition("/")[0]
    return origins.get(name, "")


def _input_signatures(subject: Subject) -> dict[str, TensorSignature]:
    """Return the dtype and shape of each input, by name."""
    inputs = subject.input_descriptions().items()
    return {name: TensorSignature(input_.dtype, input_.shape) for name, input_ in inputs}


def _output_signatures(subject: Subject, dtypes: Mapping[str, str]) -> dict[str, TensorSignature]:
    """Return the dtype and shape of each output, by name.

    `subject`: The subject, for the shapes.
    """
    return {
        name: TensorSignature(dtypes[name], shape)
        for name, shape in subject.expected().outputs.items()
    }
