"""Runs the graph checks on any ONNX file; all of them beside a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_export.bundle import MANIFEST, graph_files, read_manifest
from attn_export.graph.checks import Expected, Finding, check_graph, expected_of


def check(path: Path | str) -> list[Finding]:
    """Check an ONNX file. Beside a `manifest.json` that names it, it is held to what that says.

    Returns:
        What is wrong; empty where nothing is.

    Raises:
        GraphError: If the file cannot be read.
        BundleError: If there is a manifest and it was changed.
    """
    path = Path(path)
    expected = None
    if (path.parent / MANIFEST).is_file():
        manifest = read_manifest(path.parent)
        if path.name in manifest["graphs"]:
            expected = expected_by(manifest, path.name)
    return check_graph(path, expected)


def expected_by(manifest: dict[str, Any], name: str) -> Expected:
    """What a manifest says of one of its graphs."""
    graph = manifest["graphs"][name]
    (file,) = (file for file in graph_files(manifest) if file.name == name)
    whole = Expected(
        inputs={name: tuple(entry["shape"]) for name, entry in manifest["inputs"].items()},
        outputs={name: tuple(entry["shape"]) for name, entry in manifest["outputs"].items()},
        attentions=graph["attentions"],
        ours=graph["ours"],
    )
    return expected_of(file, whole)
