"""PyTorch code for the operators and functions of flash_attn and xformers, which need a GPU."""

from attn_export.optional_parts import Part

PART = Part(hooks={"TRANSLATIONS": f"{__name__}.fused_kernels"})
