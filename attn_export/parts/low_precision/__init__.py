"""Caches and activations of few bits: the known mistakes in them."""

from attn_export.parts import Part

PART = Part(mistakes=(f"{__name__}.in_activations", f"{__name__}.in_caches"))
