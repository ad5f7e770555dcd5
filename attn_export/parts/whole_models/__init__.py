"""Whole models: built from a checkpoint, or exported by others, and judged as it runs."""

from attn_export.optional_parts import Part

PART = Part(
    commands={
        "generate": f"{__name__}.generate_command",
        "embed": f"{__name__}.embed_command",
    },
    hooks={
        "compare_models": f"{__name__}.compare_models",
        "compare_quantised": f"{__name__}.compare_quantised",
        "subject_of_model": f"{__name__}.build.model",
        "generate": f"{__name__}.generation",
    },
)
