"""The dialect `cuda`: graphs that launch the fewest kernels on CUDA in half precision."""

from attn_export.optional_parts import Part

PART = Part(dialects={"cuda": f"{__name__}.cuda"})
