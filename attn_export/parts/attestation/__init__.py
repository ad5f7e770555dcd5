"""Attestation: signatures over a bundle."""

from attn_export.parts import Part

PART = Part(verifies=f"{__name__}.attested")
