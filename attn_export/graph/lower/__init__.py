"""The forms of a graph: a rewrite of its `Attention` nodes for each dialect."""

from attn_export.graph.lower.dialects import DECODE, Lowered, lower

__all__ = ["DECODE", "Lowered", "lower"]
