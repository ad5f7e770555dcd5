"""The graphs of a bundle: one in every dialect that fits, of the same weights, each checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.bundle import MODEL
from attn_export.errors import GraphError, UsageError
from attn_export.results import GraphFile
from attn_export.runtimes.ort_cpu import ORT_NEEDED

if TYPE_CHECKING:
    import onnx_ir as ir

    from attn_export.export.export import Exported
    from attn_export.graph.check_model import Expected

ALL = "all"
DIALECTS = ("standard", "portable", "ort")
"""Spelled out: what `graph.lower` imports would make the command line slow."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A graph in a dialect.

    Attributes:
        file: Its name and description.
        model: The graph.
        expected: Its expected properties.
        recognised: Whether attention that is written out in the module is one node here: it must
            be judged before it may stay.
    """

    file: GraphFile
    model: ir.Model
    expected: Expected
    recognised: bool = False


def check_dialects(names: Sequence[str]) -> tuple[str, ...]:
    """Return the named dialects, each once; those of ``"all"`` are optional.

    Raises:
        UsageError: If there is no dialect of a name.
    """
    for name in names:
        if name not in (*DIALECTS, ALL):
            raise UsageError(f"unknown dialect {name!r}; choose from {', '.join(DIALECTS)}, {ALL}")
    return tuple(dict.fromkeys(names))


def first_graphs(dialects: Sequence[str]) -> list[GraphFile]:
    """Return the graph that every export produces: its runtimes can start early."""
    first = DIALECTS[0] if ALL in dialects else dialects[0]
    return [GraphFile(file_name(first), first)]


def forms_of(
    exported: Exported, expected: Expected, dialects: Sequence[str]
) -> tuple[list[Form], tuple[str, ...]]:
    """Return the graph in every dialect.

    Args:
        exported: The canonical graph.
        expected: Its expected properties.
        dialects: As `check_dialects` gives them.

    Returns:
        The graphs, and notes on the dialects that do not fit.

    Raises:
        GraphError: If a dialect that is named does not fit.
    """
    forms: list[Form] = []
    notes: list[str] = []
    for dialect in DIALECTS if ALL in dialects else dialects:
        try:
            forms += _in_dialect(exported.model, expected, dialect)
        except GraphError as error:
            if dialect in dialects:
                raise
            notes.append(f"not in the {dialect} dialect: {error}")
    return forms, tuple(notes)


def _in_dialect(model: ir.Model, expected: Expected, dialect: str) -> list[Form]:
    from attn_export.graph.check_model import expected_of
    from attn_export.graph.lower import lower

    found = []
    for phase, lowered in lower(model, dialect).items():
        file = lowered.as_file(file_name(dialect, phase), dialect)
        whole = expected_of(file, expected)
        found.append(Form(file, lowered.model, whole, recognised=lowered.recognised > 0))
    return found


def file_name(dialect: str, phase: str = "") -> str:
    """Return the file name of a graph: ``model.onnx``, ``model.ort.decode.onnx``.

    Args:
        dialect: The dialect.
        phase: ``"decode"``, or empty for the form of any phase.
    """
    parts = ["" if dialect == "standard" else dialect, phase]
    return ".".join([Path(MODEL).stem, *filter(None, parts), "onnx"])


def save_checked(forms: Sequence[Form], folder: Path) -> None:
    """Write the graphs and their weights, and check each written file.

    Args:
        forms: The graphs.
        folder: The folder of the bundle.

    Raises:
        GraphError: If a check refuses one.
    """
    from attn_export.graph.checks import check_graph
    from attn_export.graph.save import save_graphs

    save_graphs({form.file.name: form.model for form in forms}, folder)
    for form in forms:
        findings = check_graph(folder / form.file.name, form.expected)
        if findings:
            first, *more = (f"{finding.check}: {finding.message}" for finding in findings)
            where = "" if form.file.name == MODEL else f"{form.file.name}: "
            raise GraphError(where + first + (f" (and {len(more)} more findings)" if more else ""))


def manifest_entry(form: Form, origins: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest's entry of a graph.

    Args:
        form: The graph.
        origins: Where each node of the canonical graph came from.
    """
    needs: dict[str, object] = {
        "opset": form.model.opset_imports[""],
        "ir_version": form.model.ir_version,
    }
    if form.file.dialect != "portable":
        needs["onnxruntime"] = ORT_NEEDED
    named = {str(node.name): _origin(str(node.name), origins) for node in form.model.graph}
    return {
        "dialect": form.file.dialect,
        "needs": needs,
        "fixed": dict(form.file.fixed),
        "layouts": {name: list(order) for name, order in form.file.layouts.items()},
        "bound": dict(form.file.bound),
        "features": list(form.file.features),
        "attentions": form.expected.attentions,
        "ours": form.expected.ours,
        "nodes": {name: origin for name, origin in named.items() if origin},
    }


def _origin(name: str, origins: Mapping[str, str]) -> str:
    """Return the origin of a node, or of the node that it replaces: ``Attention/MatMul``."""
    while name and name not in origins:
        name = name.rpartition("/")[0]
    return origins.get(name, "")
