"""`attn-export check`: run the graph checks on any ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.bundle.manifest import MANIFEST, read_manifest, shapes_of
from attn_export.commands.fixed_graphs import fixed_graphs
from attn_export.commands.options import fix_input_option, option, with_help
from attn_export.commands.output import echo
from attn_export.errors import GraphError, printable
from attn_export.runtimes.child import limited
from attn_export.runtimes.protocol import Limits
from attn_export.schema import GraphEntry, Manifest

if TYPE_CHECKING:
    from attn_export.graph.check_structure import CheckFinding, Expected


@with_help("Judge", "check model.onnx", "check models/mqa/model.onnx")
@option("model", metavar="MODEL.onnx", type=Path)
@fix_input_option
def check_command(model: Path, fixed: dict[str, str]) -> int:
    """Check any ONNX file; beside a manifest.json, also against its entry.

    In other files, what the ONNX standard allows is only a warning. Exit code 4 if a file
    violates the standard, or its entry.
    """
    from attn_export.graph.checks import CHECKS

    with fixed_graphs([model], fixed) as (graph,):
        findings = check(graph)
    for finding, count in grouped(findings):
        level = "warning: " if finding.is_warning else ""
        more = f" (and {count - 1} more like it)" if count > 1 else ""
        echo(printable(f"{model}: {level}{finding.check}: {finding.message}{more}"))
    if not all(finding.is_warning for finding in findings):
        return GraphError.exit_code
    passed = len(CHECKS) - len({finding.check for finding in findings})
    echo(printable(f"{model}: {passed} checks passed"))
    return 0


def check(path: Path | str, limits: Limits | None = None) -> list[CheckFinding]:
    """Return what the checks find in an ONNX file, in a child process.

    If a `manifest.json` in the same folder names the file, the checks against it run too.
    """
    from attn_export.graph.check_structure import CheckFinding

    findings = limited(f"{__name__}:check_here", str(path), limits, path=str(path))
    return [CheckFinding(*fields) for fields in findings]


def check_here(path: str) -> list[tuple[str, str, bool]]:
    """Check an ONNX file in this process; return the fields of each `CheckFinding`."""
    from attn_export.graph.checks import check_graph

    file, expected = Path(path), None
    if (file.parent / MANIFEST).is_file():
        manifest = read_manifest(file.parent)
        entry = manifest.graphs.get(file.name)
        # Graphs of a comparison have any origin: only the checks without a manifest apply.
        if entry is not None and not entry.foreign:
            expected = _expected_in(manifest, entry)
    return [(f.check, f.message, f.is_warning) for f in check_graph(file, expected)]


def grouped(findings: Sequence[CheckFinding]) -> list[tuple[CheckFinding, int]]:
    """Group findings by check and remedy; return the first of each group, and the group's size."""
    groups: dict[tuple[str, str], list[CheckFinding]] = {}
    for finding in findings:
        remedy = finding.message.rpartition(";")[2]
        groups.setdefault((finding.check, remedy), []).append(finding)
    return [(group[0], len(group)) for group in groups.values()]


def _expected_in(manifest: Manifest, graph: GraphEntry) -> Expected:
    """Return the properties that a manifest states for one of its graphs."""
    from attn_export.graph.check_structure import Expected, expected_of

    whole = Expected(
        shapes_of(manifest.inputs), shapes_of(manifest.outputs),
        attentions=graph.attentions, ours=graph.ours,
    )  # fmt: skip
    return expected_of(graph, whole)
