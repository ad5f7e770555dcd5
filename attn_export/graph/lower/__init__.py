"""Lowering of a graph's `Attention` nodes to each dialect."""

from attn_export.graph.lower.dialects import DECODE, PREFILL, NotInHalfError, lower
from attn_export.graph.lower.ort import KERNELS, Form

__all__ = ["DECODE", "KERNELS", "PREFILL", "Form", "NotInHalfError", "lower"]
