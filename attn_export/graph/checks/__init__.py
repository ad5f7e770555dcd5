"""Graph checks: each one a function that can fail alone and names what to do."""

from attn_export.graph.checks.model import Expected, Finding, expected_of
from attn_export.graph.checks.run import CHECKS, check_graph

__all__ = ["CHECKS", "Expected", "Finding", "check_graph", "expected_of"]
