"""Checkpoints of integers: GPTQ, AWQ, compressed-tensors and bitsandbytes' int8."""

from attn_export.parts import Part

PART = Part(checkpoints=f"{__name__}.quantised_source")
