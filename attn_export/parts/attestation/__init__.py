"""Attestation: signatures over a bundle, and statements about it for other tools."""

from attn_export.parts import Part

PART = Part(
    commands=dict.fromkeys(("evidence", "sign"), f"{__name__}.attestation_commands"),
    verifies=f"{__name__}.attested",
)
