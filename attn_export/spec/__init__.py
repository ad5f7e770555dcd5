"""`AttentionSpec`: frozen, validated description of the attention layer to build."""

from attn_export.spec.attention_spec import AttentionSpec
from attn_export.spec.fields import DERIVED
from attn_export.spec.inputs import Input, MaskSpec, Shape
from attn_export.spec.presets import VARIANTS
from attn_export.spec.rules import CACHES, DTYPES

__all__ = ["CACHES", "DERIVED", "DTYPES", "VARIANTS", "AttentionSpec", "Input", "MaskSpec", "Shape"]
