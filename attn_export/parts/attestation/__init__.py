"""Attestation: signatures over a bundle, and statements about it for other tools."""

from attn_export.parts import Part

PART = Part(
    commands={"evidence": f"{__name__}.statements"},
    verifies=f"{__name__}.attested",
)
