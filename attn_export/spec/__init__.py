"""`AttentionSpec`: what to build, as frozen, validated values."""

from attn_export.spec.attention import VARIANTS, AttentionSpec, Shape
from attn_export.spec.fields import DERIVED
from attn_export.spec.mask import MaskSpec
from attn_export.spec.rules import CACHES, DTYPES

__all__ = ["CACHES", "DERIVED", "DTYPES", "VARIANTS", "AttentionSpec", "MaskSpec", "Shape"]
