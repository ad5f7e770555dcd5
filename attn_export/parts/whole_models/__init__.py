"""Whole models: built from a checkpoint, or exported by others, and judged as it runs."""

from attn_export.parts import Part

PART = Part(compares=f"{__name__}.compare_models", builds=f"{__name__}.built_model")
