"""PyTorch code for the operators and functions of flash_attn and xformers, which need a GPU."""

from attn_export.parts import Part

PART = Part(translates=f"{__name__}.fused_kernels")
