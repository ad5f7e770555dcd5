"""Caches and activations of few bits: their truth, and known mistakes in them."""

from attn_export.parts import Part

PART = Part(
    rounds=f"{__name__}.off_ties",
    mistakes=(f"{__name__}.in_activations", f"{__name__}.in_caches"),
)
