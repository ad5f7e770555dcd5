"""Our own graph in the forms that a dialect has for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attn_export.graph.load import load_graph
from attn_export.graph.lower import DECODE, lower
from attn_export.graph.save import save_graph
from attn_export.results import GraphFile


def lowered_forms(canonical: Path, dialect: str, folder: Path) -> dict[str, GraphFile]:
    """Write a canonical graph in a dialect.

    Args:
        canonical: The graph.
        dialect: One of `DIALECTS`.
        folder: Where to write.

    Returns:
        By ``""`` the form for any length, and by ``"decode"`` that for one new token, where the
        dialect has one.

    Raises:
        GraphError: If the dialect cannot express the graph.
    """
    written = {}
    for key, form in lower(load_graph(canonical), dialect).items():
        name = f"{canonical.stem}.{'.'.join(filter(None, (dialect, key)))}.onnx"
        save_graph(form.model, folder / name)
        written[key] = form.as_file(name, dialect)
    return written


def form_for(forms: Mapping[str, GraphFile], sizes: Mapping[str, int]) -> GraphFile:
    """Return the form for these sizes; a specialised form takes precedence."""
    special = forms.get(DECODE)
    return special if special is not None and special.takes(sizes) else forms[""]
