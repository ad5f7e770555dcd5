"""The forms of a graph: a rewrite of its `Attention` nodes for each dialect."""

from attn_export.graph.lower.dialects import DIALECTS, lower

__all__ = ["DIALECTS", "lower"]
