"""Variants of a layer: mha, mqa, gqa and mla, and the fields that each has by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attn_export.errors import SpecError
from attn_export.spec.fields import AttentionFields
from attn_export.spec.rules import divisors

VARIANTS: Final = ("mha", "mqa", "gqa", "mla")

USUAL: Final[Mapping[str, Any]] = {
    "embed_dim": 512, "num_heads": 8, "causal": True, "attn_mask": "bool[B,1,1,S]",
    "cache": "append",
}  # fmt: skip
"""Values of fields that all variants have by default."""


def usual_fields(name: str, spec: AttentionFields) -> dict[str, Any]:
    """Return the fields of a variant that depend on E and H."""
    heads = spec.num_heads
    # MQA and MLA have one key/value head, and MHA has H. GQA has the largest divisor of H up to
    # H / 4, but at least 2 if H is even: 8 -> 2, 16 -> 4, 14 -> 2.
    quarter = max(d for d in divisors(heads) if d <= max(2, heads // 4))
    fields: dict[str, Any] = {"num_kv_heads": {"mha": heads, "gqa": quarter}.get(name, 1)}
    if name == "mla":
        # The proportions of DeepSeek-V2: one third of the D elements of a query is rotated, and the
        # latent is four times as wide as the other two thirds.
        plain = max(spec.embed_dim // heads, 4)
        rotated = plain // 4 * 2
        fields |= {
            "head_dim": plain + rotated, "v_head_dim": plain, "kv_latent_dim": 4 * plain,
            "rotary": "interleaved", "rotary_dim": rotated, "bias": "none",
        }  # fmt: skip
    return fields


def check_variant(name: str, spec: AttentionFields) -> None:
    """Check that the dimensions of a spec are those of its variant."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    is_variant = {"mha": kv_heads == heads, "mqa": kv_heads == 1, "mla": spec.kv_latent_dim > 0}
    if not is_variant.get(name, 1 < kv_heads < heads):
        raise SpecError(
            f"{name} with num_heads {heads} and num_kv_heads {kv_heads}: MHA has as "
            "many of both, MQA one K/V head, GQA a number between, MLA a latent; choose another "
            "variant"
        )
