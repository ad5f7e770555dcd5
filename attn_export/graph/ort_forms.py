"""The forms of a graph in the `ort` dialect, as files; all run in a process with limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attn_export.dialect_names import ORT
from attn_export.graph.load import load_graph
from attn_export.graph.lower import FORMS, lower
from attn_export.graph.save import save_beside_weights, save_graphs


def write_forms(model: str, output: str, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Write every form of a graph in the `ort` dialect, if there are several.

    Args:
        model: The graph in the standard dialect.
        output: The folder to write to.
        names: The file names of the graphs to make.

    Returns:
        The names of the files, by the name of the graph and that of the form.
    """
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    models: dict[str, ir.Model] = {}
    seen: set[object] = set()
    source = load_graph(Path(model))
    for number, form in enumerate(FORMS):
        for one in lower(source, ORT, form).values():
            name, nodes = one.file.name, _nodes(one.model)
            # A form changes one of the graphs, or none if no attention can have it.
            if name in found and (name, nodes) not in seen:
                seen.add((name, nodes))
                found[name][str(form)] = file = f"{number}.{name}"
                models[file] = one.model
    # A graph with one form has nothing to be measured against.
    several = {name: forms for name, forms in found.items() if len(forms) > 1}
    wanted = {file for forms in several.values() for file in forms.values()}
    if wanted:
        save_graphs({file: models[file] for file in wanted}, Path(output))
    return several


def replace_forms(model: str, output: str, forms: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Write graphs in the `ort` dialect in other forms.

    Args:
        model: The graph in the standard dialect.
        output: The folder of the bundle to write to.
        forms: The name of the form, by the file name of the graph.

    Returns:
        By the file name: its features, the names of its nodes, and the least version of ONNX
        Runtime.
    """
    found: dict[str, dict[str, Any]] = {}
    source = load_graph(Path(model))
    for form in FORMS:
        wanted = [name for name, chosen in forms.items() if chosen == str(form)]
        for one in lower(source, ORT, form).values() if wanted else ():
            if one.file.name in wanted:
                save_beside_weights(one.model, Path(output) / one.file.name)
                nodes = [str(node.name) for node in one.model.graph]
                found[one.file.name] = {
                    "features": list(one.file.features), "nodes": nodes, "needs": form.needs,
                }  # fmt: skip
    return found


def _nodes(model: ir.Model) -> tuple[object, ...]:
    """Return operators and inputs of all nodes; the name of a constant says its value."""
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    return tuple((node.op_type, *(v.name for v in node.inputs if v is not None)) for node in nodes)
