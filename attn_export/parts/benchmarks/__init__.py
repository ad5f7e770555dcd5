"""Benchmarks of a bundle's graphs."""

from attn_export.optional_parts import Part

PART = Part(commands={"bench": f"{__name__}.measuring_commands"})
