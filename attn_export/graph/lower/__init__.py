"""The forms of a graph: a rewrite of its `Attention` nodes for each dialect."""

from attn_export.graph.lower.dialects import DECODE, Lowered, lower
from attn_export.graph.lower.ort import BLOCKS, KERNELS, Form

__all__ = ["BLOCKS", "DECODE", "KERNELS", "Form", "Lowered", "lower"]
