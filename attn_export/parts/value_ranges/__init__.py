"""Value ranges: which values of a graph leave float16, what that does, and what mends it."""

from attn_export.optional_parts import Part

PART = Part(
    commands={"range": f"{__name__}.range_command"},
    hooks={"overflow_notes": f"{__name__}.range_flow"},
)
