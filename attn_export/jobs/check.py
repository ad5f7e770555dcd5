"""Job that runs the graph checks on any ONNX file; all of them beside a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_export.bundle import MANIFEST, graph_files, read_manifest
from attn_export.graph.check_structure import CheckFinding, Expected, expected_of
from attn_export.graph.checks import check_graph
from attn_export.runtimes.child import limited
from attn_export.runtimes.protocol import Limits


def check(path: Path | str, limits: Limits | None = None) -> list[CheckFinding]:
    """Check an ONNX file. A `manifest.json` beside it that names it is compared too.

    Args:
        path: The file.
        limits: The time and memory of the process that reads it.

    Returns:
        The findings; empty if there are none.

    Raises:
        GraphError: If the file cannot be read within `limits`.
        BundleError: If there is a manifest and it was changed.
    """
    found = limited(f"{__name__}:checked", str(path), limits, path=str(path))
    return [CheckFinding(*finding) for finding in found]


def checked(path: str) -> list[tuple[str, str, bool]]:
    """Return the findings in an ONNX file, in this process: the fields of each `CheckFinding`."""
    return [(f.check, f.message, f.is_warning) for f in _findings(Path(path))]


def grouped(findings: Sequence[CheckFinding]) -> list[tuple[CheckFinding, int]]:
    """Return the first of all findings with one check and one remedy, and how many there are."""
    found: dict[tuple[str, str], list[CheckFinding]] = {}
    for finding in findings:
        remedy = finding.message.rpartition(";")[2]
        found.setdefault((finding.check, remedy), []).append(finding)
    return [(alike[0], len(alike)) for alike in found.values()]


def _findings(path: Path) -> list[CheckFinding]:
    expected = None
    if (path.parent / MANIFEST).is_file():
        manifest = read_manifest(path.parent)
        entry = manifest["graphs"].get(path.name)
        # The graphs of a comparison are as others made them.
        if entry is not None and not entry.get("foreign"):
            expected = expected_by(manifest, path.name)
    return check_graph(path, expected)


def expected_by(manifest: dict[str, Any], name: str) -> Expected:
    """Return a manifest's expected properties of one of its graphs.

    Args:
        manifest: The manifest.
        name: The file name of the graph.
    """
    graph = manifest["graphs"][name]
    (file,) = (file for file in graph_files(manifest) if file.name == name)
    whole = Expected(
        inputs={name: tuple(entry["shape"]) for name, entry in manifest["inputs"].items()},
        outputs={name: tuple(entry["shape"]) for name, entry in manifest["outputs"].items()},
        attentions=graph["attentions"],
        ours=graph["ours"],
    )
    return expected_of(file, whole)
