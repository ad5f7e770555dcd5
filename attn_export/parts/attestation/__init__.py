"""Attestation: signatures over a bundle."""

from attn_export.optional_parts import Part

PART = Part(hooks={"attested": f"{__name__}.attested"})
