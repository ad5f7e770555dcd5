"""Whole models: exports of a checkpoint, compared with the model as transformers runs it."""

from attn_export.parts import Part

PART = Part(compares=f"{__name__}.compare_models")
