"""All checks, in order."""

from __future__ import annotations

from pathlib import Path

from attn_export.errors import one_line
from attn_export.graph import check_hygiene, check_structure
from attn_export.graph.check_model import Check, Checked, CheckFinding, Expected
from attn_export.graph.load import load_proto

CHECKS: tuple[Check, ...] = (
    check_structure.onnx_checker,
    check_structure.strict_shape_inference,
    check_structure.declared_shapes,
    check_structure.signature,
    check_structure.dynamic_axes,
    check_structure.named_axes,
    check_structure.attention_count,
    check_structure.expected_operators,
    check_structure.opset_version,
    check_structure.ir_version,
    check_hygiene.no_float64,
    check_hygiene.quantisation_scales,
    check_hygiene.no_dead_nodes,
    check_hygiene.no_duplicate_initializers,
    check_hygiene.no_host_paths,
    check_hygiene.external_data,
)

PROJECT_RULES = frozenset({
    "ir_version", "named_axes", "no_dead_nodes", "no_duplicate_initializers", "no_float64",
    "no_host_paths",
})  # fmt: skip
"""Checks of what the ONNX standard allows, and graphs that are built here do not have."""


def check_graph(path: Path, expected: Expected | None = None) -> list[CheckFinding]:
    """Run every check on an ONNX file.

    Args:
        path: The file; its external data is beside it.
        expected: The expected properties. Without them, checks that need them find nothing, and
            what breaks only `PROJECT_RULES` is a warning.

    Raises:
        GraphError: If the file cannot be read.
    """
    graph = Checked(load_proto(path), path, expected)
    return [finding for check in CHECKS for finding in _findings(check, graph)]


def _findings(check: Check, graph: Checked) -> list[CheckFinding]:
    try:
        warns = graph.expected is None and check.__name__ in PROJECT_RULES
        return [CheckFinding(check.__name__, message, warns) for message in check(graph)]
    except Exception as error:  # whatever a damaged file makes of it: names that are no text, say
        message = f"could not look at the graph ({one_line(error)}); it is damaged, export it again"
        return [CheckFinding(check.__name__, message)]
