"""Writers of the forms of a graph in the `ort` dialect, for a process with limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attn_export.dialect_names import ORT, ORT_NEEDED
from attn_export.graph.load import load_graph
from attn_export.graph.lower import KERNELS, Form, lower
from attn_export.graph.save import save_beside_weights, save_graphs
from attn_export.parts.benchmarks.query_blocks import in_blocks

PRODUCTS = Form("products", products=True)
WHOLE_ROWS = Form("whole rows of scores", whole_rows=True)
_OF_NEWER_RELEASES = (*(in_blocks(block, by_kernel=True) for block in (64, 128, 256)), WHOLE_ROWS)
"""The forms that need ONNX Runtime 1.31."""

FORMS = (
    KERNELS, *(in_blocks(block) for block in (64, 128, 256, 512)), PRODUCTS, *_OF_NEWER_RELEASES
)  # fmt: skip
"""The forms that `tune` measures, first the one of `build`."""


def write_forms(model: str, output: str, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Write every form of a graph in the `ort` dialect, if there are several.

    Returns:
        The name of each written file, by the file name of the graph and the name of the form.
    """
    files: dict[str, dict[str, str]] = {name: {} for name in names}
    models: dict[str, ir.Model] = {}
    seen: set[object] = set()
    source = load_graph(Path(model))
    for number, form in enumerate(FORMS):
        for lowered in lower(source, ORT, form).values():
            name, nodes = lowered.file.name, _structure(lowered.model)
            # A form may leave a graph unchanged: then it is no further form of it.
            if name in files and (name, nodes) not in seen:
                seen.add((name, nodes))
                files[name][form.name] = file = f"{number}.{name}"
                models[file] = lowered.model
    # A graph with only one form needs no measurement.
    by_graph = {name: forms for name, forms in files.items() if len(forms) > 1}
    file_names = {file for forms in by_graph.values() for file in forms.values()}
    if file_names:
        save_graphs({file: models[file] for file in file_names}, Path(output))
    return by_graph


def replace_forms(model: str, output: str, forms: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Write graphs in the `ort` dialect in other forms.

    Returns:
        By the file name of the graph: its features, the names of its nodes, and the least version
        of ONNX Runtime.
    """
    facts: dict[str, dict[str, Any]] = {}
    source = load_graph(Path(model))
    for form in FORMS:
        needs = "1.31" if form in _OF_NEWER_RELEASES else ORT_NEEDED
        wanted = [name for name, chosen in forms.items() if chosen == form.name]
        for lowered in lower(source, ORT, form).values() if wanted else ():
            if lowered.file.name in wanted:
                save_beside_weights(lowered.model, Path(output) / lowered.file.name)
                nodes = [str(node.name) for node in lowered.model.graph]
                facts[lowered.file.name] = {
                    "features": list(lowered.file.features), "nodes": nodes, "needs": needs,
                }  # fmt: skip
    return facts


def _structure(model: ir.Model) -> tuple[object, ...]:
    """Return operators and input names of all nodes; names of constants state their values."""
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    return tuple((node.op_type, *(v.name for v in node.inputs if v is not None)) for node in nodes)
