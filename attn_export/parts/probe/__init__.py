"""Probes: small graphs that show how a runtime interprets attention."""

from attn_export.optional_parts import Part

PART = Part(
    commands={"probe": f"{__name__}.probe_command"},
    references={"pytorch": f"{__name__}.pytorch"},
)
