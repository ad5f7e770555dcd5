"""Benchmarks of a bundle's graphs, and the choice of the forms that are fastest on a machine."""

from attn_export.parts import Part

PART = Part(commands=dict.fromkeys(("bench", "tune"), f"{__name__}.measuring_commands"))
