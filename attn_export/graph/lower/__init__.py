"""The forms of a graph: a rewrite of its `Attention` nodes for each dialect."""

from attn_export.graph.lower.dialects import DECODE, DIALECTS, Lowered, check_dialects, lower

__all__ = ["DECODE", "DIALECTS", "Lowered", "check_dialects", "lower"]
