"""All checks, in order."""

from __future__ import annotations

from pathlib import Path

from attn_export.errors import one_line
from attn_export.graph.checks import axes, hygiene, operators, validity
from attn_export.graph.checks.model import Check, Checked, Expected, Finding
from attn_export.graph.load import load_proto

CHECKS: tuple[Check, ...] = (
    validity.onnx_checker,
    validity.strict_shape_inference,
    validity.declared_shapes,
    axes.signature,
    axes.dynamic_axes,
    axes.named_axes,
    operators.attention_count,
    operators.expected_operators,
    operators.opset_and_ir,
    hygiene.no_float64,
    hygiene.no_dead_nodes,
    hygiene.no_duplicate_initializers,
    hygiene.no_host_paths,
    hygiene.external_data,
)


def check_graph(path: Path, expected: Expected | None = None) -> list[Finding]:
    """Run every check on an ONNX file.

    Args:
        path: The file; its external data is beside it.
        expected: The expected properties. Without them, checks that need them find nothing.

    Raises:
        GraphError: If the file cannot be read.
    """
    graph = Checked(load_proto(path), path, expected)
    return [finding for check in CHECKS for finding in _findings(check, graph)]


def _findings(check: Check, graph: Checked) -> list[Finding]:
    try:
        return [Finding(check.__name__, message) for message in check(graph)]
    except Exception as error:  # whatever a damaged file makes of it: names that are no text, say
        told = f"could not look at the graph ({one_line(error)}); it is damaged, export it again"
        return [Finding(check.__name__, told)]
