"""Whole models: built from a checkpoint, or exported by others, and judged as it runs."""

from attn_export.parts import Part

PART = Part(
    commands={"generate": f"{__name__}.generate_command"},
    compares=f"{__name__}.compare_models",
    builds=f"{__name__}.build.model",
    generates=f"{__name__}.generation",
)
