"""Lowering of a graph's `Attention` nodes to each dialect."""

from attn_export.graph.lower.dialects import DECODE, PREFILL, NotInHalfError, lower

__all__ = ["DECODE", "PREFILL", "NotInHalfError", "lower"]
