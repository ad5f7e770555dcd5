"""Attestation: signatures over a bundle, and statements about it for other tools."""

from attn_export.parts import Part

PART = Part(
    commands={"evidence": f"{__name__}.evidence_command"},
    verifies=f"{__name__}.attested",
)
